"""Nouns that cross a seam: requests, slot columns, drafts, verdicts, step outputs, results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum, IntFlag
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from draftproof.metrics import SpecStats
from draftproof.sampling_params import SamplingParams

if TYPE_CHECKING:  # a process that serves text needs no torch
    from torch import Tensor

FinishReason = Literal["stop", "length", "abort", "error"]


class GrammarState(Protocol):
    """Where one request is in its grammar."""

    def fill(self, row: Tensor) -> None:
        """row [ceil(V / 32)] int32 on the host: bit t % 32 of word t // 32 is set if token t may follow."""

    def accept(self, token: int) -> bool:
        """Go on by a token; False, and nothing changes, if it may not follow."""

    def rollback(self, count: int) -> None:
        """Take back the last `count` tokens accepted."""


class Grammar(Protocol):
    """What an answer must follow. The engine knows nothing else of it; see `text/grammar`."""

    def start(self) -> GrammarState: ...


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
    grammar: Grammar | None = None  # compiled from `params.structured_outputs`


# --- between engine, proposers and strategies ---------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SlotColumns:
    """The only mutable state: one line a running request. S slots; see docs/engine.md for invariants.

    The tensors never move: captured graphs hold their addresses.
    """

    tokens: Tensor  # [S, max_len] int64: prompt, then committed output; append-only
    length: Tensor  # [S] int64: committed tokens, prompt included
    prompt_len: Tensor  # [S] int64
    computed: Tensor  # [S] int64: tokens whose KV is stored
    ended: Tensor  # [S] int64: an `FinishStatus`; an ended request has no rows, even if a step still names it
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
    min_length: Tensor  # [S] int64: below this length no end token may be sampled
    max_length: Tensor  # [S] int64: at this length the request ends
    adjust: Tensor  # [S] int64: which of `LogitAdjust` the request uses
    logprob_kind: Tensor  # [S] int64: logprobs of its tokens: a `LogprobKind`
    strategy: Tensor  # [S] int64: which of the engine's strategies judges it
    ends: Tensor  # [S, V] bool: end-of-text and stop tokens, unless ignored
    bias: Tensor  # [S, V] fp32, valid with LogitAdjust.BIAS
    banned: Tensor  # [S, V] bool: outside allowed_token_ids, valid with LogitAdjust.ALLOWED_IDS


class FinishStatus(IntEnum):
    """How a request ended, as the device says it. From NO_ALLOWED_TOKEN on: nothing could be sampled."""

    RUNNING = 0
    STOP = 1  # an end or stop token was committed
    LENGTH = 2
    NO_ALLOWED_TOKEN = 3  # its options leave no token
    NOT_FINITE = 4  # NaN or infinity in the logits
    FAILED = 5  # the user's code raised


class LogitAdjust(IntFlag):
    """What changes a request's logits before they are sampled from."""

    PENALTY = 1
    BIAS = 2
    ALLOWED_IDS = 4
    MIN_TOKENS = 8  # min_tokens
    MASK = 16  # a grammar


class LogprobKind(IntEnum):
    """Logprobs of committed tokens."""

    NONE = 0
    RAW = 1
    PROCESSED = 2


