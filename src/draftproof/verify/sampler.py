"""The sampler, the only one: logits rows and windows in, verdict out. Plain decoding has no drafts.

Requests in one step may use different strategies; each judges its own windows over the same scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftproof.config import SpeculativeConfig
from draftproof.ops import STREAM_SAMPLE, Ops
from draftproof.types import Verdict, Windows
from draftproof.verify import Scores, Strategy, judge
from draftproof.verify.process import process


@dataclass(frozen=True, slots=True)
class Sampled:
    """A step's decisions, before the ends of requests are looked at."""

    verdict: Verdict
    processed: Tensor  # [L, V]
    errors: dict[int, str]  # by logits row; counts only where the row's token would be committed


class Sampler:
    """Scores every row once, then lets each strategy judge its windows."""

    def __init__(self, ops: Ops, policy: SpeculativeConfig | None) -> None:
        self.ops = ops
        self.policy = policy

    def __call__(self, logits: Tensor, windows: Windows, strategies: Sequence[Strategy]) -> Sampled:
        """logits [L, V] fp32 (never changed); strategies [B]."""
        base, errors = process(logits, windows)
        errors = {**_hopeless(base), **errors}
        scores = self._score(base, windows)
        kinds = list(dict.fromkeys(strategies))
        if len(kinds) == 1:
            verdict = judge(kinds[0], windows, scores, self.policy)
        else:
            verdict = self._judge_mixed(windows, scores, strategies, kinds)
        return Sampled(verdict, scores.processed, errors)

    def _score(self, base: Tensor, windows: Windows) -> Scores:
        if all(options.request.params.greedy for options in windows.options):
            return Scores(base, base, self.ops.argmax(base))
        columns, slots = windows.columns, windows.slots[windows.owner]
        temperature = columns.temperature[slots]
        hot = (temperature > 0).nonzero()[:, 0]
        slots = slots[hot]
        scaled = base[hot] / temperature[hot][:, None]
        limits = columns.top_k[slots], columns.top_p[slots], columns.min_p[slots]
        cut = ((limits[0] > 0) | (limits[1] < 1) | (limits[2] > 0)).nonzero()[:, 0]
        if len(cut):
            scaled[cut] = self.ops.truncate(scaled[cut], *(limit[cut] for limit in limits))
        tokens = self.ops.gumbel_argmax(scaled, columns.seed[slots], windows.position[hot], STREAM_SAMPLE)
        if len(hot) == len(base):
            return Scores(base, scaled, tokens)
        processed = base.clone()
        processed[hot] = scaled
        sampled = torch.empty(len(base), dtype=torch.int64, device=base.device)
        cold = (temperature == 0).nonzero()[:, 0]
        sampled[hot], sampled[cold] = tokens, self.ops.argmax(base[cold])
        return Scores(base, processed, sampled)

    def _judge_mixed(
        self,
        windows: Windows,
        scores: Scores,
        strategies: Sequence[Strategy],
        kinds: list[Strategy],
    ) -> Verdict:
        b, k = windows.draft.shape
        tokens = windows.draft.new_zeros((b, k + 1))
        num_accepted = windows.draft.new_zeros(b)
        for kind in kinds:
            mine = [i for i, strategy in enumerate(strategies) if strategy is kind]
            part = judge(kind, _select(windows, mine), _rows_of(scores, windows, mine), self.policy)
            tokens[mine], num_accepted[mine] = part.tokens, part.num_accepted
        return Verdict(tokens, num_accepted, num_accepted + 1)


def _hopeless(base: Tensor) -> dict[int, str]:
    """Rows from which nothing can be sampled."""
    peak = base.amax(-1)
    if bool(torch.isfinite(peak).all()):
        return {}
    reasons = {}
    for row in (~torch.isfinite(peak)).nonzero()[:, 0].tolist():
        forbidden = bool(peak[row] == -torch.inf)
        reasons[row] = (
            "no token is left to sample: the request's options forbid every one"
            if forbidden
            else "the logits are not finite (NaN or infinity)"
        )
    return reasons


def _row_index(windows: Windows, mine: list[int]) -> Tensor:
    chosen = torch.zeros(len(windows.slots), dtype=torch.bool, device=windows.slots.device)
    chosen[mine] = True
    return chosen[windows.owner].nonzero()[:, 0]


def _rows_of(scores: Scores, windows: Windows, mine: list[int]) -> Scores:
    rows = _row_index(windows, mine)
    return Scores(scores.base[rows], scores.processed[rows], scores.sampled[rows])


def _select(windows: Windows, mine: list[int]) -> Windows:
    """The windows `mine`, with their rows renumbered from 0."""
    rows = _row_index(windows, mine)
    counts = windows.num_draft[mine] + 1
    order = torch.zeros(len(windows.slots), dtype=torch.int64, device=rows.device)
    order[mine] = torch.arange(len(mine), device=rows.device)
    return Windows(
        columns=windows.columns,
        slots=windows.slots[mine],
        first=counts.cumsum(0) - counts,
        num_draft=windows.num_draft[mine],
        draft=windows.draft[mine],
        draft_probs=None if windows.draft_probs is None else windows.draft_probs[mine],
        owner=order[windows.owner[rows]],
        depth=windows.depth[rows],
        options=[windows.options[i] for i in mine],
    )
