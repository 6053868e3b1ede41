"""Decode speed on this CPU, all sides in one run; the last line of stdout is JSON.

    python bench/cpu.py [--tokens 128] [--rounds 5] [--model smollm2-135m] [--skip-transformers]
    python bench/cpu.py --peer PYTHON|FOLDER|URL [--model FILE.gguf]

Sides: transformers (bf16, the same weights), Draftproof without and with n-gram drafts, on free text and on
a copy task at batch 1, and at batch 8. With --peer the other side is llama.cpp, and both compute from the
blocks of one GGUF file, also a long prompt, a code edit, and, where a draft head comes with the package, free
text with that head in an engine of its own. Give a Python that has `xllamacpp` (pip install xllamacpp in an
environment of its own), a folder with node-llama-cpp (npm install --ignore-scripts node-llama-cpp), or the
URL of a llama.cpp server with the same file and number of threads. The memory floor is the time in which the
weights can be read once at the bandwidth measured in the same run. Rounds are interleaved, so a slow minute
of the machine affects all sides; ratios are medians of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from common.agent_traffic import FILE
from common.measure import finish, instructions, read_bandwidth
from common.peers.llama_peer import LlamaPeer
from common.peers.transformers_peer import load_peer

from draftproof import LLM, SamplingParams
from draftproof.errors import ConfigError
from draftproof.models.hub import find_model
from draftproof.models.load import load_checkpoint
from draftproof.types import Request

FREE = [
    "Explain to a child why the sky is blue and why sunsets are red.",
    "Write a short story about a lighthouse keeper who finds a letter in a bottle.",
    "What should I think about before I adopt a dog?",
]
PASSAGE = (
    "The river begins high in the mountains, where the snow melts in spring and fills a hundred small "
    "streams. The streams run down over grey stones and meet in a quiet valley. From there the river flows "
    "past farms and villages, under seven old bridges, and through the middle of the city. In summer "
    "children swim in it. In autumn it carries yellow leaves all the way to the sea. "
)
COPY = PASSAGE * 3 + "The river begins high"
CODE = "".join(FILE.splitlines(keepends=True)[:70])
EDIT = f"# stock.py\n{CODE}\n# stock.py with `Item` renamed to `Article`\n" + CODE[:60]
NGRAM = {"method": "ngram", "num_speculative_tokens": 7}
HEAD = {"method": "eagle3", "num_speculative_tokens": 4}


class DraftproofSide:
    """Draftproof engine with one proposer; plain and speculative requests differ by one option."""

    def __init__(self, model: str, quantization: str, speculation: dict[str, Any]) -> None:
        self.llm = LLM(
            model, dtype="bfloat16", quantization=quantization, speculative_config=speculation, max_num_seqs=8
        )

    def prompt(self, text: str, chat: bool) -> list[int]:
        """Return the tokens of a prompt."""
        if chat:
            return self.llm.chat_token_ids([{"role": "user", "content": text}])
        return self.llm.read_prompt(text)[1]

    def rate(self, prompts: list[list[int]], tokens: int, speculative: bool) -> float:
        """Return tokens a second from the step in which the last request got its first token."""
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, speculative=speculative)
        engine, begin = self.llm.engine, 0.0
        for i, ids in enumerate(prompts):
            engine.add(Request(id=str(i), prompt_token_ids=ids, params=params, seed=i))
        total = counted = 0
        started: set[str] = set()
        while engine.has_work:
            for result in engine.step():
                total += len(result.token_ids)
                started.add(result.request_id)
            if begin == 0.0 and len(started) == len(prompts):
                begin, counted = time.perf_counter(), total
        return (total - counted) / (time.perf_counter() - begin)

    def prompt_rate(self, ids: list[int], salt: str) -> float:
        """Return prompt tokens a second; nothing of the prompt is cached under a new salt."""
        params = SamplingParams(temperature=0, max_tokens=1, cache_salt=salt)
        engine, begin = self.llm.engine, time.perf_counter()
        engine.add(Request(id="prompt", prompt_token_ids=ids, params=params, seed=0))
        while engine.has_work:
            engine.step()
        return len(ids) / (time.perf_counter() - begin)

    def parts(self, ids: list[int], tokens: int) -> dict[str, float]:
        """Return the milliseconds of a plain decode step by part."""
        runner, spent = self.llm.engine.runner, [0.0]
        forward_logits = runner.forward_logits

        def timed(*args: Any) -> Any:
            begin = time.perf_counter()
            result = forward_logits(*args)
            spent[0] += time.perf_counter() - begin
            return result

        runner.forward_logits = timed  # type: ignore[method-assign]
        rate = self.rate([ids], tokens, speculative=False)
        del runner.forward_logits
        if not spent[0]:
            raise RuntimeError("a decode step no longer calls `forward_logits`")
        step, model = 1000 / rate, 1000 * spent[0] / tokens
        return {"step": step, "model": model, "rest": step - model}


class Transformers:
    """`transformers` with the same weights and its own decode loop."""

    def __init__(self, model: str) -> None:
        import transformers

        self.model = load_peer(model, torch.bfloat16, "cpu")
        self.version = transformers.__version__

    def rate(self, ids: list[int], tokens: int) -> float:
        """Return tokens a second after the prompt."""
        marks: list[float] = []

        class Clock:
            def put(self, value: Any) -> None:
                marks.append(time.perf_counter())

            def end(self) -> None:
                return None

        self.model.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            do_sample=False,
            min_new_tokens=tokens,
            max_new_tokens=tokens,
            streamer=Clock(),
            pad_token_id=0,
        )
        return (tokens - 1) / (marks[-1] - marks[1])  # marks[0] is the prompt


def head_engine(model: str) -> DraftproofSide | None:
    """Return an engine with the draft head of the package, or None if it has none for `model`."""
    try:
        return DraftproofSide(model, "gguf", HEAD)
    except ConfigError as error:
        if "needs a head" not in str(error):
            raise
        return None


def main() -> None:
    """Measure all sides in interleaved rounds."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt-tokens", type=int, default=1500, help="of the long prompt beside a peer")
    parser.add_argument("--skip-transformers", action="store_true")
    parser.add_argument("--peer", metavar="PYTHON|URL", help="compare with llama.cpp instead of transformers")
    options = parser.parse_args()
    file = find_model(options.model)
    ours = DraftproofSide(options.model, "gguf" if options.peer else "none", NGRAM)
    with_head = head_engine(options.model) if options.peer else None
    theirs = None if options.skip_transformers or options.peer else Transformers(options.model)
    peer = LlamaPeer(options.peer, file, torch.get_num_threads()) if options.peer else None
    if peer is not None:
        weights = file.stat().st_size
    else:
        tensors = load_checkpoint(options.model, dtype="bfloat16").tensors
        weights = sum(tensor.numel() * 2 for tensor in tensors.values())
    free = [ours.prompt(text, chat=True) for text in FREE]
    copy = ours.prompt(COPY, chat=False)
    eight = [ours.prompt(f"{text} Answer in style {i}.", chat=True) for i in range(3) for text in FREE][:8]
    long = ours.prompt(PASSAGE * 25, chat=False)[: options.prompt_tokens]
    edit = ours.prompt(EDIT, chat=False)
    n = options.tokens
    ours.rate([free[0]], 8, True)  # compile
    if with_head is not None:
        with_head.rate([free[0]], n, True)
    rounds = []
    for i in range(options.rounds):
        ids = free[i % len(free)]
        figures = {"floor": read_bandwidth(weights) / weights}
        figures["free_plain"] = ours.rate([ids], n, False)
        figures["free_ngram"] = ours.rate([ids], n, True)
        figures["copy_plain"] = ours.rate([copy], n, False)
        figures["copy_ngram"] = ours.rate([copy], n, True)
        figures["batch8_plain"] = ours.rate(eight, n, False)
        figures["batch8_ngram"] = ours.rate(eight, n, True)
        if theirs is not None:
            figures["transformers_free"] = theirs.rate(ids, min(n, 64))
            figures["transformers_copy"] = theirs.rate(copy, min(n, 64))
        if peer is not None:
            figures["prompt"] = ours.prompt_rate(long, f"round {i}")
            figures["llama_cpp_prompt"] = peer.speeds(long, 2)[0]
            figures["llama_cpp_free"] = peer.speeds(ids, n)[1]
            figures["llama_cpp_copy"] = peer.speeds(copy, n)[1]
            figures["edit_plain"] = ours.rate([edit], n, False)
            figures["edit_ngram"] = ours.rate([edit], n, True)
            figures["llama_cpp_edit"] = peer.speeds(edit, n)[1]
        if with_head is not None:
            figures["free_head"] = with_head.rate([ids], n, True)
        rounds.append(figures)
        print("  ".join(f"{name} {value:.1f}" for name, value in figures.items()), flush=True)
    if peer is not None:
        peer.close()
    report(options, rounds, ours.parts(free[0], n), weights, theirs, peer)


