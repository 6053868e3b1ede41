"""Scores of generated answers against the logprobs of generation; the last line of stdout is JSON.

    python bench/scores.py [--model FOLDER] [--answers 1000] [--tokens 24] [--batches 64,7,1] [--backend auto]

Answers are generated with and without n-gram drafts. Each engine then scores all of them, at every batch
size, and logprobs are compared bit for bit.
Half of the answers share their prompt's beginning, and prefix caching is on. Without `--model` the model is a
tiny random one.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from pathlib import Path
from typing import Any

from common.bits_models import FAMILIES, TINY_CONFIG, TINY_VOCAB, model_tensors, write_tokenizer
from common.measure import finish
from safetensors.torch import save_file

from draftproof import LLM, SamplingParams

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "adaptive": False}
MODES: dict[str, dict[str, Any] | None] = {"plain": None, "ngram": NGRAM}
PROMPT_TOKENS = 24


def write_tiny(folder: Path) -> str:
    """Write a tiny model to a folder, which is returned."""
    (folder / "config.json").write_text(json.dumps({**TINY_CONFIG, **FAMILIES["llama"]}))
    save_file(model_tensors("llama"), folder / "model.safetensors")
    write_tokenizer(folder)
    return str(folder)


def prompts(count: int, vocab: int) -> list[list[int]]:
    """Return prompts of random ids with repetitions, which n-gram drafts match."""
    rng = random.Random(11)
    shared = [rng.randrange(3, vocab) for _ in range(PROMPT_TOKENS // 2)]
    made = []
    for number in range(count):
        piece = [rng.randrange(3, vocab) for _ in range(rng.randrange(3, 7))]
        own = (piece * PROMPT_TOKENS)[: PROMPT_TOKENS // 2 + number % 5]
        made.append([*shared, *own] if number % 2 else [*own, *own])
    return made


def reported(answers: list[Any]) -> list[list[float]]:
    """Return the logprob of every sampled token."""
    outputs = [answer.outputs[0] for answer in answers]
    return [[row[token].logprob for token, row in zip(o.token_ids, o.logprobs, strict=True)] for o in outputs]


def count_differing(one: list[list[float]], other: list[list[float]]) -> int:
    """Return the number of logprobs that differ."""
    assert [len(row) for row in one] == [len(row) for row in other]
    return sum(a != b for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True))


def main() -> None:
    """Generate, score and compare."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model")
    parser.add_argument("--answers", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--batches", default="64,7,1")
    parser.add_argument("--backend", default="auto")
    options = parser.parse_args()
    batches = [int(size) for size in options.batches.split(",")]
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=options.tokens, logprobs=0, ignore_eos=True)
    figures: dict[str, Any] = {"model": options.model or "tiny", "answers": options.answers}
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or write_tiny(Path(folder))
        given: list[Any] | None = None
        want: list[list[float]] = []
        sequences: list[Any] = []
        starts: list[int] = []
        for mode, speculative in MODES.items():
            for size in batches:
                with LLM(model, speculative_config=speculative, max_num_seqs=size, device="cpu",
                         backend=options.backend) as llm:  # fmt: skip
                    if given is None:
                        vocab = TINY_VOCAB if options.model is None else 40_000
                        given = [{"prompt_token_ids": ids} for ids in prompts(options.answers, vocab)]
                    key = f"{mode}_batch_{size}"
                    if size == max(batches) or not want:
                        answers = llm.generate(given, params, use_tqdm=False)
                        if not want:
                            want = reported(answers)
                            sequences = [
                                {"prompt_token_ids": [*a.prompt_token_ids, *a.outputs[0].token_ids]}
                                for a in answers
                            ]
                            starts = [len(a.prompt_token_ids) - 1 for a in answers]
                        figures[f"generated_{key}_differing"] = count_differing(reported(answers), want)
                    scored = llm.score(sequences, use_tqdm=False)
                    rows = [s.token_logprobs[at:] for s, at in zip(scored, starts, strict=True)]
                    figures[f"scored_{key}_differing"] = count_differing(rows, want)
        figures["logprobs_compared"] = sum(map(len, want))
        figures["distinct_logprobs"] = len({value for row in want for value in row})
    finish("scores", figures)


if __name__ == "__main__":
    main()
