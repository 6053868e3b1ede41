"""Worker of bench/logprob_cost.py: an engine of one checkout, driven by JSON lines on stdin."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

from common.gpu_engine import params_of, timed
from common.gpu_logprob_cost import DRAFTER_SIDES, DRAFTER_TOKENS, NAMED, ONE_REQUEST, FrozenPolicy
from common.prompts import chat_prompts

from draftproof import LLM, SamplingParams

MAX_WARM_UPS = 8  # turns without timing


def num_graphs(llm: Any) -> tuple[int, int]:
    """Return the number of captured steps, and of those to capture when they come again."""
    graphs = llm.engine.loop.device.graphs
    return len(graphs.captured), len(graphs._requested)


def params_of_side(name: str, batch: int) -> list[SamplingParams]:
    """Return the params of all requests; see `gpu_logprob_cost.drafters`."""
    if name != ONE_REQUEST:
        return params_of(batch, DRAFTER_TOKENS, **DRAFTER_SIDES[name])
    one = params_of(1, DRAFTER_TOKENS, include_draft_logprobs=True, prompt_logprobs=0, **NAMED)
    return one + params_of(batch, DRAFTER_TOKENS)[1:]


def main() -> None:
    """Serve commands until stdin ends: an engine, a batch with its sides, and a turn of all sides."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # other output must not mix with the replies
    llm: Any = None
    policy: Any = None
    prompts: list[list[int]] = []
    sides: dict[str, list[SamplingParams]] = {}
    for line in sys.stdin:
        command = json.loads(line)
        reply: dict[str, Any] = {}
        if "engine" in command:
            begin = time.perf_counter()
            llm = LLM(**command["engine"])
            reply = {"seconds": time.perf_counter() - begin}
        elif "batch" in command:
            if policy is not None:
                policy.release()
            batch = command["batch"]
            prompts = chat_prompts(batch, llm.engine.limits.vocab_size, llm.tokenizer)
            sides = {name: params_of_side(name, batch) for name in command["sides"]}
            timed(llm, prompts, sides["none"])  # the policy measures step costs
            policy = FrozenPolicy(llm)
            for _ in range(MAX_WARM_UPS):  # steps are captured when they come for the first or second time
                before = num_graphs(llm)
                for params in sides.values():
                    policy.restore()
                    timed(llm, prompts, params)
                if num_graphs(llm) == before:
                    break
        else:
            before = num_graphs(llm)
            for name in command["turn"]:
                policy.restore()
                reply[name] = timed(llm, prompts, sides[name])
            reply["captures"] = sum(num_graphs(llm)) - sum(before)
        print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    main()