@dataclass(frozen=True, slots=True)
class PlanColumns:
    """What the host asks of a step, as columns on the device. B entries, as many as there are slots."""

    slots: Tensor  # [B] int64; -1: no entry
    chunk: Tensor  # [B] int64: prompt rows to compute; 0: it decodes
    drafts: Tensor  # [B] int64: of its drafts, how many are verified at most
    budget: Tensor  # [B] int64: how many it may be given afterwards

    @classmethod
    def from_table(cls, table: Tensor) -> PlanColumns:
        """From one tensor [4, B]."""
        return cls(*table)


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one forward pass, ragged: rows of one slot are adjacent and ascend by position."""

    tokens: Tensor  # [rows] int64
    positions: Tensor  # [rows] int64, position of the token in its request
    slots: Tensor  # [rows] int64, which line of `page_table` holds the request's pages
    kv_index: Tensor  # [rows] int64, page * page_size + offset: where this row's K and V are stored
    page_table: Tensor  # [slots, max_pages] int32


class StepFeatures(NamedTuple):  # hashed in every step, for which a dataclass takes ten times as long
    """What the requests of a step use between them: what the step has to compute, and nothing more.

    Captured steps are kept by it. A request's bits do not depend on what its neighbours make necessary.
    """

    strategies: tuple[int, ...]  # by number, ascending
    has_adjustments: bool = False  # some have penalties, bias, bans, min_tokens
    has_grammar: bool = False  # some have a grammar
    needs_processed: bool = (
        False  # processed logits are needed as such: truncation, or somebody looks at them
    )
    raw_top: int = -1  # columns of raw logprobs beside the token's own; -1: none wanted
    processed_top: int = -1
    needs_draft_logprobs: bool = False  # some want to know what their drafters thought


class DraftSpec(NamedTuple):
    """What is wanted of a proposer that follows the rows; captured drafts are kept by it."""

    rounds: int  # drafts of whoever may have most of them, or a few more; 0: keep up, draft nothing
    has_prompts: bool = False  # some entries have chunks, and the proposer minds
    needs_processed: bool = False  # some truncate what they sample from
    needs_logprobs: bool = False  # the drafter's own are read
    needs_probs: bool = False  # so are its probabilities, over the whole vocabulary


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    """What a graph_safe proposer sees after a commit, with no host between: columns of B entries.

    One that follows the rows (`Proposer.follows_rows`) is also given the step that was committed.
    """

    columns: SlotColumns
    slots: Tensor  # [B] int64; -1: no entry
    budget: Tensor  # [B] int64: drafts wanted at most
    chunk: Tensor | None = None  # [B] int64: prompt rows that the step computed; 0: the entry decoded
    rows: Rows | None = None  # [R] of the step, with the drafts that it verified
    features: Tensor | None = None  # [R, n * hidden]: of each row the n that the proposer wants, side by side
    spec: DraftSpec | None = None
    price: float = 0.0  # of a round of a model, in tokens; 0: it is not to be weighed
    verify: float = 0.0  # likewise of a row more in the next step
    begun: Any = None  # what `DeviceProposer.begin` has made for it


@dataclass(frozen=True, slots=True)
class ProposeBatch:
    """What a proposer on the host sees after a commit. B requests; one that lacks KV of more than its
    newest token, because its prompt is still being computed, has budget 0."""

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
    def from_lists(cls, guesses: Sequence[Sequence[int]], k: int) -> Draft:
        """From plain lists, for proposers that work on the host."""
        import torch

        tokens = torch.zeros((len(guesses), k), dtype=torch.int64)
        for line, guess in zip(tokens, guesses, strict=True):
            if len(guess):
                line[: len(guess)] = torch.as_tensor(guess, dtype=torch.int64)
        return cls(tokens, torch.tensor([len(guess) for guess in guesses], dtype=torch.int64))


@dataclass(frozen=True, slots=True)
class Windows:
    """The logits rows of one step. B windows, as many as the plan has entries, and L rows.

    Row j of a window follows its first j drafts; a plain decode is a window with no drafts. Rows behind
    the last window are padding.
    """

    columns: SlotColumns
    slots: Tensor  # [B] int64; -1: no window: no entry, an ended one, or one that is still in its prompt
    first: Tensor  # [B] int64, the window's first logits row
    num_draft: Tensor  # [B] int64: drafts really verified in this step
    slot: Tensor  # [L] int64; -1: padding
    depth: Tensor  # [L] int64: drafts before the row
    position: Tensor  # [L] int64: index in the output of the token the row decides: the key of its noise
    draft: Tensor  # [L] int64: the draft that takes the row's place if it stands; -1: none
    draft_probs: Tensor | None = None  # [S, K, V] by slot, of proposers that report them
    allowed: Tensor | None = (
        None  # [S, K + 1, ceil(V / 32)] int32 by slot and depth, valid with LogitAdjust.MASK
    )


@dataclass(frozen=True, slots=True)
class Choice:
    """Tokens and acceptance of L rows from a strategy; `StepOps.commit` derives the accepted drafts."""

    token: Tensor  # [L] int64: the row's token if no draft stands there
    accept: Tensor | None = None  # [L] bool: would its draft stand? None: if it is `token`
    recovered: Tensor | None = None  # [L] int64: in place of a draft that falls; None: `token`


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a step did, as the commit writes it. K drafts at most."""

    table: Tensor  # [B, TOKENS + K + 1] int64, see the columns below
    pick_rows: Tensor  # [L] int64: logits rows of the committed tokens whose logprobs are wanted; then -1
    pick_tokens: Tensor  # [L] int64: those tokens


