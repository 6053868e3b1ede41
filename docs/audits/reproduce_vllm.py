"""Send seeded requests with a top_p that leaves one token and compare them with the greedy output: URL MODEL."""

import json
import sys
import urllib.request

PROMPTS = (
    "The old lighthouse had been empty for years, until one evening in October",
    "one two three one two three one",
)
SEEDS = range(1, 5)
MAX_TOKENS = 12
TOP_P = 0.001


def complete(prompt: str, **options: float) -> str:
    """Return the text of one answer."""
    body = {"model": sys.argv[2], "prompt": prompt, "max_tokens": MAX_TOKENS, **options}
    request = urllib.request.Request(
        f"{sys.argv[1]}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as response:
        return json.load(response)["choices"][0]["text"]


for prompt in PROMPTS:
    greedy = complete(prompt, temperature=0)
    print(f"greedy: {greedy!r}")
    for seed in SEEDS:
        text = complete(prompt, temperature=1.0, top_p=TOP_P, seed=seed)
        print(
            f"temperature 1, top_p {TOP_P}, seed {seed}: {'equal' if text == greedy else repr(text)}",
            flush=True,
        )
