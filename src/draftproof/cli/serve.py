"""`draftproof serve`: options from the command line and a file, processes, banner."""

from __future__ import annotations

import argparse
import json
import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftproof import __version__
from draftproof.cli.engine_options import add_engine_options, add_model, offered_options, read_engine_options
from draftproof.errors import ConfigError, nearest
from draftproof.sampling_params import SamplingParams
from draftproof.serve.settings import KEY_VARIABLE, Settings, default_hosts, read_admin_keys, read_keys

if TYPE_CHECKING:
    import socket

    from rich.console import Console

MAX_NUM_WAITING = 1024  # default of the server
EXAMPLES = """examples:
  draftproof serve
  draftproof serve smollm2-135m --speculative-config '{"method": "ngram", "num_speculative_tokens": 5}'
  draftproof serve ./my-model --host 0.0.0.0 --port 8080 --api-key-file keys.txt
  draftproof serve --config server.toml        (these options as keys: port = 8080)

then:
  curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{"messages": [{"role": "user", "content": "Hello!"}]}'
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.usage = "draftproof serve [MODEL] [options]"
    parser.description = "Serve a model over HTTP with OpenAI's API."
    parser.epilog = EXAMPLES
    add_model(parser)
    text = "a .toml or .json file with these options; the command line takes precedence"
    parser.add_argument("--config", metavar="FILE", help=text)
    engine = parser.add_argument_group("engine")
    add_engine_options(engine, offered_options(), {"max_num_waiting": MAX_NUM_WAITING})
    _add_server_options(parser.add_argument_group("server"))
    _add_limits(parser.add_argument_group("limits"))
    parser.set_defaults(run=run)


def _add_server_options(group: Any) -> None:
    add = group.add_argument
    add("--host", default="127.0.0.1", help="address; 0.0.0.0: all interfaces (default: %(default)s)")
    add("--port", type=int, default=8000, help="port to listen on; 0: any free port (default: 8000)")
    text = (
        "name in the header Host; may be repeated; '*': any (default: names of a loopback --host, else any)"
    )
    add("--allowed-hosts", action="append", metavar="NAME", help=text)
    text = "origin of pages that may call this server (CORS); may be repeated; '*': any (default: none)"
    add("--allowed-origins", action="append", metavar="ORIGIN", help=text)
    add("--root-path", default="", metavar="PATH", help="prefix of all paths that a proxy removes")
    add("--ssl-certfile", metavar="FILE", help="certificate chain for TLS (PEM)")
    add("--ssl-keyfile", metavar="FILE", help="private key of the certificate (PEM)")
    add("--server-processes", type=int, default=1, metavar="N", help="HTTP processes (default: 1)")
    add("--served-model-name", action="append", metavar="NAME", help="name in the API; may be repeated")
    text = f"one key a line, maybe with max-priority=N; the environment's {KEY_VARIABLE} adds keys"
    add("--api-key-file", metavar="FILE", help=text)
    text = "let requests of all API keys share cached prefixes and drafts from earlier outputs"
    add("--share-prefix-cache", action="store_true", help=text)
    text = "encode special tokens that messages contain, such as <|im_end|>, as tokens and not as text"
    add("--allow-control-tokens", action="store_true", help=text)
    add(
        "--vllm-metrics",
        action="store_true",
        help="export speculation counters, queue and KV usage under vllm: as well",
    )
    add("--log-level", choices=("debug", "info", "warning", "error"), default="info")
    add("--log-file", metavar="FILE", help="file for JSON log lines (default: standard error)")
    text = "responses of one API key kept for previous_response_id; 0: none (default: 1000, or 0 with N > 1)"
    add("--max-stored-responses", type=int, metavar="N", help=text)
    text = "format of tool calls, such as hermes (default: that of the chat template)"
    add("--tool-call-parser", metavar="NAME", help=text)
    text = (
        """two tokens of a reranker, as ["no", "yes"]: /v1/score and /v1/rerank compare their probabilities"""
    )
    add("--classifier-from-token", action="append", metavar="TOKEN", help=text)
    text = "names for the chat template, as JSON; those of a request take precedence"
    add("--default-chat-template-kwargs", type=json.loads, default={}, metavar="JSON", help=text)
    add("--log-prompts", action="store_true", help="include prompts in the log")


def _add_limits(group: Any) -> None:
    defaults = {field.name: field.default for field in fields(Settings)}
    for name, kind, text in (
        ("max_body_bytes", int, "bytes of one request"),
        ("max_prompt_tokens", int, "tokens of one prompt"),
        ("max_n", int, "outputs of one prompt"),
        ("max_choices", int, "prompts times n of one request"),
        ("max_logprob_entries", int, "tokens times logprobs of one request"),
        ("max_concurrent", int, "requests at once, over all processes"),
        ("max_concurrent_per_key", int, "requests of one API key at once, over all processes"),
        ("max_priority", int, "largest absolute `priority` of a request; 0: none is accepted"),
        ("max_stored_bytes", int, "bytes of the stored responses of one API key"),
        ("keep_alive_seconds", float, "seconds of silence after which a stream gets a comment; 0: none"),
        ("request_seconds", float, "seconds from a request to the end of its response"),
        ("body_seconds", float, "seconds for a body to arrive"),
        ("stall_seconds", float, "seconds that a client may leave its response unread"),
        ("drain_seconds", float, "seconds for open requests after SIGTERM"),
    ):
        value = defaults[name]
        shown = "none" if value is None else f"{value:g}" if kind is float else value
        flag = "--" + name.replace("_", "-")
        group.add_argument(flag, type=kind, default=value, metavar="N", help=f"{text} (default: {shown})")


def with_config_file(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> list[str]:
    """Return the arguments with those of a --config file before them; the command line takes precedence."""
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    early.add_argument("--config")
    path = early.parse_known_args(arguments)[0].config
    if path is None:
        return list(arguments)
    return [*to_arguments(parser, _read(Path(path)), path), *arguments]


def to_arguments(parser: argparse.ArgumentParser, options: Mapping[str, Any], source: str) -> Iterator[str]:
    """Yield options by name, such as those of a file, as command-line arguments; `source` is for errors."""
    known = {action.dest: action for action in parser._actions if action.dest not in ("help", "config")}
    for key, value in options.items():
        name = key.replace("-", "_")
        if name not in known:
            raise ConfigError(f"{source}: unknown option {key!r}: {nearest(name, known)}")
        flag = "--" + name.replace("_", "-")
        if name == "model":
            parser.set_defaults(model=str(value))
        elif known[name].nargs == 0:
            if not isinstance(value, bool):
                raise ConfigError(f"{source}: {key} must be true or false, got {value!r}")
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


def read_settings(options: argparse.Namespace) -> Settings:
    """Return the settings of the HTTP server."""
    lists: dict[str, Any] = {
        "served_model_names": tuple(options.served_model_name or ()),
        "allowed_hosts": _list(options.allowed_hosts) or default_hosts(options.host),
        "allowed_origins": _list(options.allowed_origins),
        "classifier_from_token": _list(options.classifier_from_token),
    }
    same = {f.name for f in fields(Settings)} - {"api_keys", "admin_keys", *lists}
    given = {name: getattr(options, name) for name in same}
    if options.server_processes > 1:  # each process would have a store of its own
        if options.max_stored_responses:
            raise ConfigError("--max-stored-responses needs --server-processes 1: the store is in its memory")
        given["max_stored_responses"] = 0
    elif options.max_stored_responses is None:
        del given["max_stored_responses"]
    keys: dict[str, Any] = {"api_keys": read_keys(options.api_key_file), "admin_keys": read_admin_keys()}
    return Settings(**keys, **lists, **given)


def _list(values: Sequence[str] | None) -> tuple[str, ...]:
    """Return the items of a repeated option; one value may be a JSON list, as vLLM takes it."""
    items: list[str] = []
    for value in values or ():
        found = json.loads(value) if value.startswith("[") and value.endswith("]") else [value]
        items += map(str, found)
    return tuple(items)


def run(options: argparse.Namespace, console: Console) -> int:
    """Start the worker and the HTTP processes and serve until a signal."""
    from rich.text import Text

    from draftproof.serve.http.request_log import configure_logging
    from draftproof.serve.http.server import listen
    from draftproof.serve.http_processes import HttpProcessGroup, serve_address
    from draftproof.serve.supervisor import Supervisor
    from draftproof.text.reasoning.formats import find_format

    settings, engine = read_settings(options), read_engine_options(options, offered_options())
    find_format(
        engine["reasoning_parser"] or None, template=""
    )  # an unknown name fails before the model loads
    if options.server_processes < 1:
        raise ConfigError("--server-processes must be at least 1")
    listener = listen(options.host, options.port, settings.stall_seconds)
    try:
        configure_logging(options.log_level, options.log_file)
        supervisor = Supervisor(options.model, log_level=options.log_level.upper(), **engine)
    except ConfigError:
        listener.close()
        raise
    try:
        with console.status(Text(f"loading {options.model}")):
            supervisor.start()
        address, count, folder = supervisor.address, options.server_processes, supervisor.folder
        ready = partial(_banner, options, listener, console)
        if count == 1:
            serve_address(address, settings, listener, ready)
        else:
            group = HttpProcessGroup(count, address, folder, settings, listener, ready)
            group.run(options.log_level, options.log_file)
        return 0
    finally:
        listener.close()
        supervisor.stop()


def _describe_numerics(numerics: str, engine: str) -> str:
    """Return the option and its effect: only the Triton backend has other kernels for "fast"."""
    if numerics == "exact":
        return numerics
    if "(triton backend)" in engine:
        return f"{numerics}: bits may depend on the batch"
    return f"{numerics}: the same bits as exact with this backend"


def _banner(options: argparse.Namespace, listener: socket.socket, console: Console, llm: Any) -> None:
    from rich.table import Table

    config, spec = llm.config, llm.config.speculative
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    scheme = "http" if options.ssl_certfile is None else "https"
    table = Table(show_header=False, box=None, pad_edge=False)
    engine = llm.describe().split(", ")[1]
    rows = [
        ("Draftproof", __version__),
        ("model", config.model),
        ("engine", engine),
        ("numerics", _describe_numerics(config.numerics, engine)),
        ("drafts", f"{spec.method}, at most {spec.num_speculative_tokens}" if spec else "none"),
        ("strategy", llm.strategy_label(SamplingParams())[0]),
        ("context", f"{llm.limits.max_model_len} tokens"),
        ("keys", "required" if options.api_key_file or os.environ.get(KEY_VARIABLE) else "not required"),
        ("URL", f"{scheme}://{shown}:{port}/v1   (page: {scheme}://{shown}:{port}/)"),
    ]
    for name, value in rows:
        table.add_row(name, value)
    console.print(table)
