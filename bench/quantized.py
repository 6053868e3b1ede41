"""Quantised linear layers on the CPU against bf16: speed and distance of the distribution, in one run.

    python bench/quantized.py [--model smollm2-135m] [--kinds none,int8,int4,gguf] [--tokens 64] [--rounds 5]

Decode at batch 1 and 8 and the prefill of a long prompt are timed in interleaved rounds, without a proposer;
ratios are medians of the rounds' ratios to `none`. The KL divergence to `none` at every token of the texts is
computed over its most likely tokens and one rest. The last line of stdout is JSON.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from typing import Any

from common.measure import finish
from common.prompts import PASSAGES

from draftproof import LLM, SamplingParams

NUM_TOP = 100  # tokens of the distribution that are compared one by one
PREFILL_TOKENS = 512


def decode_rate(llm: LLM, batch: int, tokens: int) -> float:
    """Return generated tokens a second, prefill of short prompts included."""
    prompts: Any = [{"prompt_token_ids": list(range(100 + 7 * i, 116 + 7 * i))} for i in range(batch)]
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    begin = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return batch * tokens / (time.perf_counter() - begin)


def prefill_rate(llm: LLM, salt: int) -> float:
    """Return prompt tokens a second; `salt` makes a prompt that is not cached."""
    ids = [(31 * i + 17 * salt) % 4000 + 100 for i in range(PREFILL_TOKENS)]
    params = SamplingParams(temperature=0, max_tokens=1)
    begin = time.perf_counter()
    llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
    return PREFILL_TOKENS / (time.perf_counter() - begin)


def distributions(llm: LLM) -> list[dict[int, float]]:
    """Return the logprobs of the most likely tokens after every token of the texts."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=NUM_TOP)
    found = []
    for output in llm.generate(list(PASSAGES), params, use_tqdm=False):
        rows = [row for row in output.prompt_logprobs or [] if row]
        found += [{token: entry.logprob for token, entry in row.items()} for row in rows]
    return found


def divergence(exact: dict[int, float], rough: dict[int, float]) -> float:
    """Return the KL divergence over the tokens that both have, and one rest of the others."""
    shared = exact.keys() & rough.keys()
    total = sum(math.exp(exact[t]) * (exact[t] - rough[t]) for t in shared)
    rests = [max(1e-9, 1 - sum(math.exp(side[t]) for t in shared)) for side in (exact, rough)]
    return total + rests[0] * math.log(rests[0] / rests[1])


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--kinds", default="none,int8,int4,gguf")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    kinds = options.kinds.split(",")
    engines = {}
    starts: dict[str, float] = {}
    for kind in kinds:
        begin = time.perf_counter()
        engines[kind] = LLM(
            options.model, dtype="bfloat16", quantization=kind, max_num_seqs=8, max_model_len=1024,
            max_logprobs=-1, device="cpu",
        )  # fmt: skip
        starts[kind] = round(time.perf_counter() - begin, 2)
    rates: dict[str, dict[str, list[float]]] = {kind: {} for kind in kinds}
    for turn in range(options.rounds + 1):
        for kind, llm in engines.items():
            found = {
                "batch 1": decode_rate(llm, 1, options.tokens),
                "batch 8": decode_rate(llm, 8, options.tokens),
                "prefill": prefill_rate(llm, turn),
            }
            if turn:  # the first round compiles and warms
                for name, rate in found.items():
                    rates[kind].setdefault(name, []).append(rate)
    exact = distributions(engines["none"])
    figures: dict[str, Any] = {"start_seconds": starts, "tokens_compared": len(exact)}
    for kind in kinds:
        rough = distributions(engines[kind])
        losses = [divergence(a, b) for a, b in zip(exact, rough, strict=True)]
        figures[kind] = {"mean_kl": statistics.fmean(losses)}
        for name, values in rates[kind].items():
            ratios = [a / b for a, b in zip(values, rates["none"][name], strict=True)]
            figures[kind][name] = {
                "tokens_per_s": round(statistics.median(values), 1),
                "over_none": round(statistics.median(ratios), 3),
            }
        print(kind, figures[kind])
    finish("quantized", figures)


if __name__ == "__main__":
    main()
