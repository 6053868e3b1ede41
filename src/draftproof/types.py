"""Types shared across packages: requests, slot columns, drafts, windows, step outcomes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from draftproof.outputs import DraftRecord, FinishReason, LogprobRow
from draftproof.sampling_params import SamplingParams

if TYPE_CHECKING:  # a process that serves text needs no torch
    from torch import Tensor

    from draftproof.array_types import Floats32


PoolingType = Literal["last", "mean"]  # of the hidden rows of a prompt, after the last norm
OPEN_WORD = -1  # a word of a grammar mask with every bit set


class GrammarState(Protocol):
    """Position of one request in its grammar."""

    def fill(self, row: Tensor) -> None:
        """Set bit t % 32 of word t // 32 of row [ceil(V / 32)] int32 (host) if token t may follow."""

    def accept(self, token: int) -> bool:
        """Advance by a token; return False and change nothing if the token may not follow."""

    def rollback(self, count: int) -> None:
        """Undo the last `count` accepted tokens."""


class Grammar(Protocol):
    """Compiled constraint on an output, implemented in `text/grammar`."""

    def start(self) -> GrammarState:
        """Return the state before the first token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Request to the engine, in token ids."""

    id: str
    prompt_token_ids: Sequence[int]
    params: SamplingParams
    seed: int  # drawn at random if the user gave none
    bad_word_ids: Sequence[Sequence[int]] = ()
    prediction_ids: Sequence[int] = ()
    eos_token_ids: Sequence[int] = ()
    grammar: Grammar | None = None  # compiled from `params.structured_outputs`
    pooling: PoolingType | None = None  # with it the result is an embedding; the sampled token has no use


PREDICTION_SOURCE = "given"  # source of drafts from a request's prediction


@dataclass(frozen=True, slots=True)
class SlotColumns:
    """Device state of the running requests, S slots. The tensors never move: graphs hold their addresses."""

    tokens: Tensor  # [S, max_len] int64: prompt, then committed output; append-only
    length: Tensor  # [S] int64: committed tokens, prompt included
    prompt_len: Tensor  # [S] int64
    computed: Tensor  # [S] int64: tokens whose KV is stored
    finish_status: Tensor  # [S] int64: a `FinishStatus`; a finished request has no rows in a planned step
    draft: Tensor  # [S, K] int64
    num_draft: Tensor  # [S] int64
    draft_logprob: Tensor  # [S, K] fp32, by the drafter; NaN: it reported none
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
    min_length: Tensor  # [S] int64: no end token is sampled below this length
    max_length: Tensor  # [S] int64: the request finishes at this length
    adjust: Tensor  # [S] int64: `LogitAdjust` flags
    logprob_kind: Tensor  # [S] int64: a `LogprobKind`, of the committed tokens
    draft_kind: Tensor  # [S] int64: a `LogprobKind`, of the target at all drafts
    named_ids: Tensor  # [S, MAX_NAMED_IDS] int64: ids with logprobs at every committed token; -1: none
    strategy: Tensor  # [S] int64: index of the verification strategy
    ends: Tensor  # [S, V] bool: end-of-text and stop tokens, unless ignored
    bias: Tensor  # [S, V] fp32, valid with LogitAdjust.BIAS
    banned: Tensor  # [S, V] bool: outside allowed_token_ids, valid with LogitAdjust.ALLOWED_IDS


class FinishStatus(IntEnum):
    """Finish status of a request on the device. From NO_ALLOWED_TOKEN on no token could be sampled."""

    RUNNING = 0
    STOP = 1  # an end or stop token was committed
    LENGTH = 2
    NO_ALLOWED_TOKEN = 3  # the options of the request exclude every token
    NOT_FINITE = 4  # NaN or infinity in the logits
    FAILED = 5  # the user's code raised


class LogitAdjust(IntFlag):
    """Flags: what changes the logits of a request before sampling."""

    PENALTY = 1
    BIAS = 2
    ALLOWED_IDS = 4
    MIN_TOKENS = 8
    MASK = 16  # a grammar


MAX_NAMED_IDS = 64  # ids of a request whose logprobs the device computes within the step


class LogprobKind(IntEnum):
    """Kind of logprobs that the device computes for the committed tokens of a request."""

    NONE = 0
    RAW = 1
    PROCESSED = 2


