"""The command line: generate, chat, serve, train, simulate, info. Accepted drafts are shown in colour."""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

from rich.console import Console
from rich.table import Table
from rich.text import Text

from draftproof import __version__
from draftproof.cli import serve as serve_command
from draftproof.cli import simulate as simulation
from draftproof.cli import train as train_command
from draftproof.cli.render import Shown, legend, show
from draftproof.config import DEFAULT_MODEL, read_speculation
from draftproof.errors import ConfigError, DraftproofError, RequestError, nearest

if TYPE_CHECKING:
    from draftproof.llm import LLM
    from draftproof.sampling_params import SamplingParams

DEFAULT_SPECULATION = '{"method": "ngram", "num_speculative_tokens": 7}'
# what belongs to an engine here, and so to none of a server's; with what holds unless it is typed
ENGINE = {
    "model": DEFAULT_MODEL,
    "dtype": "auto",
    "device": "auto",
    "backend": "auto",
    "max_model_len": None,
    "speculative_config": DEFAULT_SPECULATION,
}
Answerer = Callable[[list[dict[str, str]]], tuple[Shown, str]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; the exit status."""
    console = Console(highlight=False, soft_wrap=True)
    try:
        options = _options(sys.argv[1:] if arguments is None else arguments)
        status: int = options.run(options, console)
        return status
    except DraftproofError as error:
        errors = Console(stderr=True, highlight=False, soft_wrap=True)
        errors.print(Text(f"error: {error}", style="red"))
        return 2
    except KeyboardInterrupt:
        return 130


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser, commands = _parsers()
    if arguments and arguments[0] == "serve":
        arguments = ["serve", *serve_command.with_file(commands["serve"], arguments[1:])]
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        commands.get(arguments[0], parser).refuse(unknown[0].partition("=")[0])
    return options


class Parser(argparse.ArgumentParser):
    """Takes whole names only: half a name read as an option that was not meant is as good as ignored."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)

    def refuse(self, flag: str) -> NoReturn:
        """What nobody knows, with the usage of its own command and the nearest name."""
        hint = nearest(flag, self._option_string_actions, f"see {self.prog} --help")
        if any(flag == f"--{action.dest}" for action in self._get_positional_actions()):
            hint = f"it is given without {flag}, by itself"
        what = "unknown option" if flag.startswith("-") else "one argument too many:"
        self.error(f"{what} {flag!r}: {hint}")


def _parsers() -> tuple[Parser, Mapping[str, Parser]]:
    """All of it, and each command's part by its name."""
    parser = Parser(
        prog="draftproof", description="LLM inference in which speculation changes nothing but the speed."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    generate = commands.add_parser("generate", help="answer one prompt")
    _model_options(generate)
    _sampling_options(generate)
    generate.add_argument("-p", "--prompt", help="the prompt; without it, standard input is read")
    generate.add_argument("--raw", action="store_true", help="continue the text; no chat template")
    generate.add_argument(
        "--compare",
        action="store_true",
        help="answer without and with speculation; exit status 1 if tokens or logprobs differ",
    )
    generate.set_defaults(run=_generate)
    serve = commands.add_parser("serve", help="serve a model over HTTP, as OpenAI does")
    serve_command.add_options(serve, DEFAULT_MODEL, DEFAULT_SPECULATION)
    serve.set_defaults(run=serve_command.run)
    chat = commands.add_parser("chat", help="talk to the model")
    _model_options(chat)
    _sampling_options(chat)
    chat.add_argument(
        "--url", help="of a server, such as http://127.0.0.1:8000: its model talks, none is loaded"
    )
    chat.add_argument("--system", help="a system message to begin with")
    chat.set_defaults(run=_chat)
    train = commands.add_parser("train", help="make a draft head for a model")
    train_command.add_options(train)
    train.set_defaults(run=train_command.run)
    simulate = commands.add_parser("simulate", help="what a proposer would have gained on recorded outputs")
    simulation.add_options(simulate, DEFAULT_SPECULATION)
    info = commands.add_parser("info", help="what a model is, without loading its weights")
    info.add_argument("model", help="a built-in name, a folder, a .gguf file or a hub id")
    info.set_defaults(run=_info)
    return parser, commands.choices


def _model_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        nargs="?",
        help=f"a built-in name, a folder, a .gguf file or a hub id (default: {DEFAULT_MODEL})",
    )
    parser.add_argument(
        "--dtype", choices=("auto", "bfloat16", "float32"), help="of the weights (default: auto)"
    )
    parser.add_argument("--device", help="cpu, cuda, cuda:1, … (default: auto)")
    parser.add_argument("--backend", help="reference, torch, cpu, triton (default: auto)")
    parser.add_argument("--max-model-len", type=int, metavar="N", help="tokens of prompt and answer together")
    parser.add_argument(
        "--speculative-config",
        metavar="JSON",
        help=f"vLLM's keys, or 'off' (default: {DEFAULT_SPECULATION})",
    )
    parser.set_defaults(**ENGINE)


def _sampling_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("-n", "--max-tokens", type=int, default=256, metavar="N", help="of an answer (default: 256)")
    add("-t", "--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default: 0)")
    add("--top-p", type=float, default=1.0, metavar="P", help="1 is all (default: 1)")
    add("--top-k", type=int, default=0, metavar="K", help="0 is all (default: 0)")
    add("--min-p", type=float, default=0.0, metavar="P", help="of the likeliest token's (default: 0)")
    add("--repetition-penalty", type=float, default=1.0, metavar="X", help="1 is none (default: 1)")
    add("--stop", action="append", default=[], metavar="TEXT", help="ends an answer; may be repeated")
    add("--seed", type=int, metavar="N", help="of the noise (default: a fresh one)")


def _load(options: argparse.Namespace, console: Console) -> LLM:
    from draftproof.llm import LLM

    params = _params(options)  # what is wrong with them is said before a model is loaded
    config = read_speculation(options.speculative_config)
    with console.status(Text(f"loading {options.model}")):
        llm = LLM(
            options.model,
            dtype=options.dtype,
            device=options.device,
            backend=options.backend,
            max_model_len=options.max_model_len,
            speculative_config=config,
            max_num_seqs=4,
        )
        # the first step compiles what is not compiled yet; it should not count as the model's time
        llm.generate([[0, 1, 2, 3]], replace(params, max_tokens=2, seed=0), use_tqdm=False)
    console.print(Text(llm.engine.describe(), style="dim"))
    return llm


def _params(options: argparse.Namespace, **changes: Any) -> SamplingParams:
    from draftproof.sampling_params import SamplingParams

    return SamplingParams(
        **{
            "temperature": options.temperature,
            "top_p": options.top_p,
            "top_k": options.top_k,
            "min_p": options.min_p,
            "repetition_penalty": options.repetition_penalty,
            "max_tokens": options.max_tokens,
            "stop": options.stop,
            "seed": options.seed,
            **changes,
        }
    )


def _answer(llm: LLM, ids: list[int], params: SamplingParams, console: Console) -> tuple[Shown, str]:
    """Show one answer; returns it and its figures."""
    from draftproof.metrics import SpecStats

    llm.jobs.stats = SpecStats()
    shown = show(llm.stream({"prompt_token_ids": ids}, params), console)
    return shown, shown.figures(llm.stats)


# --- commands -----------------------------------------------------------------------------------------


def _generate(options: argparse.Namespace, console: Console) -> int:
    prompt = options.prompt if options.prompt is not None else sys.stdin.read()
    llm = _load(options, console)
    if options.raw:
        ids = llm.read_prompt(prompt)[1]
    elif llm.tokenizer is not None and llm.tokenizer.chat_template is None:
        raise RequestError(f"{options.model} has no chat template: --raw continues the prompt as text")
    else:
        ids = llm.chat_token_ids([{"role": "user", "content": prompt}])
    if options.compare:
        return _compare(llm, ids, options, console)
    _, figures = _answer(llm, ids, _params(options), console)
    console.print(Text(figures, style="dim"))
    return 0


def _compare(llm: LLM, ids: list[int], options: argparse.Namespace, console: Console) -> int:
    """The same request twice, without and with speculation: only the speed may differ."""
    seed = 0 if options.seed is None else options.seed
    console.rule("without speculation", align="left")
    # under another salt: a proposer that learns must not have heard the answer when it is asked
    params = _params(options, logprobs=5, seed=seed, speculative=False, cache_salt="plain")
    plain, plain_figures = _answer(llm, ids, params, console)
    console.print(Text(plain_figures, style="dim"))
    console.rule("with speculation", align="left")
    drafted, figures = _answer(llm, ids, _params(options, logprobs=5, seed=seed), console)
    console.print(Text(figures, style="dim"))
    console.print(legend())
    if plain.finish_reason is None or drafted.finish_reason is None:
        return 130  # cut short by Ctrl-C: there is nothing to compare
    console.rule(align="left")
    same_tokens = plain.token_ids == drafted.token_ids
    same_logprobs = plain.logprobs == drafted.logprobs
    count = len(plain.token_ids)
    console.print(f"tokens identical:   {'yes' if same_tokens else 'NO'} ({count})")
    console.print(f"logprobs identical: {'yes' if same_logprobs else 'NO'} (sampled and top 5, bit for bit)")
    if plain.rate and drafted.rate:
        console.print(
            f"speed:              {plain.rate:.1f} -> {drafted.rate:.1f} tok/s "
            f"({drafted.rate / plain.rate:.2f} times)"
        )
    return 0 if same_tokens and same_logprobs else 1


def _chat(options: argparse.Namespace, console: Console) -> int:
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (line editing and history for input())
    answer = _remote(options, console) if options.url else _local(options, console)
    console.print("/reset starts over, /exit or Ctrl-D leaves, Ctrl-C ends an answer.")
    console.print(legend())
    opening = [{"role": "system", "content": options.system}] if options.system else []
    messages = list(opening)
    while True:
        try:
            line = console.input("[bold]> [/bold]").strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return 0
        if line in ("/exit", "/quit"):
            return 0
        if line == "/reset":
            messages = list(opening)
        elif line:
            messages.append({"role": "user", "content": line})
            try:
                shown, figures = answer(messages)
            except DraftproofError as error:
                messages.pop()
                console.print(Text(f"{error}", style="red"))
                continue
            messages.append({"role": "assistant", "content": shown.text})
            console.print(Text(figures, style="dim"))


def _local(options: argparse.Namespace, console: Console) -> Answerer:
    llm = _load(options, console)
    return lambda messages: _answer(llm, llm.chat_token_ids(messages), _params(options), console)


def _remote(options: argparse.Namespace, console: Console) -> Answerer:
    """A server's model, by its stream."""
    from draftproof.cli.http_client import Client

    if typed := [name for name, default in ENGINE.items() if getattr(options, name) != default]:
        raise ConfigError(f"{' and '.join(typed)}: with --url that is the server's to say; leave it out")
    client = Client(options.url)
    console.print(Text(client.describe(), style="dim"))
    wish = {name: getattr(options, name) for name in ("temperature", "top_p", "top_k", "min_p", "seed")}
    wish |= {"repetition_penalty": options.repetition_penalty, "max_completion_tokens": options.max_tokens}
    if options.stop:
        wish["stop"] = options.stop

    def answer(messages: list[dict[str, str]]) -> tuple[Shown, str]:
        stream = client.chat(messages, wish)
        shown = show(stream, console)
        return shown, shown.figures(stream.stats)

    return answer


def _info(options: argparse.Namespace, console: Console) -> int:
    import torch

    from draftproof.models.decoder import Llama
    from draftproof.models.load import load_config
    from draftproof.models.weights import expected_tensors
    from draftproof.text.tokenizer import load_tokenizer

    config, source = load_config(options.model)
    parameters = sum(math.prod(shape) for shape in expected_tensors(config).values())
    kv = Llama.kv_layout(config, torch.bfloat16).bytes_per_token
    table = Table(show_header=False, box=None)
    rows: list[tuple[str, object]] = [
        ("architecture", config.architecture),
        ("parameters", f"{parameters:,}"),
        ("stored as", config.dtype),
        ("layers", config.num_layers),
        ("hidden", config.hidden_size),
        ("heads", f"{config.num_heads} query, {config.num_kv_heads} key/value, of {config.head_dim}"),
        ("vocabulary", f"{config.vocab_size:,}"),
        ("positions", f"{config.max_position:,}"),
        ("rope", f"theta {config.rope_theta:g}, scaling {config.rope_scaling.kind}"),
        ("KV per token", f"{kv:,} bytes in bf16"),
        ("source", source),
    ]
    try:
        tokenizer = load_tokenizer(source)
        rows.append(("tokenizer", f"{tokenizer.vocab_size:,} tokens, ends with {tokenizer.eos_token_ids}"))
        rows.append(("chat template", "yes" if tokenizer.chat_template else "no"))
    except DraftproofError as error:
        rows.append(("tokenizer", f"none: {error}"))
    for name, value in rows:
        table.add_row(name, str(value))
    console.print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
