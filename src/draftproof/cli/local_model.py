"""A model loaded by `generate` and `chat`: its options, its sampling parameters, one rendered output."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from draftproof.cli.engine_options import add_engine_options, add_model, read_engine_options
from draftproof.cli.output_rendering import RenderedOutput, render
from draftproof.registry import no_collection

if TYPE_CHECKING:
    from draftproof.llm import LLM
    from draftproof.sampling_params import SamplingParams

ENGINE_OPTIONS = ("dtype", "device", "backend", "max_model_len")
CHAT_ENGINE_OPTIONS = (*ENGINE_OPTIONS, "reasoning_parser")


def add_model_options(parser: argparse.ArgumentParser, names: Sequence[str] = ENGINE_OPTIONS) -> None:
    """Add the model, the engine options and the sampling parameters of a command that loads a model."""
    add_model(parser)
    add_engine_options(parser, names)
    add_sampling_options(parser)


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """Add the sampling parameters."""
    add = parser.add_argument
    add("-n", "--max-tokens", type=int, default=256, metavar="N", help="tokens of an output (default: 256)")
    add("-t", "--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default: 0)")
    add("--top-p", type=float, default=1.0, metavar="P", help="1 is all (default: 1)")
    add("--top-k", type=int, default=0, metavar="K", help="0 is all (default: 0)")
    add("--min-p", type=float, default=0.0, metavar="P", help="relative to the likeliest token (default: 0)")
    add("--repetition-penalty", type=float, default=1.0, metavar="X", help="1 is none (default: 1)")
    add("--stop", action="append", default=[], metavar="TEXT", help="stop string; may be repeated")
    add("--seed", type=int, metavar="N", help="seed of the request (default: a fresh one)")


def load_model(options: argparse.Namespace, console: Console, names: Sequence[str] = ENGINE_OPTIONS) -> LLM:
    """Load the model and run one short request, which compiles what is not compiled yet."""
    with no_collection():
        from draftproof.llm import LLM

    params = sampling_params(options)  # refuses wrong parameters before a model is loaded
    engine_options = read_engine_options(options, names)
    with console.status(Text(f"loading {options.model}")):
        llm = LLM(options.model, max_num_seqs=4, **engine_options)
        llm.generate([[0, 1, 2, 3]], replace(params, max_tokens=2, seed=0), use_tqdm=False)
    console.print(Text(llm.engine.describe(), style="dim"))
    return llm


def sampling_params(options: argparse.Namespace, **changes: Any) -> SamplingParams:
    """Return the sampling parameters of the command line, with `changes`."""
    from draftproof.sampling_params import SamplingParams

    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "stop", "seed")
    return SamplingParams(**{**{name: getattr(options, name) for name in names}, **changes})


def stream_output(
    llm: LLM, ids: list[int], params: SamplingParams, console: Console
) -> tuple[RenderedOutput, str]:
    """Render one output as it streams; return it and a line of figures."""
    llm.reset_stats()
    rendered = render(llm.stream({"prompt_token_ids": ids}, params), console)
    return rendered, rendered.figures(llm.stats)
