"""Worker of bench/versions.py: an engine of one checkout, driven by JSON lines on stdin and stdout.

It uses only the public API, so any checkout can run it: PYTHONPATH selects which.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import sys
import time
from typing import Any

from draftproof import LLM, SamplingParams


def run(llm: LLM, prompts: list[list[int]], options: dict[str, Any]) -> dict[str, Any]:
    """Generate once; return tokens, seconds and a digest of all tokens and logprobs."""
    params = SamplingParams(**options)
    inputs = [{"prompt_token_ids": ids} for ids in prompts]
    begin = time.perf_counter()
    outputs = llm.generate(inputs, params, use_tqdm=False)
    seconds = time.perf_counter() - begin
    digest = hashlib.sha256()
    for output in outputs:
        completion = output.outputs[0]
        digest.update(repr(completion.token_ids).encode())
        if completion.logprobs is not None:
            rows = [
                {token: entry.logprob.hex() for token, entry in row.items()} for row in completion.logprobs
            ]
            digest.update(repr(rows).encode())
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    counts = [output.metrics for output in outputs]
    return {
        "tokens": tokens,
        "seconds": seconds,
        "digest": digest.hexdigest(),
        "steps": max(one.num_steps for one in counts),
        "drafts": sum(one.num_draft_tokens for one in counts),
        "accepted": sum(one.num_accepted_tokens for one in counts),
    }


def main() -> None:
    """Serve commands until stdin ends."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # other output must not mix with the replies
    llm: LLM | None = None
    for line in sys.stdin:
        command = json.loads(line)
        reply: dict[str, Any] = {}
        if "engine" in command:
            llm = None
            gc.collect()
            begin = time.perf_counter()
            llm = LLM(**command["engine"])
            reply = {"seconds": time.perf_counter() - begin}
        elif "chat" in command:
            assert llm is not None
            reply = {"ids": [llm.chat_token_ids([{"role": "user", "content": t}]) for t in command["chat"]]}
        else:
            assert llm is not None
            reply = run(llm, command["prompts"], command["params"])
        print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    main()
