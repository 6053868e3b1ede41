"""Contract of a verification strategy.

A strategy is tensor code over the rows of a step. It returns which drafts it would accept and the token
of each row. `StepOps.commit` derives the number of accepted drafts from that, for all strategies.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from draftproof.ops import Ops
from draftproof.types import Choice, Windows
from draftproof.verify.guarantee import Guarantee


@dataclass(frozen=True, slots=True)
class Scores:
    """Logits of a step's L rows, as they are sampled from."""

    base: Tensor  # [L, V] after penalties, bias and masks
    processed: Tensor  # [L, V] after temperature and truncation as well; greedy rows: base
    sampled: Tensor  # [L] int64: the token of plain sampling at each row


class Strategy(ABC):
    """Acceptance rule for drafts. Class attributes declare what it keeps and needs."""

    lossless: ClassVar[bool]  # the output distribution is the model's
    lossless_greedy: ClassVar[bool] = False  # at temperature 0, if `lossless` is False
    seed_exact: ClassVar[bool]  # same seed, same tokens as without drafts, at any temperature
    label: ClassVar[str]
    needs_draft_probs: ClassVar[bool] = False
    needs_processed: ClassVar[bool] = False  # reads Scores.processed
    defaults: ClassVar[Mapping[str, Any]] = {}  # options and their defaults

    def __init__(self, ops: Ops, options: Mapping[str, Any]) -> None:
        self.ops = ops
        self.options = {**self.defaults, **options}

    @classmethod
    def guarantee(cls) -> Guarantee:
        """Return the properties that this strategy keeps."""
        return Guarantee(cls.label, cls.lossless, cls.lossless or cls.lossless_greedy, cls.seed_exact)

    @abstractmethod
    def decide(self, windows: Windows, scores: Scores) -> Choice:
        """Return, for each row, whether its draft is accepted if all before it are, and the token if not."""
