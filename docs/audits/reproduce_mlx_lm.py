"""Test prompt cache, stop strings and logprobs of mlx_lm.server: URL of a server that was just started.

1. One greedy request, sent twice. The second reuses the prompt cache that the first has left.
2. The greedy request again, with a stop string from the middle of its output.
3. One seeded request without and with `top_logprobs`. Without them, `logprobs` has the ids of the output.
"""

import json
import sys
import urllib.request

PROMPTS = (
    "The old lighthouse had been empty for years, until one evening in October",
    "My grandmother's recipe for soup begins like this: first",
    "The river begins high in the mountains, where the snow melts in spring",
    "def area(width, height):\n    return width * height\n\ndef volume(width, height, depth):",
    "one two three one two three one",
    "Dear Anna, thank you for your letter. The weather here has been",
    "A train leaves the station at nine and arrives at",
    "There are four seasons in a year:",
)
MAX_TOKENS = 24
TOP_COUNT = 5
STOP_CHARACTERS = 5


def complete(prompt: str, **options: object) -> dict:
    """Return the first choice of one answer."""
    body = {"model": "default_model", "prompt": prompt, "max_tokens": MAX_TOKENS, **options}
    request = urllib.request.Request(
        f"{sys.argv[1]}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as response:
        return json.load(response)["choices"][0]


def ids(choice: dict) -> list[int]:
    """Return the token ids that the logprobs name."""
    return [entry["id"] for entry in choice["logprobs"]["content"]]


equal = ended = 0
for prompt in PROMPTS:
    first, text = (complete(prompt, temperature=0)["text"] for _ in range(2))
    equal += first == text
    if first != text:
        print(f"greedy, first:  {first!r}\ngreedy, second: {text!r}", flush=True)
    middle = len(text) // 2
    answer = complete(prompt, temperature=0, stop=[text[middle : middle + STOP_CHARACTERS]])
    ended += answer["finish_reason"] == "stop"
print(f"{equal} of {len(PROMPTS)} greedy outputs are equal to their repetition")
print(f"{ended} of {len(PROMPTS)} greedy outputs end at a stop string from their middle")

tokens = other = 0
for seed, prompt in enumerate(PROMPTS):
    sampled = {"temperature": 1.0, "seed": seed, "logprobs": True}
    alone, listed = complete(prompt, **sampled), complete(prompt, **sampled, top_logprobs=TOP_COUNT)
    if alone["text"] != listed["text"]:
        continue
    pairs = list(zip(ids(alone), ids(listed), strict=True))
    tokens += len(pairs)
    other += sum(a != b for a, b in pairs)
print(
    f"{other} of {tokens} entries of logprobs name another token with top_logprobs={TOP_COUNT}, in equal outputs"
)
