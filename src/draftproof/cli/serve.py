"""`draftproof serve`: options from the command line and a file, the processes, the banner."""

from __future__ import annotations

import argparse
import json
import os
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftproof import __version__
from draftproof.config import read_speculation
from draftproof.errors import ConfigError, nearest
from draftproof.serve.settings import KEY_VARIABLE, Settings, read_keys

if TYPE_CHECKING:
    import socket

    from rich.console import Console

ENGINE = (
    *("tokenizer", "dtype", "device", "backend", "numerics", "load_format", "revision", "max_model_len"),
    *("max_num_seqs", "max_num_batched_tokens", "page_size", "kv_cache_tokens", "enable_prefix_caching"),
    *("max_num_waiting", "memory_utilization", "max_logprobs", "seed"),
)
EXAMPLES = """examples:
  draftproof serve
  draftproof serve smollm2-135m --speculative-config '{"method": "ngram", "num_speculative_tokens": 5}'
  draftproof serve ./my-model --host 0.0.0.0 --port 8080 --api-key-file keys.txt
  draftproof serve --config server.toml        (these options as keys: port = 8080)

then:
  curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{"messages": [{"role": "user", "content": "Hello!"}]}'
"""


def add_options(parser: argparse.ArgumentParser, default_model: str, default_speculation: str) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.usage = "draftproof serve [MODEL] [options]"
    parser.description = "Serve a model over HTTP, as OpenAI does; speculation changes nothing but the speed."
    parser.epilog = EXAMPLES
    parser.add_argument(
        "model",
        nargs="?",
        default=default_model,
        help="name, folder, .gguf file or hub id (default: %(default)s)",
    )
    parser.add_argument(
        "--config", metavar="FILE", help="a .toml or .json file with these options; what is typed wins"
    )
    _engine_options(parser.add_argument_group("the engine"), default_speculation)
    _server_options(parser.add_argument_group("the server"))
    _limits(parser.add_argument_group("limits"))


