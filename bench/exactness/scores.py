"""Scores and weight updates under load, compared bit for bit; the last line of stdout is JSON.

    python bench/exactness/scores.py PROMPTS.jsonl [--model smollm2-135m] [--answers 1000] [--tokens 24]
                           [--generate 64,7,1] [--score 48,5] [--streams 64]

Answers are sampled at temperature 1, a seed each: half of them without drafts and half with n-gram drafts, at
every batch size of `--generate`. Then two engines, with and without drafts, score all of them, each at one
batch size of `--score`. Every logprob must have the bits that generation reported.

Update: `--streams` greedy streams run with n-gram drafts while the GGUF file is replaced by a copy in which
two layers have changed places. Tokens before the swap are compared with an engine of the old file; tokens and
logprobs after it with a fresh engine of the new file, as are later requests.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # bench/

import argparse
import asyncio
import json
import shutil
import struct
import tempfile
from dataclasses import replace
from typing import Any

from common.measure import finish

from draftproof import LLM, AsyncLLM, SamplingParams
from draftproof.models.gguf.file import num_bytes, read_gguf
from draftproof.models.hub import find_model
from draftproof.outputs import RequestOutput

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "adaptive": False}
PROMPT_TOKENS = 24
SWAPPED_LAYERS = (10, 11)
SWAP_STEPS = 8  # decode steps before the swap
Ids = list[int]


def differing_bits(one: list[float], other: list[float]) -> int:
    """Return the number of bits in which two lists of logprobs differ."""
    assert len(one) == len(other)
    pairs = zip(struct.pack(f"{len(one)}d", *one), struct.pack(f"{len(other)}d", *other), strict=True)
    return sum((a ^ b).bit_count() for a, b in pairs)


def reported(answer: RequestOutput) -> list[float]:
    """Return the logprob of every token of an answer."""
    output = answer.outputs[0]
    return [row[token].logprob for token, row in zip(output.token_ids, output.logprobs or [], strict=True)]


def start(model: str, size: int, drafts: bool) -> LLM:
    """Return an engine with a batch of at most `size`."""
    speculative = NGRAM if drafts else None
    return LLM(model, speculative_config=speculative, max_num_seqs=size, max_model_len=512, device="cpu")


def prompt(ids: Ids) -> Any:
    """Return token ids as a prompt."""
    return {"prompt_token_ids": ids}


def generate(model: str, prompts: list[Ids], sizes: list[int], tokens: int) -> tuple[list[Any], int]:
    """Return answers of alternating engines and batch sizes, and the number of accepted drafts."""
    answers: dict[int, RequestOutput] = {}
    accepted = 0
    groups = [(size, drafts) for size in sizes for drafts in (False, True)]
    for number, (size, drafts) in enumerate(groups):
        chosen = range(number, len(prompts), len(groups))
        params = [
            SamplingParams(temperature=1.0, seed=i, max_tokens=tokens, logprobs=0, ignore_eos=True)
            for i in chosen
        ]
        with start(model, size, drafts) as llm:
            made = llm.generate([prompt(prompts[i]) for i in chosen], params, use_tqdm=False)
        answers.update(zip(chosen, made, strict=True))
        accepted += sum(a.outputs[0].provenance.count("accepted:ngram") for a in made)
    return [answers[i] for i in range(len(prompts))], accepted


def score_all(model: str, answers: list[RequestOutput], sizes: list[int]) -> dict[str, Any]:
    """Score all answers with every engine; return the number of differing bits by engine."""
    sequences = [prompt([*a.prompt_token_ids, *a.outputs[0].token_ids]) for a in answers]
    starts = [len(a.prompt_token_ids) - 1 for a in answers]
    wanted = [reported(answer) for answer in answers]
    figures = {}
    for number, size in enumerate(sizes):
        drafts = number % 2 == 1
        with start(model, size, drafts) as llm:
            scored = llm.score(sequences, use_tqdm=False)
        found = [row.token_logprobs[at:] for row, at in zip(scored, starts, strict=True)]
        name = f"{'ngram' if drafts else 'plain'}, batch {size}"
        figures[name] = sum(map(differing_bits, found, wanted))
    return figures


def swap_layers(source: Path, target: Path) -> None:
    """Copy a GGUF file and exchange the tensors of two layers."""
    shutil.copy(source, target)
    tensors = read_gguf(source).tensors
    one, other = (f"blk.{layer}." for layer in SWAPPED_LAYERS)
    with source.open("rb") as read, target.open("r+b") as write:
        for name in [name for name in tensors if name.startswith(one)]:
            pair = tensors[name], tensors[other + name.removeprefix(one)]
            assert pair[0].type_id == pair[1].type_id and pair[0].shape == pair[1].shape
            for info, place in (pair, pair[::-1]):
                read.seek(info.offset)
                write.seek(place.offset)
                write.write(read.read(num_bytes(info)))


async def stream_all(llm: AsyncLLM, prompts: list[Ids], params: SamplingParams, new: str) -> Any:
    """Stream all prompts with a swap in between; return their events and later answers."""

    async def read(ids: Ids) -> list[Any]:
        return [event async for event in llm.stream(prompt(ids), params)]

    reads = [asyncio.create_task(read(ids)) for ids in prompts]
    while llm.engine_stats().timings.decode_steps.count < SWAP_STEPS:
        await asyncio.sleep(0.005)
    assert await llm.update_weights(new) == 1
    streams = await asyncio.gather(*reads)
    later = await asyncio.gather(*(llm.generate(prompt(ids), params) for ids in prompts))
    return streams, later


def update(model: str, prompts: list[Ids], tokens: int) -> dict[str, Any]:
    """Replace the weights in the middle of streams; return what differs."""
    params = SamplingParams(temperature=0.0, max_tokens=tokens, logprobs=0, ignore_eos=True)
    size = len(prompts)

    async def run() -> Any:
        async with AsyncLLM.from_llm(llm) as served:
            return await stream_all(served, prompts, params, new)

    with tempfile.TemporaryDirectory() as folder:
        new = f"{folder}/new.gguf"
        swap_layers(find_model(model), Path(new))
        with start(model, size, True) as llm:
            streams, later = asyncio.run(run())
        cuts = [sum(event.weights_version == 0 for event in events) for events in streams]
        ordered = sum([e.weights_version for e in events] == [0] * cut + [1] * (tokens - cut)
                      for events, cut in zip(streams, cuts, strict=True))  # fmt: skip
        ids = [[event.token_id for event in events] for events in streams]
        with start(model, size, False) as old:
            before = old.generate([prompt(p) for p in prompts], params, use_tqdm=False)
        with start(new, size, False) as fresh:
            whole = fresh.generate([prompt(p) for p in prompts], params, use_tqdm=False)
            open_ones = [i for i, cut in enumerate(cuts) if cut < tokens]  # streams that the swap interrupted
            rest = [replace(params, max_tokens=tokens - cuts[i]) for i in open_ones]
            begun = [prompt([*prompts[i], *ids[i][: cuts[i]]]) for i in open_ones]
            after = list(zip(open_ones, fresh.generate(begun, rest, use_tqdm=False), strict=True))
    return {
        "streams": size,
        "streams_with_both_versions": sum(0 < cut < tokens for cut in cuts),
        "streams_whose_versions_ascend": ordered,
        "wrong_before": sum(
            i[:cut] != b.outputs[0].token_ids[:cut] for i, cut, b in zip(ids, cuts, before, strict=True)
        ),
        "wrong_after": sum(ids[i][cuts[i] :] != a.outputs[0].token_ids for i, a in after),
        "wrong_logprobs_after": sum(
            [e.logprobs[e.token_id].logprob for e in streams[i][cuts[i] :]] != reported(a) for i, a in after
        ),
        "wrong_later": sum(
            one.outputs[0].token_ids != w.outputs[0].token_ids or reported(one) != reported(w)
            for one, w in zip(later, whole, strict=True)
        ),
        "later_versions": sorted({one.weights_version for one in later}),
        "changed_by_the_swap": sum(
            b.outputs[0].token_ids != w.outputs[0].token_ids for b, w in zip(before, whole, strict=True)
        ),
    }


def main() -> None:
    """Generate, score, compare; then update."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--answers", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--generate", default="64,7,1")
    parser.add_argument("--score", default="48,5")
    parser.add_argument("--streams", type=int, default=64)
    options = parser.parse_args()
    sizes = {key: [int(n) for n in getattr(options, key).split(",")] for key in ("generate", "score")}
    with start(options.model, 1, False) as llm:
        lines = options.prompts.read_text().splitlines()[: max(options.answers, options.streams)]
        prompts = [llm.tokenizer.encode(json.loads(line)["prompt"])[:PROMPT_TOKENS] for line in lines]
    figures: dict[str, Any] = {
        "update": update(options.model, prompts[: options.streams], 4 * options.tokens)
    }
    print(figures, flush=True)
    answers, accepted = generate(options.model, prompts[: options.answers], sizes["generate"], options.tokens)
    values = [value for answer in answers for value in reported(answer)]
    figures |= {"answers": len(answers), "logprobs": len(values), "distinct_logprobs": len(set(values))}
    figures["accepted_drafts"] = accepted
    print(figures, flush=True)
    figures["differing_bits"] = score_all(options.model, answers, sizes["score"])
    finish("scores", figures)


if __name__ == "__main__":
    main()
