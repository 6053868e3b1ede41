#!/bin/sh
# The head of the default model, unattended, on one GPU: bench/train_head.sh WORK PROMPTS.jsonl…
# TOKENS of text, then SECONDS of training. Run again after a cut: it goes on.
set -eu
work=$1
shift
export PYTHONUNBUFFERED=1 PYTHONPATH="${PYTHONPATH:-src}"
exec "${PYTHON:-python3}" -m draftproof train "${MODEL:-smollm2-135m}" --work "$work" --prompts "$@" \
    --verifier HuggingFaceTB/SmolLM2-135M-Instruct \
    --tokens "${TOKENS:-30000000}" --shard 4096 --held-out 128 --seconds "${SECONDS_OF_TRAINING:-720}" \
    --draft-vocab "${DRAFT_VOCAB:-16384}" --intermediate-size "${INTERMEDIATE:-1536}" --eval-every 500 ${MORE:-}
