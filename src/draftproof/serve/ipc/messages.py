"""What a server process says to the worker, and what the worker says beside frames. Typed, checked when read.

A request crosses as token ids and options; text stays in the server. Its options are checked there, with the
worker's limits, and once more in the worker, which builds them anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, fields
from typing import Annotated, Any

import msgspec

from draftproof.engine.validation import Limits
from draftproof.errors import RequestError
from draftproof.metrics import Timings
from draftproof.sampling_params import MAX_SEED, SamplingParams, SpeculativeParams
from draftproof.serve.ipc.frame import VERSION
from draftproof.structured_outputs import StructuredOutputs
from draftproof.types import Request
from draftproof.verify.guarantee import Guarantee

WELCOME, FAREWELL, TIMINGS = b"DPRW", b"DPRB", b"DPRT"  # a frame begins with wire.MAGIC
# of SamplingParams: what the server has made ids of, or does itself
TEXT = ("stop", "bad_words", "prediction", "logits_processors")


Handle = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class Hello(msgspec.Struct, tag="hello", array_like=True, frozen=True):
    version: int = VERSION


class Add(msgspec.Struct, tag="add", array_like=True, frozen=True):
    """All requests of a job; they are let in together or not at all. What they share follows as a `Body`."""

    handle: Handle  # of the first; the others follow
    seeds: Annotated[list[Annotated[int, msgspec.Meta(ge=0, le=MAX_SEED)]], msgspec.Meta(min_length=1)]


class Abort(msgspec.Struct, tag="abort", array_like=True, frozen=True):
    handles: list[Handle]


class Body(msgspec.Struct, array_like=True, frozen=True):
    prompt: list[int]
    params: dict[str, Any]  # those that are not as they would be without saying so
    bad_words: list[list[int]]
    prediction: list[int]
    eos: list[int]


class Welcome(msgspec.Struct, frozen=True):
    """What a server must know of the engine to check requests and make text of its answers."""

    version: int
    pid: int
    model: str
    options: dict[str, Any]  # of EngineConfig.parse
    limits: Limits
    sources: tuple[str, ...]
    strategies: dict[str, Guarantee]
    accept_policy: str  # of requests with speculation
    strategy: str  # with speculation, if a request names none
    plain: str  # and without
    eos_token_ids: tuple[int, ...]
    tokenizer: str | None  # a folder or file
    description: str


class Farewell(msgspec.Struct, frozen=True):
    reason: str


_encoder = msgspec.msgpack.Encoder()
_notes = msgspec.msgpack.Decoder(Hello | Add | Abort)
_bodies = msgspec.msgpack.Decoder(Body)
_welcomes = msgspec.msgpack.Decoder(Welcome)
_farewells = msgspec.msgpack.Decoder(Farewell)
_timings = msgspec.msgpack.Decoder(Timings)
encode = _encoder.encode
read_note = _notes.decode
read_body = _bodies.decode
read_welcome = _welcomes.decode
read_farewell = _farewells.decode
read_timings = _timings.decode


def body_of(request: Request) -> bytes:
    """Of a job, by one of its requests. RequestError: it holds what cannot leave this process."""
    params = request.params
    if params.logits_processors:
        raise RequestError(
            "logits_processors are functions and the engine is in another process: use logit_bias, "
            "allowed_token_ids or structured_outputs, or embed the engine (AsyncLLM)",
            "logits_processors",
        )
    try:
        return encode(
            Body(
                list(request.prompt_token_ids),
                wish_of(params),
                [list(word) for word in request.bad_word_ids],
                list(request.prediction_ids),
                list(request.eos_token_ids),
            )
        )
    except (TypeError, ValueError, OverflowError) as error:  # a number beyond 64 bits, a text that is none
        raise RequestError(f"the request cannot be sent to the engine: {error}") from error


def wish_of(params: SamplingParams) -> dict[str, Any]:
    wish = {}
    for name, default in _DEFAULTS.items():
        value = getattr(params, name)
        if value != default:
            wish[name] = value
    if params.speculation != SpeculativeParams():
        wish["speculative"] = _given(params.speculation)
    if params.structure is not None:
        wish["structured_outputs"] = _given(params.structure)
    return wish


def params_of(wish: dict[str, Any]) -> SamplingParams:
    """RequestError as SamplingParams raises it."""
    try:
        return SamplingParams(**wish)
    except TypeError as error:  # an option of another version
        raise RequestError(f"the engine's process cannot read these options: {error}") from error


def _given(value: SpeculativeParams | StructuredOutputs) -> dict[str, Any]:
    return {f.name: getattr(value, f.name) for f in fields(value) if getattr(value, f.name) != f.default}


def _default(field: Any) -> Any:
    return field.default if field.default is not MISSING else field.default_factory()


_APART = (*TEXT, "speculative", "structured_outputs", "seed")
_DEFAULTS = {f.name: _default(f) for f in fields(SamplingParams) if f.name not in _APART}


def requests_of(add: Add, body: Body, params: SamplingParams, name: str, grammar: Any) -> Sequence[Request]:
    """As the worker serves them."""
    return [
        Request(
            id=f"{name}{add.handle + i}",
            prompt_token_ids=body.prompt,
            params=params,
            seed=seed,
            bad_word_ids=body.bad_words,
            prediction_ids=body.prediction,
            eos_token_ids=body.eos,
            grammar=grammar,
        )
        for i, seed in enumerate(add.seeds)
    ]
