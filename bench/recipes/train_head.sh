#!/bin/sh
# Train a head for the default model on one GPU: bench/recipes/train_head.sh WORK PROMPTS.jsonl…
# Prompts: bench/recipes/training_prompts.py, GSM8K's training questions and the Vicuna questions; docs/training.md
# lists the prompts and variables of the shipped head.
# SECONDS_OF_TRAINING: time of the phase `train`, from which the number of updates is chosen. STEPS: number of
# updates, which repeats a run elsewhere. An interrupted run resumes with the same command.
# BEGIN=FOLDER continues the training of a head, with a wider MLP if INTERMEDIATE is larger and with draft ids chosen
# from the new text.
# KEEP=1 (the default) keeps the target's features on the GPU: 101 GB for 22 million tokens. KEEP=0 recomputes them
# in each epoch.
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
