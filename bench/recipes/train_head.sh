#!/bin/sh
# A head for the default model, unattended, on one GPU: bench/recipes/train_head.sh WORK PROMPTS.jsonl…
# Prompts: bench/recipes/training_prompts.py, GSM8K's training questions and the Vicuna questions (docs/notebook/2026-11.md says what the
# shipped head was made of). BEGIN=FOLDER goes on from a head, whose MLP may grow and whose ids are chosen anew.
# With SECONDS_OF_TRAINING as many updates are made as fit; STEPS alone repeats a run. Run again after a cut: it
# goes on. What the target says of 22 million tokens takes 101 GB of the GPU's memory: KEEP=0 computes it anew.
set -eu
work=$1
shift
export PYTHONUNBUFFERED=1 PYTHONPATH="${PYTHONPATH:-src}"
if [ -n "${SECONDS_OF_TRAINING:-}" ]; then long="--seconds $SECONDS_OF_TRAINING"; else long="--steps ${STEPS:-5000}"; fi
if [ -n "${BEGIN:-}" ]; then long="$long --begin $BEGIN --new-ids 1"; fi
# shellcheck disable=SC2086
exec "${PYTHON:-python3}" -m draftproof train "${MODEL:-smollm2-135m}" --work "$work" --prompts "$@" \
    --verifier HuggingFaceTB/SmolLM2-135M-Instruct --max-num-seqs 1024 \
    --tokens "${TOKENS:-22000000}" --shard 8192 --held-out 96 --prompt-tokens 960 --output-tokens 256 \
    --written 0.2 --systems 0 --opened 0.6 --shown 0.1 --follow 0 --greedy 0.15 \
    --draft-vocab "${DRAFT_VOCAB:-16384}" --intermediate-size "${INTERMEDIATE:-4608}" --bits "${BITS:-8}" --max-len 1216 --keep "${KEEP:-1}" \
    --feature-norm each --learning-rate 0.01 --warmup 100 --decay 0.65 --overlap 8 --prompt-weight 0.15 --prompt-rows 4 \
    --eval-every 1600 --eval-texts 96 $long ${MORE:-}
