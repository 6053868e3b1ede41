"""Warning about drafts that are almost never accepted, such as those of a head trained for other weights."""

from __future__ import annotations

import logging

import numpy as np
from numpy.typing import NDArray

from draftproof.array_types import Ints

MIN_DRAFTS = 2000  # verified drafts of a source before its acceptance is checked
MIN_ACCEPTANCE = 0.02


class AcceptanceWarning:
    """Counter of drafts by source, up to MIN_DRAFTS each; logs one warning for a source that is too low."""

    def __init__(self, sources: tuple[str, ...]) -> None:
        self.is_open = bool(sources)  # there is something left to count
        self._sources = sources
        self._drafts, self._accepted = np.zeros((2, len(sources)), np.int64)
        self._is_checked = np.zeros(len(sources), np.bool_)

    def observe(self, drafts: Ints, accepted: Ints, sources: NDArray[np.int8] | None) -> None:
        """Record the verified and accepted drafts [B] of a step, and the source [B, K] of each."""
        if sources is None:
            self._drafts[0] += np.add.reduce(drafts)
            self._accepted[0] += np.add.reduce(accepted)
            if self._drafts[0] >= MIN_DRAFTS and not self._is_checked[0]:
                self._check(0)
            return
        place = np.arange(sources.shape[1])
        for total, count in ((self._drafts, drafts), (self._accepted, accepted)):
            # predictions come after the proposer's sources and are not counted
            found = np.bincount(sources[place < count[:, None]], minlength=len(total))
            total += found[: len(total)]
        for i in np.flatnonzero(~self._is_checked & (self._drafts >= MIN_DRAFTS)).tolist():
            self._check(i)

    def _check(self, source: int) -> None:
        self._is_checked[source] = True
        self.is_open = not self._is_checked.all()
        rate = self._accepted[source] / self._drafts[source]
        if rate < MIN_ACCEPTANCE:
            logging.getLogger("draftproof").warning(
                "only %.1f %% of the first %d drafts of %r were accepted. Check that its head or draft model "
                "was made for these weights and has the same vocabulary and chat format, or that a lookup "
                "method suits the prompts; without speculation this engine would be faster",
                100 * rate,
                int(self._drafts[source]),
                self._sources[source],
            )
