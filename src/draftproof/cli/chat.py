"""`draftproof chat`: a conversation with a local model or with the model of a server."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable

from rich.console import Console
from rich.text import Text

from draftproof.cli.local_model import (
    ENGINE_OPTIONS,
    add_model_options,
    load_model,
    sampling_params,
    stream_output,
)
from draftproof.cli.render import RenderedOutput, legend, render
from draftproof.errors import ConfigError, DraftproofError

Messages = list[dict[str, str]]
Responder = Callable[[Messages], tuple[RenderedOutput, str]]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_model_options(parser)
    parser.add_argument("--url", help="address of a server, such as http://127.0.0.1:8000; loads no model")
    parser.add_argument("--system", help="system message")
    engine_names = ("model", "speculative_config", *ENGINE_OPTIONS)
    parser.set_defaults(run=run, engine_defaults={name: parser.get_default(name) for name in engine_names})


def run(options: argparse.Namespace, console: Console) -> int:
    """Read messages and render outputs until the end of input."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (line editing and history for input())
    respond = _remote(options, console) if options.url else _local(options, console)
    console.print("/reset starts over, /exit or Ctrl-D quits, Ctrl-C ends an output.")
    console.print(legend())
    initial = [{"role": "system", "content": options.system}] if options.system else []
    messages = list(initial)
    while True:
        try:
            line = console.input("[bold]> [/bold]").strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return 0
        if line in ("/exit", "/quit"):
            return 0
        if line == "/reset":
            messages = list(initial)
        elif line:
            messages.append({"role": "user", "content": line})
            try:
                output, figures = respond(messages)
            except DraftproofError as error:
                messages.pop()
                console.print(Text(f"{error}", style="red"))
                continue
            messages.append({"role": "assistant", "content": output.text})
            console.print(Text(figures, style="dim"))


def _local(options: argparse.Namespace, console: Console) -> Responder:
    llm = load_model(options, console)
    params = sampling_params(options)
    return lambda messages: stream_output(llm, llm.chat_token_ids(messages), params, console)


def _remote(options: argparse.Namespace, console: Console) -> Responder:
    from draftproof.cli.http_client import HttpClient

    changed = [name for name, value in options.engine_defaults.items() if getattr(options, name) != value]
    if changed:
        raise ConfigError(f"{' and '.join(changed)}: set by the server when --url is given; leave it out")
    client = HttpClient(options.url)
    console.print(Text(client.describe(), style="dim"))
    names = ("temperature", "top_p", "top_k", "min_p", "seed", "repetition_penalty")
    params = {name: getattr(options, name) for name in names}
    params["max_completion_tokens"] = options.max_tokens
    if options.stop:
        params["stop"] = options.stop

    def respond(messages: Messages) -> tuple[RenderedOutput, str]:
        stream = client.chat(messages, params)
        output = render(stream, console)
        return output, output.figures(stream.stats)

    return respond
