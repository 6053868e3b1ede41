#!/bin/sh
# An MTP layer for the default model on one GPU, measured on Spec-Bench with three drafts, in under 6 minutes:
#   bench/recipes/train_mtp.sh WORK SPEC_BENCH.jsonl PROMPTS.jsonl…
# The copy of the checkpoint with the layer is WORK/model. TOKENS: tokens of generated text. SECONDS_OF_TRAINING: time
# of the phase `train`. An interrupted run resumes with the same command. The last line of the output is the JSON of
# bench/head.py.
set -eu
work=$1
bench=$2
shift 2
export PYTHONUNBUFFERED=1 PYTHONPATH="${PYTHONPATH:-src}"
"${PYTHON:-python3}" -m draftproof train "${MODEL:-smollm2-135m}" --kind mtp --work "$work" --prompts "$@" \
    --max-num-seqs 1024 --tokens "${TOKENS:-8000000}" --shard 8192 --held-out 48 --prompt-tokens 960 \
    --output-tokens 256 --written 0.3 --systems 0 --opened 0.6 --shown 0.1 --follow 0 --greedy 0.3 \
    --draft-vocab "${DRAFT_VOCAB:-32768}" --max-len 1216 --keep 1 --unroll 3 --drafts 3 \
    --learning-rate 0.01 --warmup 100 --decay 0.75 --overlap 4 --prompt-weight 0.15 --prompt-rows 4 \
    --eval-every 800 --eval-texts 48 --seconds "${SECONDS_OF_TRAINING:-180}"
exec "${PYTHON:-python3}" bench/head.py --kind mtp --model "$work/model" --device "${DEVICE:-cuda}" --parts acceptance \
    -k 3 --prompts "$bench"
