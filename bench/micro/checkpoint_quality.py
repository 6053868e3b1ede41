"""Quality of quantised checkpoints beside transformers on the same files: mean KL divergence to bf16.

    python bench/micro/checkpoint_quality.py FLOAT_FOLDER QUANTISED_FOLDER... --text FILE [--tokens 20000]

Each engine is compared with its own run of the float folder in the same dtype, over the most likely tokens
and one rest. The text is cut into windows; `--text` is a JSONL file whose strings are joined. Folders of
compressed-tensors need that package for transformers. The last line of stdout is JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from common.measure import finish

from draftproof import LLM, SamplingParams
from draftproof.text.tokenizer import load_tokenizer

NUM_TOP = 100  # tokens of the distribution that are compared one by one
WINDOW_TOKENS = 256
Rows = list[dict[int, float]]  # after each token: the logprobs of the most likely next tokens


def strings(value: Any) -> list[str]:
    """Return every string inside a JSON value."""
    if isinstance(value, str):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [text for item in items for text in strings(item)]


def windows(folder: str, text: Path, count: int) -> list[list[int]]:
    """Return about `count` tokens of the text in windows."""
    lines = text.read_text(encoding="utf-8").splitlines()
    joined = "\n\n".join(piece for line in lines if line for piece in strings(json.loads(line)))
    ids = load_tokenizer(folder).encode(joined[: 8 * count])[:count]
    return [ids[i : i + WINDOW_TOKENS] for i in range(0, len(ids), WINDOW_TOKENS)]


def ours(folder: str, parts: list[list[int]], backend: str, dtype: str) -> Rows:
    """Return the distributions of this engine."""
    options: dict[str, Any] = {"max_num_seqs": 4, "max_model_len": 512, "device": "cpu", "warm_up": False}
    with LLM(folder, dtype=dtype, backend=backend, max_logprobs=-1, **options) as llm:
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=NUM_TOP, detokenize=False)
        prompts: Any = [{"prompt_token_ids": part} for part in parts]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        rows = [row for output in outputs for row in output.prompt_logprobs or [] if row]
        return [{token: entry.logprob for token, entry in row.items()} for row in rows]


def theirs(folder: str, parts: list[list[int]], dtype: str) -> Rows:
    """Return the distributions of transformers."""
    import transformers

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    found: Rows = []
    for part in parts:
        with torch.inference_mode():
            logprobs = model(torch.tensor([part])).logits[0, :-1].float().log_softmax(-1)
        top = logprobs.topk(NUM_TOP)
        pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
        found += [dict(zip(ids, values, strict=True)) for ids, values in pairs]
    return found


def divergence(exact: dict[int, float], rough: dict[int, float]) -> float:
    """Return the KL divergence over the tokens that both have, and one rest of the others."""
    shared = exact.keys() & rough.keys()
    total = sum(math.exp(exact[t]) * (exact[t] - rough[t]) for t in shared)
    rests = [max(1e-9, 1 - sum(math.exp(side[t]) for t in shared)) for side in (exact, rough)]
    return total + rests[0] * math.log(rests[0] / rests[1])


def mean_divergence(exact: Rows, rough: Rows) -> float:
    """Return the mean over all tokens."""
    return statistics.fmean(divergence(a, b) for a, b in zip(exact, rough, strict=True))


def main() -> None:
    """Run the comparison."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="+")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--backend", default="torch")
    parser.add_argument("--dtype", default="bfloat16", help="float32 where a CPU has no bf16 products")
    options = parser.parse_args()
    base, *quantised = options.folders
    parts = windows(base, options.text, options.tokens)
    exact = ours(base, parts, options.backend, options.dtype), theirs(base, parts, options.dtype)
    figures: dict[str, Any] = {"tokens": len(exact[0]), "backend": options.backend, "dtype": options.dtype}
    for folder in quantised:
        own = mean_divergence(exact[0], ours(folder, parts, options.backend, options.dtype))
        other = mean_divergence(exact[1], theirs(folder, parts, options.dtype))
        figures[Path(folder).name] = {"kl": own, "transformers": other, "ratio": round(own / other, 3)}
        print(Path(folder).name, figures[Path(folder).name], flush=True)
    finish("checkpoint_quality", figures)


if __name__ == "__main__":
    main()
