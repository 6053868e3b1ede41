"""Send the same seeded requests to a plain and a speculating llama.cpp server and compare tokens and logprobs.

python reproduce_llama_cpp.py http://127.0.0.1:9011 http://127.0.0.1:9012
"""

import json
import sys
import urllib.request
from typing import Any

PROMPT = "one two three four five six one two three four five six one two three four five six one two"
SEEDS = range(1, 9)
MAX_TOKENS = 120


def complete(url: str, seed: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the logprob entries and timings of one answer at temperature 1 without truncation."""
    body = {
        "prompt": PROMPT, "max_tokens": MAX_TOKENS, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0,
        "seed": seed, "logprobs": 20,
    }  # fmt: skip
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as response:
        found = json.load(response)
    return found["choices"][0]["logprobs"]["content"], found["timings"]


def main() -> None:
    """Print one line for each seed and a sum."""
    same, zeros, tokens = 0, 0, 0
    for seed in SEEDS:
        (plain, _), (other, timings) = complete(sys.argv[1], seed), complete(sys.argv[2], seed)
        is_same = [entry["id"] for entry in plain] == [entry["id"] for entry in other]
        empty = [entry for entry in other if entry["logprob"] == 0.0 and not entry["top_logprobs"]]
        same, zeros, tokens = same + is_same, zeros + len(empty), tokens + len(other)
        drafts = f"{timings.get('draft_n_accepted', 0)} of {timings.get('draft_n', 0)} drafts accepted"
        print(
            f"seed {seed}: tokens {'equal' if is_same else 'differ'}, {drafts}, {len(empty)} of {len(other)} without logprobs"
        )
    print(
        f"{same} of {len(SEEDS)} outputs have the same tokens; {zeros} of {tokens} tokens have logprob 0.0 and no list"
    )


main()