def report(
    options: argparse.Namespace,
    rounds: list[dict[str, float]],
    parts: dict[str, float],
    weights: int,
    theirs: Transformers | None,
    peer: LlamaPeer | None,
) -> None:
    """Print medians and ratios."""

    def ratio(over: str, under: str) -> float:
        return round(statistics.median(r[over] / r[under] for r in rounds), 3)

    rates = {name: round(statistics.median(r[name] for r in rounds), 1) for name in rounds[0]}
    ratios = {
        "plain_over_floor": ratio("free_plain", "floor"),
        "copy_ngram_over_plain": ratio("copy_ngram", "copy_plain"),
        "free_ngram_over_plain": ratio("free_ngram", "free_plain"),
        "batch8_over_batch1": ratio("batch8_plain", "free_plain"),
        "batch8_ngram_over_plain": ratio("batch8_ngram", "batch8_plain"),
    }
    if theirs is not None:
        ratios["plain_over_transformers"] = ratio("free_plain", "transformers_free")
        ratios["copy_ngram_over_transformers"] = ratio("copy_ngram", "transformers_copy")
    if peer is not None:
        ratios["plain_over_llama_cpp"] = ratio("free_plain", "llama_cpp_free")
        ratios["copy_plain_over_llama_cpp"] = ratio("copy_plain", "llama_cpp_copy")
        ratios["copy_ngram_over_llama_cpp"] = ratio("copy_ngram", "llama_cpp_copy")
        ratios["prompt_over_llama_cpp"] = ratio("prompt", "llama_cpp_prompt")
        ratios["edit_ngram_over_plain"] = ratio("edit_ngram", "edit_plain")
        ratios["edit_ngram_over_llama_cpp"] = ratio("edit_ngram", "llama_cpp_edit")
        if "free_head" in rates:
            ratios["free_head_over_plain"] = ratio("free_head", "free_plain")
            ratios["free_head_over_llama_cpp"] = ratio("free_head", "llama_cpp_free")
    print("median tok/s:", rates)
    print("ratios:", ratios)
    print("a plain step, ms:", {name: round(value, 2) for name, value in parts.items()})
    finish(
        "cpu",
        {
            "model": options.model,
            "weights": "GGUF blocks" if peer else "bfloat16",
            "tokens": options.tokens,
            "rounds": options.rounds,
            "weight_bytes": weights,
            "tokens_per_second": rates,
            "ratios": ratios,
            "plain_step_ms": {name: round(value, 3) for name, value in parts.items()},
            "transformers": theirs.version if theirs else None,
            "llama_cpp": peer.about if peer else None,
            "instructions": instructions(),
        },
    )


if __name__ == "__main__":
    main()
