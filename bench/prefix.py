"""Time to first token with and without the prefix cache, side by side; the last line of stdout is JSON.

    python bench/prefix.py [--requests 64] [--system 1000] [--model smollm2-135m] [--device auto] [--rounds 1]

Requests share a system prompt of `--system` tokens and have a question of their own. One is served first,
then all the others arrive at once. Three sides: `off` (enable_prefix_caching=False), `on`, and `salts`: the
cache is on and every request has a salt of its own, so that nothing may be found. Means over the requests.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

from common.measure import finish

from draftproof import LLM, SamplingParams
from draftproof.types import Request

TEXT = (
    "You are the assistant of a small public library. Answer in plain words, name the shelf where a book "
    "stands, and say so when you do not know. Opening hours are from nine to six, on Saturdays until two. "
)


def first_tokens(llm: LLM, prompts: list[list[int]], salts: list[str | None], tokens: int) -> dict[str, Any]:
    """Return the mean milliseconds from arrival to the first token, cached tokens and outputs."""
    engine = llm.engine
    begin = time.perf_counter()
    counts, seen, outputs = [], {}, {}
    for i, (ids, salt) in enumerate(zip(prompts, salts, strict=True)):
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, cache_salt=salt)
        counts.append(engine.add(Request(id=str(i), prompt_token_ids=ids, params=params, seed=i)))
    while engine.has_work:
        for out in engine.step():
            if out.token_ids:
                seen.setdefault(out.request_id, 1e3 * (time.perf_counter() - begin))
                outputs.setdefault(out.request_id, []).extend(out.token_ids)
    return {
        "mean_ms": statistics.mean(seen.values()),
        "cached": sum(c.num_cached_tokens for c in counts),
        "outputs": outputs,
    }


def main() -> None:
    """Measure all sides."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--system", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    room = args.requests * (args.system + 64)
    common = {"device": args.device, "max_num_seqs": args.requests, "max_model_len": args.system + 64}
    sides = {
        on: LLM(args.model, enable_prefix_caching=on, kv_cache_tokens=room, **common) for on in (False, True)
    }
    tokenizer = sides[True].get_tokenizer()
    text = tokenizer.encode(TEXT)
    figures: dict[str, list[float]] = {"off": [], "on": [], "salts": []}
    cached, same = {}, True
    for turn in range(args.rounds):
        start = tokenizer.encode(f"Round {turn}. ")  # nothing of an earlier round is found
        system = (start + text * (1 + args.system // len(text)))[: args.system]
        prompts_of_round = [
            system + tokenizer.encode(f" Question {i}: where do I find a book about the number {7 * i}?")
            for i in range(args.requests)
        ]
        outputs = []
        for name in figures:
            llm = sides[name != "off"]
            own: list[str | None] = [f"salt {i}" if name == "salts" else None for i in range(args.requests)]
            first_tokens(llm, prompts_of_round[:1], own[:1], args.tokens)
            found = first_tokens(llm, prompts_of_round[1:], own[1:], args.tokens)
            figures[name].append(found["mean_ms"])
            cached[name] = found["cached"]
            outputs.append(found["outputs"])
        same = same and outputs[0] == outputs[1] == outputs[2]
    mean = {name: round(statistics.median(times), 1) for name, times in figures.items()}
    finish(
        "prefix",
        {
            "requests": args.requests,
            "system_tokens": args.system,
            "mean_ms_to_first_token": mean,
            "speedup": round(mean["off"] / mean["on"], 2),
            "cached_tokens": cached,
            "outputs_are_equal": same,
        },
    )


if __name__ == "__main__":
    main()
