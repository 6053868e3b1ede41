"""How many drafts a request may have: fewer while they keep falling, more when they stand again.

Rows cost time, so a request whose drafts fall must soon stop paying for them, and one that meets a
repeating passage must get its full length back at once. Output never depends on this.
"""

from __future__ import annotations

MAX_PAUSE = 32


class DraftBudget:
    """Halve after a window in which every draft fell; at zero pause, then probe; restore on success."""

    def __init__(self, limit: int, adaptive: bool) -> None:
        self.limit = limit
        self.adaptive = adaptive
        self._level = limit
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
            # two more than stood last time; all of it after a window in which every draft stood
            self._level = self.limit if accepted == drafted else min(self.limit, accepted + 2)
            return
        self._level //= 2
        if self._level == 0:
            self._level = 1  # the probe after the pause
            self._pause = self._next_pause
            self._next_pause = min(MAX_PAUSE, 2 * self._next_pause)
