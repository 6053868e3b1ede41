"""The step's bookkeeping on the GPU: few launches, nothing that waits, shapes from the host alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from draftproof.errors import ConfigError
from draftproof.ops import Layout, TokenLogprobs
from draftproof.ops.contract.draft_search import AcceptanceRecord, DraftCandidate, SuffixOptions, SuffixPool
from draftproof.ops.torch.step import Bookkeeping
from draftproof.types import TOKENS, Choice, Draft, Outcome, PlanColumns, SlotColumns, Windows

try:
    from draftproof.ops.triton import draft_search, runtime
    from draftproof.ops.triton.step import commit, layout, logprobs, ngram, penalties, sample
except ModuleNotFoundError as error:
    if error.name is None or error.name.split(".")[0] != "triton":
        raise

EARLY = 256  # rows, as in the forward pass: beyond it a kernel that waits takes room from its predecessor
INTS = (torch.int64,)
FP32 = (torch.float32,)


class StepOps(Bookkeeping):
    """What a kernel writes is passed as it is, never copied first; so it has to be contiguous."""

    pdl: bool

    def _done(self, op: str) -> None:
        """After every op."""

    def layout(self, plan: PlanColumns, columns: SlotColumns, page_size: int, out: Layout) -> None:
        rows, windows = out.rows, out.windows
        plain("the plan", (plan.slots, plan.chunk, plan.drafts), len(plan.slots))
        plain("the rows", (rows.tokens, rows.positions, rows.slots, rows.kv_index), len(rows.tokens))
        plain("the windows", (windows.slots, windows.first, windows.num_draft), len(plan.slots))
        each = (windows.slot, windows.depth, windows.position, windows.draft, out.at)
        plain("the logits rows", each, len(out.at))
        layout.layout(plan, columns, page_size, out, self.pdl)
        self._done("layout")

    def apply_penalties(self, logits: Tensor, windows: Windows) -> Tensor:
        logits = self._logits(logits, windows)
        out = penalties.apply_penalties(logits, windows, self._few(logits)) if len(logits) else logits.clone()
        self._done("apply_penalties")
        return out

    def apply_bans(self, base: Tensor, windows: Windows) -> None:
        _written(base, windows)
        if len(base):
            penalties.apply_bans(base, windows, self._few(base))
        self._done("apply_bans")

    def apply_grammar_mask(self, base: Tensor, windows: Windows) -> None:
        _written(base, windows)
        allowed = windows.allowed
        words = -(-base.shape[1] // 32)
        if allowed is None or allowed.shape[2] != words or not allowed.is_contiguous():
            raise ConfigError(f"masks must have {words} words a row, in one piece")
        if len(base):
            penalties.apply_grammar_mask(base, windows, self._few(base))
        self._done("apply_grammar_mask")

    def sample(self, logits: Tensor, windows: Windows, scaled: bool = False) -> tuple[Tensor, Tensor]:
        logits = self._logits(logits, windows)
        if not len(logits):
            return windows.slot.clone(), windows.slot.clone()
        found = sample.sample(logits, windows, scaled, self._few(logits))
        self._done("sample")
        return found

    def commit(self, plan: PlanColumns, windows: Windows, choice: Choice, bad: Tensor, out: Outcome) -> None:
        each = [windows.draft, choice.token, bad]
        each += [x for x in (choice.recovered,) if x is not None]
        plain("what was chosen", each, len(windows.draft))
        plain("the picks", (out.pick_rows, out.pick_tokens), len(out.pick_rows))
        if choice.accept is not None and choice.accept.dtype != torch.bool:
            raise ConfigError(f"accept must be bool, not {choice.accept.dtype}")
        wide = (len(plan.slots), TOKENS + windows.columns.draft.shape[1] + 1)
        if out.table.shape != wide or not out.table.is_contiguous():
            raise ConfigError(f"the outcome's table must be {list(wide)}, not {list(out.table.shape)}")
        commit.commit(plan, windows, choice, bad, out, self.pdl)
        self._done("commit")

    def logprobs(
        self, logits: Tensor, rows: Tensor, tokens: Tensor, top: int, out: TokenLogprobs | None = None
    ) -> TokenLogprobs:
        logits = runtime.matrix("logits", logits, None, FP32)
        rows = runtime.vector("rows", rows, None, INTS)
        tokens = runtime.vector("tokens", tokens, len(rows), INTS)
        if not 0 <= top <= logits.shape[1]:
            raise ConfigError(f"top {top} of {logits.shape[1]}")
        if not len(rows) or not logprobs.quick(logits.shape[1], top):
            return super().logprobs(logits, rows, tokens, top, out)
        if out is None:
            out = logprobs.empty(len(rows), top, logits.device)
        plain("ranks", (out.ranks,), len(rows))
        plain("ids", (out.ids.view(-1),), len(rows) * top)
        if out.values.shape != (len(rows), 1 + top) or not out.values.is_contiguous():
            raise ConfigError(f"values must be [{len(rows)}, {1 + top}], not {list(out.values.shape)}")
        logprobs.logprobs(logits, rows, tokens, top, out, self._few(rows))
        self._done("logprobs")
        return out

    def search_ngram(
        self, columns: SlotColumns, slots: Tensor, budget: Tensor, smallest: int, largest: int
    ) -> tuple[Tensor, Tensor]:
        plain("slots and budget", (slots, budget), len(slots))
        found = ngram.search_ngram(columns, slots, budget, smallest, largest, self.pdl)
        self._done("search_ngram")
        return found

    def search_suffix(
        self,
        columns: SlotColumns,
        slots: Tensor,
        budget: Tensor,
        pool: SuffixPool,
        options: SuffixOptions,
        begun: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        plain("slots and budget", (slots, budget), len(slots))
        if begun is not None:
            begun = begun[0].contiguous(), begun[1].contiguous()
            plain("drafts begun", (begun[0].view(-1),), len(slots) * columns.draft.shape[1])
            plain("drafts begun", (begun[1],), len(slots))
        found = draft_search.search_suffix(columns, slots, budget, pool, options, begun, self.pdl)
        self._done("search_suffix")
        return found

    def select_drafts(
        self,
        columns: SlotColumns,
        slots: Tensor,
        budget: Tensor,
        record: AcceptanceRecord,
        offers: Sequence[DraftCandidate],
        search: int,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        _offered(columns, slots, budget, offers)
        found = draft_search.select_drafts(columns, slots, budget, record, offers, self.pdl, search)
        self._done("select_drafts")
        return found

    def store_drafts(self, columns: SlotColumns, slots: Tensor, budget: Tensor, draft: Draft) -> None:
        plain("slots and budget", (slots, budget), len(slots))
        shape = (len(slots), columns.draft.shape[1])
        if draft.tokens.shape != shape or draft.count.shape != shape[:1]:
            raise ConfigError(f"a draft of {list(shape)} is wanted, not {list(draft.tokens.shape)}")

        def there(x: Tensor, dtype: torch.dtype) -> Tensor:
            return x.to(columns.draft.device, dtype).contiguous()  # a host proposer's is not there

        own = None if draft.logprobs is None else there(draft.logprobs, torch.float32)
        sources = None if draft.sources is None else there(draft.sources, torch.int8)
        tokens = draft.tokens.to(columns.draft.device, torch.int64)
        count = there(draft.count, torch.int64)
        made = Draft(tokens, count, logprobs=own, sources=sources)
        ngram.store_drafts(columns, slots, budget, made, self.pdl)
        self._done("store_drafts")

    def _few(self, x: Tensor) -> bool:
        return self.pdl and len(x) <= EARLY

    def _logits(self, logits: Tensor, windows: Windows) -> Tensor:
        logits = runtime.matrix("logits", logits, None, FP32)
        plain("the logits rows", (windows.slot, windows.depth, windows.position), len(logits))
        return logits


def _written(base: Tensor, windows: Windows) -> None:
    """What is changed in place."""
    if base.dtype != torch.float32 or not base.is_contiguous() or len(base) != len(windows.slot):
        raise ConfigError(f"base must be [{len(windows.slot)}, V] fp32 in one piece")


def _offered(columns: SlotColumns, slots: Tensor, budget: Tensor, offers: Sequence[DraftCandidate]) -> None:
    shape = (len(slots), columns.draft.shape[1])
    if wrong := [offer.tokens for offer in offers if offer.tokens.shape != shape]:
        raise ConfigError(f"drafts of {list(shape)} are wanted, not {list(wrong[0].shape)}")
    if any(offer.tokens.dtype != torch.int64 for offer in offers):
        raise ConfigError("drafts are int64")
    each = [offer.count for offer in offers] + [
        o.expected_tokens for o in offers if o.expected_tokens is not None
    ]
    plain("slots, budget and offers", (slots, budget, *each), len(slots))


def plain(name: str, columns: Iterable[Tensor], size: int) -> None:
    """Columns of int64, each [size] in one piece."""
    for column in columns:
        if column.shape != (size,) or column.dtype != torch.int64 or not column.is_contiguous():
            raise ConfigError(f"{name}: [{size}] int64 is wanted, not {list(column.shape)} {column.dtype}")