@dataclass(frozen=True, slots=True)
class PlanColumns:
    """Step plan as columns on the device. B entries, as many as there are slots."""

    slots: Tensor  # [B] int64; -1: no entry
    chunk: Tensor  # [B] int64: prompt rows to compute; 0: the entry decodes
    drafts: Tensor  # [B] int64: maximum number of drafts to verify
    budget: Tensor  # [B] int64: maximum number of drafts to propose after the step


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of a forward pass, ragged: rows of one slot are adjacent and ascend by position."""

    tokens: Tensor  # [rows] int64
    positions: Tensor  # [rows] int64, position of the token in its request
    slots: Tensor  # [rows] int64, which line of `page_table` holds the request's pages
    kv_index: Tensor  # [rows] int64, page * page_size + offset: where this row's K and V are stored
    page_table: Tensor  # [slots, max_pages] int32


class StepFeatures(NamedTuple):  # hashed in every step: a dataclass would take ten times as long
    """Features that the requests of a step need between them: a key of captured steps, never of bits."""

    strategies: tuple[int, ...]  # indices of verification strategies, ascending
    has_adjustments: bool = False  # penalties, bias, bans or min_tokens
    has_grammar: bool = False
    needs_processed: bool = False  # processed logits are needed: truncation, logprobs or a strategy
    raw_top: int = -1  # alternatives of raw logprobs beside the token's own; -1: no raw logprobs
    processed_top: int = -1
    raw_named: int = 0  # named ids with raw logprobs
    processed_named: int = 0
    has_raw_drafts: bool = False  # some requests report drafts with raw logprobs of the target
    has_processed_drafts: bool = False
    draft_top: int = 0  # likeliest tokens of the drafter that are reported with the drafts

    @property
    def needs_draft_logprobs(self) -> bool:
        """Return whether some requests report drafts, with the drafter's logprobs."""
        return self.has_raw_drafts or self.has_processed_drafts

    @property
    def has_logprobs(self) -> bool:
        """Return whether a step has a logprob pass."""
        return self.needs_draft_logprobs or max(self.raw_top, self.processed_top) >= 0


class DraftCosts(NamedTuple):
    """Costs of drafting in tokens: what the engine commits in that time. Zeros: they are not weighed."""

    round: float = 0.0  # one round of the draft model for all entries
    row: float = 0.0  # one more row in the next step


NO_DRAFT_COSTS = DraftCosts()


class DraftSpec(NamedTuple):
    """What a proposer with a model computes after a step; part of the key of captured drafts."""

    rounds: int  # largest number of drafts of any request, rounded up to a captured number
    runs_model: bool = True  # over the rows of the step; False: without rounds, and KV is stored later
    has_prompts: bool = False  # some entries have chunks, and the proposer treats them differently
    needs_processed: bool = False  # some requests truncate their distribution
    needs_logprobs: bool = False  # the drafter's logprobs are read
    top: int = 0  # with `needs_logprobs`: likeliest tokens of the drafter that are read
    needs_probs: bool = False  # the drafter's probabilities over the vocabulary are read


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    """Input of a `DeviceProposer` after a commit: columns of B entries, on the device.

    The host does not run between the commit and the proposer. `chunk`, `rows` and `features` of the committed
    step, and `spec`, are set for proposers that run behind steps (`Proposer.runs_behind_steps`).
    """

    columns: SlotColumns
    slots: Tensor  # [B] int64; -1: no entry
    budget: Tensor  # [B] int64: drafts wanted at most
    chunk: Tensor | None = None  # [B] int64: prompt rows that the step computed; 0: the entry decoded
    rows: Rows | None = None  # [R] of the step, with the drafts that it verified
    features: Tensor | None = None  # [R, n * hidden]: of each row the n that the proposer reads, side by side
    spec: DraftSpec | None = None
    costs: DraftCosts = NO_DRAFT_COSTS  # with costs a draft model stops when a round is not worth its cost
    begun: Any = None  # result of `DeviceProposer.begin`


@dataclass(frozen=True, slots=True)
class ProposeBatch:
    """Input of a proposer on the host after a commit: B requests, with budget 0 within their prompt."""

    columns: SlotColumns
    slots: list[int]  # [B]
    budget: list[int]  # [B] maximum number of drafts
    lengths: list[int]  # [B] committed length of each, on the host
    hidden: Tensor | None  # [N, hidden] rows whose input token is committed, if `needs_hidden`
    hidden_start: list[int]  # [B] position of each request's first hidden row
    hidden_count: list[int]  # [B] its number of hidden rows


