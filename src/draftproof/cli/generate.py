"""`draftproof generate`: complete one prompt, or compare the output without and with speculation."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from draftproof.cli.local_model import add_model_options, load_model, sampling_params, stream_output
from draftproof.cli.output_rendering import legend
from draftproof.errors import RequestError

if TYPE_CHECKING:
    from draftproof.llm import LLM


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_model_options(parser)
    parser.add_argument("-p", "--prompt", help="the prompt; without it, standard input is read")
    parser.add_argument("--raw", action="store_true", help="continue the text; no chat template")
    text = "run without and with speculation; exit status 1 if tokens or logprobs differ"
    parser.add_argument("--compare", action="store_true", help=text)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, console: Console) -> int:
    """Complete the prompt; return the exit status."""
    prompt = options.prompt if options.prompt is not None else sys.stdin.read()
    llm = load_model(options, console)
    if options.raw:
        ids = llm.read_prompt(prompt)[1]
    elif llm.tokenizer is not None and llm.tokenizer.chat_template is None:
        raise RequestError(f"{options.model} has no chat template: --raw continues the prompt as text")
    else:
        ids = llm.chat_token_ids([{"role": "user", "content": prompt}])
    if options.compare:
        return _compare(llm, ids, options, console)
    _, figures = stream_output(llm, ids, sampling_params(options), console)
    console.print(Text(figures, style="dim"))
    return 0


def _compare(llm: LLM, ids: list[int], options: argparse.Namespace, console: Console) -> int:
    seed = 0 if options.seed is None else options.seed
    console.rule("without speculation", align="left")
    # Another cache salt: a proposer that learns from outputs must not draft from the first run.
    params = sampling_params(options, logprobs=5, seed=seed, speculative=False, cache_salt="plain")
    plain, plain_figures = stream_output(llm, ids, params, console)
    console.print(Text(plain_figures, style="dim"))
    console.rule("with speculation", align="left")
    params = sampling_params(options, logprobs=5, seed=seed)
    drafted, figures = stream_output(llm, ids, params, console)
    console.print(Text(figures, style="dim"))
    console.print(legend())
    if plain.finish_reason is None or drafted.finish_reason is None:
        return 130  # interrupted by Ctrl-C: the outputs are not complete
    console.rule(align="left")
    same_tokens = plain.token_ids == drafted.token_ids
    same_logprobs = plain.logprobs == drafted.logprobs
    console.print(f"tokens identical:   {'yes' if same_tokens else 'NO'} ({len(plain.token_ids)})")
    console.print(f"logprobs identical: {'yes' if same_logprobs else 'NO'} (sampled and top 5, bit for bit)")
    if plain.rate and drafted.rate:
        gain = f"({drafted.rate / plain.rate:.2f} times)"
        console.print(f"speed:              {plain.rate:.1f} -> {drafted.rate:.1f} tok/s {gain}")
    return 0 if same_tokens and same_logprobs else 1
