"""Terminal rendering of a streamed output, with accepted drafts in colour and figures at the end."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from draftproof.errors import RequestError

if TYPE_CHECKING:
    from draftproof.metrics import SpecStats
    from draftproof.outputs import TokenEvent

STYLES = {"plain": "", "accepted": "green", "recovered": "yellow", "bonus": "cyan"}


@dataclass(slots=True)
class RenderedOutput:
    """Text, tokens, logprobs and timing of an output that was rendered."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    seconds: float = 0.0  # from the first token to the last
    finish_reason: str | None = None
    error: str | None = None

    @property
    def rate(self) -> float:
        """Tokens per second after the first token."""
        return (len(self.token_ids) - 1) / self.seconds if self.seconds > 0 else 0.0

    def figures(self, stats: SpecStats) -> str:
        """Return one line with tokens, steps, acceptance and speed."""
        return figures_line(len(self.token_ids), stats, self.rate)


def figures_line(num_tokens: int, stats: SpecStats, rate: float) -> str:
    """Return one line with tokens, steps, acceptance and tokens per second."""
    text = f"{num_tokens} tokens in {stats.num_steps} steps"
    if stats.num_drafts:
        text += (
            f", acceptance length {stats.acceptance_length:.2f}, {stats.num_accepted_tokens} of "
            f"{stats.num_draft_tokens} drafts accepted"
        )
    return f"{text}, {rate:.1f} tok/s"


def render(events: Iterable[TokenEvent], console: Console) -> RenderedOutput:
    """Print tokens as they arrive. Ctrl-C ends the output and keeps what was printed."""
    output, start = RenderedOutput(), 0.0
    with contextlib.suppress(KeyboardInterrupt):
        for event in events:
            start = start or time.perf_counter()
            style = STYLES.get(event.provenance.partition(":")[0], "")
            console.print(Text(event.text, style=style), end="")
            output.text += event.text
            if event.token_id is not None:
                output.token_ids.append(event.token_id)
                output.logprobs.append(event.logprobs)
            output.seconds = time.perf_counter() - start
            output.finish_reason, output.error = event.finish_reason, event.error
    console.print()
    if output.error:
        raise RequestError(output.error)
    return output


def legend() -> Text:
    """Return the legend of the colours."""
    text = Text("colours: plain ")
    for name in ("accepted", "recovered", "bonus"):
        text.append(f" {name} ", style=STYLES[name])
    return text
