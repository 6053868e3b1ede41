"""How many drafts a request may have: fewer while they keep falling, more when they stand again.

Rows cost time, so a request whose drafts fall must soon stop paying for them, and one that meets a
repeating passage must get its full length back within two or three windows. Output never depends on this.
"""

from __future__ import annotations

FIRST = 2  # drafts of a request that has no history: a full window in every slot would be dear
MAX_PAUSE = 32


class DraftBudget:
    """Begin small; double while whole windows stand; halve when all fall; at zero pause, then probe."""

    def __init__(self, limit: int, adaptive: bool) -> None:
        self.limit = limit
        self.adaptive = adaptive
        self._level = min(limit, FIRST) if adaptive else limit
        self._pause = 0  # steps to sit out
        self._next_pause = 2

    def take(self) -> int:
        """Drafts allowed in the coming step."""
        if self._pause:
            self._pause -= 1
            return 0
        return self._level

    def record(self, drafted: int, accepted: int) -> None:
        """What became of a window. Windows without drafts say nothing."""
        if not self.adaptive or drafted == 0:
            return
        if accepted:
            self._next_pause = 2
            # a cut window (rows or tokens ran out) says nothing against the level it was cut from
            grown = 2 * max(drafted, self._level) if accepted == drafted else accepted + 1
            self._level = min(self.limit, grown)
            return
        self._level //= 2
        if self._level == 0:
            self._level = 1  # the probe after the pause
            self._pause = self._next_pause
            self._next_pause = min(MAX_PAUSE, 2 * self._next_pause)