@dataclass(frozen=True, slots=True)
class DraftRanking:
    """Rank of each draft in the drafter's distribution, and the likeliest tokens of that distribution."""

    ranks: Tensor  # [B, K] int64; 0: the draft has no distribution
    top_ids: Tensor  # [B, K, T] int64, in the order (logprob down, id up)
    top_logprobs: Tensor  # [B, K, T] fp32


@dataclass(frozen=True, slots=True)
class Draft:
    """Drafts of a proposer for B requests, at most K each."""

    tokens: Tensor  # [B, K] int64, valid up to `count`
    count: Tensor  # [B] int64: real drafts, never padding
    logprobs: Tensor | None = None  # [B, K] fp32, by the drafter; NaN = none
    probs: Tensor | None = None  # [B, K, V] the distribution of each draft; None = deterministic
    sources: Tensor | None = None  # [B, K] int8, index into the proposer's `sources`; None = all 0
    ranking: DraftRanking | None = None  # with `logprobs`, of a drafter with a distribution
    matched: Tensor | None = None  # [B] int64: tokens that a search has matched; None = not known

    @classmethod
    def from_lists(cls, drafts: Sequence[Sequence[int]], k: int) -> Draft:
        """Return a draft from plain lists, for proposers that work on the host."""
        import torch

        tokens = torch.zeros((len(drafts), k), dtype=torch.int64)
        for line, draft in zip(tokens, drafts, strict=True):
            if len(draft):
                line[: len(draft)] = torch.as_tensor(draft, dtype=torch.int64)
        return cls(tokens, torch.tensor([len(draft) for draft in drafts], dtype=torch.int64))


@dataclass(frozen=True, slots=True)
class Windows:
    """Logits rows of one step: B windows, as many as the plan has entries, and L rows.

    Row j of a window follows its first j drafts; a plain decode is a window with no drafts. Rows behind
    the last window are padding.
    """

    columns: SlotColumns
    slots: Tensor  # [B] int64; -1: no window (no entry, a finished one, or one still in its prompt)
    first: Tensor  # [B] int64, the window's first logits row
    num_draft: Tensor  # [B] int64: drafts verified in this step
    slot: Tensor  # [L] int64; -1: padding
    depth: Tensor  # [L] int64: drafts before the row
    position: Tensor  # [L] int64: index in the output of the token the row decides: the key of its noise
    draft: Tensor  # [L] int64: the draft that the row verifies; -1: none
    draft_probs: Tensor | None = None  # [S, K, V] by slot, of proposers that report them
    # [S, K + 1, ceil(V / 32)] int32 by slot and depth, valid with LogitAdjust.MASK
    allowed: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """Tokens and acceptance of L rows from a strategy; `StepOps.commit` derives the accepted drafts."""

    token: Tensor  # [L] int64: the token of the row if it has no accepted draft
    accept: Tensor | None = None  # [L] bool: accept the draft; None: where it equals `token`
    recovered: Tensor | None = None  # [L] int64: token in place of a rejected draft; None: `token`


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of a step, written by the commit. K drafts at most."""

    table: Tensor  # [B, TOKENS + K + 1] int64, see the columns below
    pick_rows: Tensor  # [L] int64: logits rows of the committed tokens with logprobs; then -1
    pick_tokens: Tensor  # [L] int64: those tokens


# columns of Outcome.table; zero where the entry had no window
NUM_OUT = 0  # committed tokens
NUM_DRAFT = 1  # drafts verified
NUM_ACCEPTED = 2  # accepted drafts, the first of the committed tokens
FINISH_STATUS = 3
FIRST_ROW = 4  # first logits row of the window
PICK = 5  # index of its first token in `pick_rows`, if its logprobs are needed
TOKENS = 6  # K + 1 columns, valid up to NUM_OUT


@dataclass(slots=True)
class StepOutput:
    """Output of one step for one request."""

    request_id: str
    token_ids: list[int]
    logprobs: list[LogprobRow] | None
    prompt_logprobs: list[LogprobRow] | None  # of the prompt tokens reached in this step
    num_draft: int
    num_accepted: int  # accepted drafts, the first of `token_ids`
    sources: list[str]  # source of each accepted draft
    drafts: list[DraftRecord] | None  # with `include_draft_logprobs`
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    is_predicted: bool = False  # the drafts are from the request's prediction
    embedding: Floats32 | None = None  # [hidden] of a request with pooling, when its prompt is computed
