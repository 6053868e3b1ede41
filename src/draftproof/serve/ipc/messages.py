"""Typed messages between an HTTP process and the worker, other than frames. Decoding validates them.

A request is sent as token ids and options; text stays in the HTTP process. The HTTP process validates the
options against the worker's limits, and the worker validates them again when it rebuilds them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, fields
from typing import Annotated, Any

import msgspec

from draftproof.engine.live.operations import OperationName, PauseMode
from draftproof.engine.validation import Limits
from draftproof.errors import RequestError
from draftproof.frontend.pooler import Pooler
from draftproof.metrics import Timings
from draftproof.sampling_params import MAX_SEED, SamplingParams, SpeculativeParams
from draftproof.serve.ipc.frame import VERSION
from draftproof.structured_outputs import StructuredOutputs
from draftproof.types import PoolingType, Request
from draftproof.verify.guarantee import StrategyGuarantees

# first bytes of a message of the worker; a frame begins with frame.MAGIC
ENGINE_INFO, DISCONNECTED, TIMINGS, OPERATION_RESULT = b"DPRW", b"DPRB", b"DPRT", b"DPRO"
# options of SamplingParams that the HTTP process converts to token ids, or handles itself
TEXT_OPTIONS = ("stop", "bad_words", "prediction", "logits_processors")
Handle = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class Hello(msgspec.Struct, tag="hello", array_like=True, frozen=True):
    """First message of an HTTP process."""

    version: int = VERSION


class AddRequests(msgspec.Struct, tag="add", array_like=True, frozen=True):
    """All requests of one prompt, admitted together or not at all. A RequestBody follows."""

    handle: Handle  # of the first request; the others count up from it
    seeds: Annotated[list[Annotated[int, msgspec.Meta(ge=0, le=MAX_SEED)]], msgspec.Meta(min_length=1)]


class AbortRequests(msgspec.Struct, tag="abort", array_like=True, frozen=True):
    """Requests to abort."""

    handles: list[Handle]


class RunOperation(msgspec.Struct, tag="operate", array_like=True, frozen=True):
    """Operation on the engine: a weight update from files, sleep, or wake-up."""

    number: int  # chosen by the HTTP process, for the result
    name: OperationName
    arguments: dict[str, Any]
    mode: PauseMode


class OperationResult(msgspec.Struct, frozen=True):
    """Result of an operation; with `error` the text of the exception and the name of its class."""

    number: int
    value: int | None = None
    error: str | None = None
    error_type: str = ""


class RequestBody(msgspec.Struct, array_like=True, frozen=True):
    """Fields that the requests of one prompt share."""

    prompt: list[int]
    params: dict[str, Any]  # options that differ from their defaults
    bad_words: list[list[int]]
    prediction: list[int]
    eos: list[int]
    pooling: PoolingType | None = None


class EngineInfo(msgspec.Struct, frozen=True):
    """Properties of the engine that an HTTP process needs to validate requests and to build text."""

    version: int
    pid: int
    model: str
    options: dict[str, Any]  # of EngineConfig.parse
    limits: Limits
    sources: tuple[str, ...]
    strategies: StrategyGuarantees
    eos_token_ids: tuple[int, ...]
    tokenizer: str | None  # a folder or file
    default_options: dict[str, Any]  # sampling options of requests that give none
    pooler: Pooler
    description: str


class Disconnected(msgspec.Struct, frozen=True):
    """Last message of the worker to an HTTP process."""

    reason: str


encode = msgspec.msgpack.Encoder().encode
decode_message = msgspec.msgpack.Decoder(Hello | AddRequests | AbortRequests | RunOperation).decode
decode_body = msgspec.msgpack.Decoder(RequestBody).decode
decode_engine_info = msgspec.msgpack.Decoder(EngineInfo).decode
decode_disconnected = msgspec.msgpack.Decoder(Disconnected).decode
decode_operation_result = msgspec.msgpack.Decoder(OperationResult).decode
decode_timings = msgspec.msgpack.Decoder(Timings).decode


def encode_body(request: Request) -> bytes:
    """Encode what the requests of a prompt share; RequestError if an option cannot be sent."""
    params = request.params
    if params.logits_processors:
        hint = "use logit_bias, allowed_token_ids or structured_outputs, or embed the engine (AsyncLLM)"
        text = f"logits_processors are functions and the engine is in another process: {hint}"
        raise RequestError(text, "logits_processors")
    try:
        return encode(
            RequestBody(
                prompt=list(request.prompt_token_ids),
                params=changed_params(params),
                bad_words=[list(word) for word in request.bad_word_ids],
                prediction=list(request.prediction_ids),
                eos=list(request.eos_token_ids),
                pooling=request.pooling,
            )
        )
    except (TypeError, ValueError, OverflowError) as error:  # an integer beyond 64 bits, invalid Unicode
        raise RequestError(f"the request cannot be sent to the engine: {error}") from error


def changed_params(params: SamplingParams) -> dict[str, Any]:
    """Return the options that differ from their defaults, without those of TEXT_OPTIONS."""
    defaults = _DEFAULTS.items()
    changed = {name: value for name, default in defaults if (value := getattr(params, name)) != default}
    if params.speculation != SpeculativeParams():
        changed["speculative"] = _changed_fields(params.speculation)
    if params.structure is not None:
        changed["structured_outputs"] = _changed_fields(params.structure)
    return changed


def build_params(changed: dict[str, Any]) -> SamplingParams:
    """Rebuild SamplingParams from `changed_params`. Raises RequestError."""
    try:
        return SamplingParams(**changed)
    except TypeError as error:  # an option of another version
        raise RequestError(f"the engine's process cannot read these options: {error}") from error


def _changed_fields(value: SpeculativeParams | StructuredOutputs) -> dict[str, Any]:
    return {f.name: getattr(value, f.name) for f in fields(value) if getattr(value, f.name) != f.default}


def _default(field: Any) -> Any:
    return field.default if field.default is not MISSING else field.default_factory()


_EXCLUDED_OPTIONS = (*TEXT_OPTIONS, "speculative", "structured_outputs", "seed")
_DEFAULTS = {f.name: _default(f) for f in fields(SamplingParams) if f.name not in _EXCLUDED_OPTIONS}


def build_requests(
    add: AddRequests, body: RequestBody, params: SamplingParams, id_prefix: str, grammar: Any
) -> Sequence[Request]:
    """Rebuild the requests of one prompt in the worker."""
    return [
        Request(
            id=f"{id_prefix}{add.handle + i}",
            prompt_token_ids=body.prompt,
            params=params,
            seed=seed,
            bad_word_ids=body.bad_words,
            prediction_ids=body.prediction,
            eos_token_ids=body.eos,
            grammar=grammar,
            pooling=body.pooling,
        )
        for i, seed in enumerate(add.seeds)
    ]
