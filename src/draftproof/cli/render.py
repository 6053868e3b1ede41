"""An answer in a terminal: printed as it comes, accepted drafts in colour, figures at its end."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from draftproof.errors import RequestError

if TYPE_CHECKING:
    from draftproof.metrics import SpecStats
    from draftproof.types import TokenEvent

STYLES = {"plain": "", "accepted": "green", "recovered": "yellow", "bonus": "cyan"}


@dataclass(slots=True)
class Shown:
    """An answer as it went by."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    seconds: float = 0.0  # from the first token to the last
    finish_reason: str | None = None
    error: str | None = None

    @property
    def rate(self) -> float:
        return (len(self.token_ids) - 1) / self.seconds if self.seconds > 0 else 0.0

    def figures(self, stats: SpecStats) -> str:
        words = f"{len(self.token_ids)} tokens in {stats.num_steps} steps"
        if stats.num_drafts:
            words += (
                f", acceptance length {stats.acceptance_length:.2f}, {stats.num_accepted_tokens} of "
                f"{stats.num_draft_tokens} drafts accepted"
            )
        return f"{words}, {self.rate:.1f} tok/s"


def show(events: Iterator[TokenEvent], console: Console) -> Shown:
    """Print tokens as they come. Ctrl-C ends the answer and keeps what there is."""
    shown, begin = Shown(), 0.0
    with contextlib.suppress(KeyboardInterrupt):
        for event in events:
            begin = begin or time.perf_counter()
            style = STYLES.get(event.provenance.partition(":")[0], "")
            console.print(Text(event.text, style=style), end="")
            shown.text += event.text
            if event.token_id is not None:
                shown.token_ids.append(event.token_id)
                shown.logprobs.append(event.logprobs)
            shown.seconds = time.perf_counter() - begin
            shown.finish_reason, shown.error = event.finish_reason, event.error
    console.print()
    if shown.error:
        raise RequestError(shown.error)
    return shown


def legend() -> Text:
    words = Text("colours: plain ")
    for name in ("accepted", "recovered", "bonus"):
        words.append(f" {name} ", style=STYLES[name])
    return words
