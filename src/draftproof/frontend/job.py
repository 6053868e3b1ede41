"""Job: one prompt with its n requests and the outputs they build."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from draftproof.errors import EngineClosedError, RequestError
from draftproof.metrics import RequestStats
from draftproof.outputs import LogprobRow, TokenEvent
from draftproof.text.bulk.output import BulkOutput
from draftproof.text.streaming_output import StreamingOutput
from draftproof.text.tokenizer import Tokenizer
from draftproof.types import Request

OnEvents = Callable[[Sequence[TokenEvent]], Any]


@dataclass(slots=True)
class Job:
    """One prompt, its n requests and their outputs."""

    id: str
    prompt: str | None
    prompt_token_ids: list[int]
    requests: list[Request]
    tokenizer: Tokenizer | None
    on_events: OnEvents | None  # receives the events of a stream, step by step; None: not streamed
    max_length: int = 0
    outputs: Sequence[BulkOutput | StreamingOutput] = ()  # created when the job is opened
    prompt_logprob_rows: list[LogprobRow] = field(default_factory=list)
    request_stats: list[RequestStats] = field(default_factory=list)  # of requests the engine has accepted
    num_finished: int = 0
    rejection: RequestError | EngineClosedError | None = None  # by an engine in another process

    @property
    def is_finished(self) -> bool:
        """True if every output has finished by itself."""
        return self.num_finished == len(self.requests)
