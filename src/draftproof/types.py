"""Nouns that cross a seam: requests, slot columns, drafts, verdicts, step outputs, results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from draftproof.metrics import SpecStats
from draftproof.sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What the engine serves: token ids in, token ids out. Text has been left behind."""

    id: str
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    seed: int  # always given: drawn afresh for a request that had none
    bad_word_ids: Sequence[Sequence[int]] = ()
    prediction_ids: Sequence[int] = ()
    eos_token_ids: Sequence[int] = ()


# --- between engine, proposers and strategies ---------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SlotColumns:
    """The only mutable state: one line a running request. S slots; see docs/design.md for invariants."""

    tokens: Tensor  # [S, max_len] int64: prompt, then committed output; append-only
    length: Tensor  # [S] int64: committed tokens, prompt included
    prompt_len: Tensor  # [S] int64
    computed: Tensor  # [S] int64: tokens whose KV is stored
    draft: Tensor  # [S, K] int64
    num_draft: Tensor  # [S] int64
    draft_logprob: Tensor  # [S, K] fp32, the drafter's own; NaN where it gave none
    draft_source: Tensor  # [S, K] int8, index into the proposer's `sources`
    page_table: Tensor  # [S, max_pages] int32
    temperature: Tensor  # [S] fp32; 0 = greedy
    top_k: Tensor  # [S] int64; 0 = all
    top_p: Tensor  # [S] fp32
    min_p: Tensor  # [S] fp32
    repetition: Tensor  # [S] fp32
    presence: Tensor  # [S] fp32
    frequency: Tensor  # [S] fp32
    seed: Tensor  # [S] int64
    stop_ids: Tensor  # [S, M] int64: end-of-text and stop tokens unless ignored; padded with -1
    min_length: Tensor  # [S] int64: below this length no end token may be sampled
    max_length: Tensor  # [S] int64: at this length the request ends


@dataclass(frozen=True, slots=True)
class SlotOptions:
    """The ragged options of one request, as tensors on the device."""

    request: Request
    bias_ids: Tensor | None  # [n] int64
    bias_values: Tensor | None  # [n] fp32
    banned: Tensor | None  # [vocab] bool: outside allowed_token_ids


@dataclass(frozen=True, slots=True)
class ProposeBatch:
    """What a proposer sees after a commit. B requests; one that lacks KV of more than its newest token,
    because its prompt is still being computed, has budget 0."""

    columns: SlotColumns
    slots: list[int]  # [B]
    budget: list[int]  # [B] drafts wanted at most
    lengths: list[int]  # [B] committed length of each, on the host
    hidden: Tensor | None  # [N, hidden] rows whose input token is committed, if `needs_hidden`
    hidden_start: list[int]  # [B] position of each request's first hidden row
    hidden_count: list[int]  # [B] its number of hidden rows


@dataclass(frozen=True, slots=True)
class Draft:
    """A proposer's guesses for the B requests of a ProposeBatch, at most K each."""

    tokens: Tensor  # [B, K] int64, valid up to `count`
    count: Tensor  # [B] int64: real drafts, never padding
    logprobs: Tensor | None = None  # [B, K] fp32, the drafter's own; NaN = none
    probs: Tensor | None = None  # [B, K, V] the law each draft was sampled from; None = it was certain
    sources: Tensor | None = None  # [B, K] int8, index into the proposer's `sources`; None = all 0

    @classmethod
    def of(cls, guesses: Sequence[Sequence[int]], k: int) -> Draft:
        """From plain lists, for proposers that work on the host."""
        tokens = torch.zeros((len(guesses), k), dtype=torch.int64)
        for line, guess in zip(tokens, guesses, strict=True):
            if len(guess):
                line[: len(guess)] = torch.as_tensor(guess, dtype=torch.int64)
        return cls(tokens, torch.tensor([len(guess) for guess in guesses], dtype=torch.int64))


@dataclass(frozen=True, slots=True)
class Windows:
    """The logits rows of one step: window b owns rows first[b] .. first[b] + num_draft[b].

    Row j of a window follows its first j drafts; a plain decode is a window with no drafts.
    """

    columns: SlotColumns
    slots: Tensor  # [B] int64
    first: Tensor  # [B] int64, the window's first logits row
    num_draft: Tensor  # [B] int64: drafts really verified in this step
    draft: Tensor  # [B, K] int64, valid up to num_draft
    draft_probs: Tensor | None  # [B, K, V]
    owner: Tensor  # [L] int64: the window each row belongs to
    depth: Tensor  # [L] int64: drafts before the row
    options: list[SlotOptions]  # [B]

    @property
    def length(self) -> Tensor:
        """[B] committed length before this step."""
        return self.columns.length[self.slots]

    @property
    def position(self) -> Tensor:
        """[L] index in the output of the token that each row decides: the key of its noise."""
        out = self.columns.length[self.slots] - self.columns.prompt_len[self.slots]
        return out[self.owner] + self.depth


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a strategy decided for B windows of up to K drafts."""

    tokens: Tensor  # [B, K + 1] int64, valid up to num_out
    num_accepted: Tensor  # [B] int64
    num_out: Tensor  # [B] int64: num_accepted + 1


# --- out of the engine ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LogprobRow:
    """Logprobs at one position: the token itself first, then the others asked for."""

    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int]


@dataclass(frozen=True, slots=True)
class DraftRecord:
    """One draft, whether it stood or fell."""

    token_id: int
    position: int  # 0-based index in the output it was proposed for
    source: str
    accepted: bool
    draft_logprob: float | None  # the drafter's own
    target_logprob: float | None  # the model's, when `include_draft_logprobs` asked for it


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one step did for one request."""

    request_id: str
    token_ids: list[int]
    logprobs: list[LogprobRow] | None
    prompt_logprobs: list[LogprobRow] | None  # of the prompt tokens reached in this step
    num_draft: int
    num_accepted: int  # of `token_ids`, how many were drafts; they come first
    sources: list[str]  # who proposed each accepted draft
    drafts: list[DraftRecord] | None  # on request
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None


class Logprob(NamedTuple):
    """One entry of a `.logprobs` mapping."""

    logprob: float
    rank: int
    decoded_token: str


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One committed token of a stream. `text` is what became certain with it; all of them make the answer."""

    index: int  # which of the n answers
    token_id: int | None  # None: the answer ended without another token, by an error
    text: str
    provenance: str
    logprobs: dict[int, Logprob] | None
    step_end: bool  # the last token that its step committed
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One answer to a prompt. `token_ids`, `logprobs`, `provenance`, `text_offsets` have one length."""

    index: int
    seed: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None
    provenance: list[str] = field(default_factory=list)  # "plain", "accepted:ngram", "recovered", "bonus"
    text_offsets: list[int] = field(default_factory=list)
    drafts: list[DraftRecord] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    metrics: SpecStats = field(default_factory=SpecStats)

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """Everything that came of one prompt."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: SpecStats
    strategy: str = ""  # the verification that served it, with its label
    lossless: bool = True

    @property
    def usage(self) -> dict[str, Any]:
        out = sum(len(o.token_ids) for o in self.outputs)
        prompt = len(self.prompt_token_ids)
        return {"prompt_tokens": prompt, "completion_tokens": out, "total_tokens": prompt + out}