def _engine_options(group: Any, default_speculation: str) -> None:
    add = group.add_argument
    add(
        "--speculative-config",
        default=default_speculation,
        metavar="JSON",
        help="who drafts and who judges, in vLLM's keys; 'off' for none (default: %(default)s)",
    )
    add("--tokenizer", metavar="FOLDER", help="another tokenizer than the model's own")
    add(
        "--dtype",
        choices=("auto", "bfloat16", "float32"),
        default="auto",
        help="of the weights (default: auto)",
    )
    add("--device", default="auto", help="cpu, cuda, cuda:1, … (default: auto)")
    add("--backend", default="auto", help="reference, torch, cpu, triton (default: auto)")
    add("--numerics", choices=("exact", "fast"), default="exact", help="exact: bits do not hang on the batch")
    add("--load-format", choices=("auto", "safetensors", "gguf", "dummy"), default="auto")
    add("--revision", help="of a model from the hub")
    add("--max-model-len", type=int, metavar="N", help="tokens of prompt and answer together")
    add("--max-num-seqs", type=int, metavar="N", help="requests in one batch")
    add("--max-num-batched-tokens", type=int, metavar="N", help="rows of one step")
    add(
        "--max-num-waiting",
        type=int,
        default=1024,
        metavar="N",
        help="requests that may queue up (default: 1024)",
    )
    add("--kv-cache-tokens", type=int, metavar="N", help="tokens that the KV cache holds")
    add("--page-size", type=int, default=16, metavar="N", help="tokens of a page of it (default: 16)")
    add(
        "--memory-utilization",
        "--gpu-memory-utilization",
        type=float,
        default=0.9,
        metavar="SHARE",
        help="of a device's memory (default: 0.9)",
    )
    add("--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=True)
    add("--max-logprobs", type=int, default=20, metavar="N", help="a token (default: 20)")
    add("--seed", type=int, metavar="N", help="of the seeds for requests that give none")


def _server_options(group: Any) -> None:
    add = group.add_argument
    add("--host", default="127.0.0.1", help="0.0.0.0 opens it to the network (default: %(default)s)")
    add("--port", type=int, default=8000, help="0: any free one (default: 8000)")
    add(
        "--server-processes",
        type=int,
        default=1,
        metavar="N",
        help="that speak HTTP, one engine (default: 1)",
    )
    add("--served-model-name", action="append", metavar="NAME", help="what clients call it; may be repeated")
    add(
        "--api-key-file", metavar="FILE", help=f"one key a line; {KEY_VARIABLE} in the environment adds to it"
    )
    add("--vllm-metrics", action="store_true", help="the speculation counters under vllm: as well")
    add("--log-level", choices=("debug", "info", "warning", "error"), default="info")
    add("--log-file", metavar="FILE", help="JSON lines (default: standard error)")
    add("--log-prompts", action="store_true", help="what clients say is in the log, too")


def _limits(group: Any) -> None:
    defaults = {field.name: field.default for field in fields(Settings)}
    for name, kind, text in (
        ("max_body_bytes", int, "of one request"),
        ("max_prompt_tokens", int, "of one prompt"),
        ("max_n", int, "answers to one prompt"),
        ("max_choices", int, "prompts times n of one request"),
        ("max_logprob_entries", int, "tokens times logprobs of one request"),
        ("max_concurrent", int, "requests at once, over all processes"),
        ("max_concurrent_per_key", int, "requests of one API key at once, over all processes"),
        ("request_seconds", float, "from a request to the end of its answer"),
        ("body_seconds", float, "for a body to arrive"),
        ("stall_seconds", float, "that a client may leave its answer unread"),
        ("drain_seconds", float, "for open requests after SIGTERM"),
    ):
        value = defaults[name]
        shown = "none" if value is None else f"{value:g}" if kind is float else value
        flag = "--" + name.replace("_", "-")
        group.add_argument(flag, type=kind, default=value, metavar="N", help=f"{text} (default: {shown})")


# --- the file ---------------------------------------------------------------------------------------------


def with_file(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> list[str]:
    """The arguments of `serve`, with those of a --config file before them, so that what is typed wins."""
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    early.add_argument("--config")
    path = early.parse_known_args(arguments)[0].config
    return list(arguments) if path is None else [*_from_file(parser, Path(path)), *arguments]


def _from_file(parser: argparse.ArgumentParser, path: Path) -> Iterator[str]:
    known = {action.dest: action for action in parser._actions if action.dest not in ("help", "config")}
    for key, value in _read(path).items():
        name = key.replace("-", "_")
        if name not in known:
            raise ConfigError(f"{path}: unknown option {key!r}: {nearest(name, known)}")
        flag = "--" + name.replace("_", "-")
        if name == "model":
            parser.set_defaults(model=str(value))
        elif known[name].nargs == 0:
            if not isinstance(value, bool):
                raise ConfigError(f"{path}: {key} must be true or false, got {value!r}")
            if isinstance(known[name], argparse.BooleanOptionalAction):
                yield flag if value else "--no-" + flag[2:]
            elif value:
                yield flag
        elif isinstance(value, list):
            for item in value:
                yield f"{flag}={item}"
        else:
            yield f"{flag}={json.dumps(value) if isinstance(value, dict) else value}"


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        found = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not {'JSON' if path.suffix == '.json' else 'TOML'}: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path} must hold an object: the options by name")
    return found


def settings_of(options: argparse.Namespace) -> Settings:
    same = {f.name for f in fields(Settings)} - {"api_keys", "served_model_names"}
    names = tuple(options.served_model_name or ())
    given = {name: getattr(options, name) for name in same}
    return Settings(api_keys=read_keys(options.api_key_file), served_model_names=names, **given)


def engine_options(options: argparse.Namespace) -> dict[str, Any]:
    made = {name: getattr(options, name) for name in ENGINE}
    return {**made, "speculative_config": read_speculation(options.speculative_config)}


# --- running ----------------------------------------------------------------------------------------------


def run(options: argparse.Namespace, console: Console) -> int:
    from rich.text import Text

    from draftproof.serve.http.request_log import set_up
    from draftproof.serve.http.server import listen
    from draftproof.serve.http_processes import Fleet, serve_address
    from draftproof.serve.supervisor import Supervisor

    settings, engine = settings_of(options), engine_options(options)
    if options.server_processes < 1:
        raise ConfigError("--server-processes must be at least 1")
    listener = listen(options.host, options.port, settings.stall_seconds)
    try:
        set_up(options.log_level, options.log_file)
        supervisor = Supervisor(options.model, log_level=options.log_level.upper(), **engine)
    except ConfigError:
        listener.close()
        raise
    try:
        with console.status(Text(f"loading {options.model}")):
            supervisor.start()
        address, folder = supervisor.address, supervisor.folder

        def ready(llm: Any) -> None:
            _banner(options, llm, listener, console)

        if options.server_processes == 1:
            serve_address(address, settings, listener, ready)
        else:
            Fleet(options.server_processes, address, folder, settings, listener, ready).run(options)
        return 0
    finally:
        listener.close()
        supervisor.stop()


def _banner(options: argparse.Namespace, llm: Any, listener: socket.socket, console: Console) -> None:
    from rich.table import Table

    config, spec = llm.config, llm.config.speculative
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    table = Table(show_header=False, box=None, pad_edge=False)
    strategy = spec.verify_strategy if spec else "target_match"
    rows = [
        ("Draftproof", __version__),
        ("model", config.model),
        ("engine", llm.describe().split(", ")[1]),
        (
            "numerics",
            f"{config.numerics}" + ("" if config.numerics == "exact" else ": bits may hang on the batch"),
        ),
        ("drafts", f"{spec.method}, at most {spec.num_speculative_tokens}" if spec else "none"),
        ("strategy", f"{strategy}: {llm.strategies[strategy].label}"),
        ("context", f"{llm.limits.max_model_len} tokens"),
        ("keys", "needed" if options.api_key_file or os.environ.get(KEY_VARIABLE) else "none needed"),
        ("URL", f"http://{shown}:{port}/v1   (page: http://{shown}:{port}/)"),
    ]
    for name, value in rows:
        table.add_row(name, value)
    console.print(table)