# columns of Outcome.table; zero where the entry had no window
NUM_OUT = 0  # committed tokens
NUM_DRAFT = 1  # drafts verified
NUM_ACCEPTED = 2  # of the committed tokens, how many were drafts; they come first
ENDED = 3  # an `FinishStatus`
FIRST_ROW = 4  # its first logits row
PICK = 5  # where its tokens begin in `pick_rows`, if its logprobs are wanted
TOKENS = 6  # K + 1 columns, valid up to NUM_OUT


# --- out of the engine ------------------------------------------------------------------------------------


@dataclass(slots=True)  # many a step, as StepOutput: freezing them would take three times as long
class LogprobRow:
    """Logprobs at one position: the token itself first, then the others asked for."""

    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int]

    @classmethod
    def from_columns(
        cls, values: list[list[float]], ids: list[list[int]], ranks: list[int], tokens: list[int], top: int
    ) -> list[LogprobRow]:
        """From columns of at least `top` best: values [n, 1 + _], ids [n, _], ranks [n] of tokens [n]."""
        below = list(range(1, top + 1))
        return [
            cls([token, *best[:top]], value[: top + 1], [rank, *below])
            for token, value, best, rank in zip(tokens, values, ids, ranks, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class DraftRecord:
    """One draft, whether it stood or fell."""

    token_id: int
    position: int  # 0-based index in the output it was proposed for
    source: str
    accepted: bool
    draft_logprob: float | None  # the drafter's own
    target_logprob: float | None  # the model's, when `include_draft_logprobs` asked for it


@dataclass(slots=True)
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


@dataclass(slots=True)  # one for every token of every stream: freezing it would take three times as long
class TokenEvent:
    """One committed token of a stream. `text` is what became certain with it; all of them make the answer."""

    index: int  # which of the n answers
    token_id: int | None  # None: the answer ended without another token, by an error or an abort
    text: str
    provenance: str
    logprobs: dict[int, Logprob] | None
    step_end: bool  # the last token that its step committed
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    text_offset: int = 0  # the character of the answer at which it begins, if no stop string cuts it off
    num_draft: int = 0  # with `step_end`: the drafts that its step verified
    drafts: list[DraftRecord] | None = None  # with `step_end`, on request


@dataclass(slots=True)
class CompletionOutput:
    """One answer to a prompt. `token_ids`, `logprobs`, `provenance`, `text_offsets` have one length."""

    index: int
    seed: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: Sequence[dict[int, Logprob]] | None = None  # made when they are read
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
    prompt_logprobs: Sequence[dict[int, Logprob] | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: SpecStats
    num_cached_tokens: int = 0  # of the prompt, not computed for the first answer: they were cached
    num_preemptions: int = 0  # of all its answers
    queue_seconds: float | None = field(default=None, compare=False)  # of the first answer; None: never
    first_token_seconds: float | None = field(default=None, compare=False)  # since its arrival, likewise
    strategy: str = ""  # the verification that served it, with its label
    lossless: bool = True

    @property
    def usage(self) -> dict[str, Any]:
        out = sum(len(o.token_ids) for o in self.outputs)
        prompt = len(self.prompt_token_ids)
        return {"prompt_tokens": prompt, "completion_tokens": out, "total_tokens": prompt + out}
