#!/bin/sh
# The head of the default model, unattended, on one GPU: bench/train_head.sh WORK PROMPTS.jsonl…
# The shipped one was made so, from GSM8K's training questions and the Vicuna questions, on an H200 in 189 s of
# writing and 236 s of training (both beside other work). With SECONDS_OF_TRAINING as many updates are made as
# fit; STEPS alone repeats a run. Run again after a cut: it goes on.
set -eu
work=$1
shift
export PYTHONUNBUFFERED=1 PYTHONPATH="${PYTHONPATH:-src}"
if [ -n "${SECONDS_OF_TRAINING:-}" ]; then long="--seconds $SECONDS_OF_TRAINING"; else long="--steps ${STEPS:-1891}"; fi
# shellcheck disable=SC2086
exec "${PYTHON:-python3}" -m draftproof train "${MODEL:-smollm2-135m}" --work "$work" --prompts "$@" \
    --verifier HuggingFaceTB/SmolLM2-135M-Instruct \
    --tokens "${TOKENS:-8600000}" --shard 4096 --held-out 64 --prompt-tokens 1000 --answer-tokens 320 --max-num-seqs 1024 \
    --draft-vocab "${DRAFT_VOCAB:-16384}" --intermediate-size "${INTERMEDIATE:-1920}" --max-len 1344 --warmup 150 \
    --learning-rate 0.006 --eval-every 500 --eval-texts 64 $long ${MORE:-}
