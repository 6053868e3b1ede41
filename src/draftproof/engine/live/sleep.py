"""Sleep of an engine: the memory of weights and KV is released, and restored at wake-up.

Level 1 keeps a copy of the weights in host memory. Level 2 drops them: they are read from the checkpoint at
wake-up, or come with a complete update. KV is never kept: requests compute theirs again, with the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from draftproof.errors import ConfigError, EngineDownError
from draftproof.models.runner import Runner
from draftproof.models.weights.packed_tree import tensors_in
from draftproof.ops import Ops
from draftproof.propose.base import Proposer

SleepTag = Literal["weights", "kv_cache"]
TAGS: tuple[SleepTag, ...] = ("weights", "kv_cache")
NO_SLEEP_MODE = "this engine cannot sleep: start it with enable_sleep_mode=True"


class SleepMode:
    """Memory of an engine that can be released."""

    def __init__(self, ops: Ops, runner: Runner, proposer: Proposer | None) -> None:
        """Move weights and KV to where they can be released, before any step is captured."""
        runtime, model = ops.runtime, runner.model
        draft, draft_caches = ((), ()) if proposer is None else proposer.device_memory()
        own = [tensor for entry in model.entries for tensor in tensors_in(entry.packed)]
        places = {tensor.data_ptr() for tensor in own}
        rest = [tensor for tensor in tensors_in(draft) if tensor.data_ptr() not in places]
        caches = [*runner.caches, *draft_caches]
        self._weights, self._draft_weights = runtime.releasable(own, True), runtime.releasable(rest, True)
        self._kv = runtime.releasable(caches, False)
        self.level = 0
        self._released: set[SleepTag] = set()
        self.needs_weights = False  # their content was dropped, and nothing has replaced it yet

    def sleep(self, level: int) -> None:
        """Release the memory; no step may be in flight and no KV in use."""
        if self.level:
            raise ConfigError(f"the engine sleeps already, at level {self.level}")
        self.level, self._released = level, set(TAGS)
        self.needs_weights = level == 2
        self._weights.release(keep=level == 1)
        self._draft_weights.release(keep=True)
        self._kv.release(keep=False)

    def wake_up(self, tags: Sequence[SleepTag], reload: Callable[[], None]) -> None:
        """Restore the memory of `tags`; `reload` reads dropped weights from the checkpoint again.

        With the tag `weights` alone dropped weights are not read: a complete update is expected.
        """
        if "weights" in tags and "weights" in self._released:
            self._weights.restore()
            self._draft_weights.restore()
            self._released.remove("weights")
        if "kv_cache" in tags and "kv_cache" in self._released:
            if self.needs_weights:
                reload()
                self.needs_weights = False
            self._kv.restore()
            self._released.remove("kv_cache")
        if not self._released:
            self.level = 0

    def check_writable(self, is_complete: bool) -> None:
        """Raise EngineDownError if an update cannot be copied now."""
        if "weights" in self._released:
            raise EngineDownError("the engine sleeps: wake_up(tags=['weights']) comes before update_weights")
        if self.needs_weights and not is_complete:
            raise ConfigError("the weights were dropped by sleep(level=2): the update must hold all of them")


def check_tags(tags: Sequence[str] | None) -> list[SleepTag]:
    """Return valid tags, all without any given; ConfigError for an unknown one."""
    if tags is None:
        return list(TAGS)
    if unknown := [tag for tag in tags if tag not in TAGS]:
        raise ConfigError(f"unknown tag {unknown[0]!r}: tags are {', '.join(TAGS)}")
    return [tag for tag in TAGS if tag in tags]
