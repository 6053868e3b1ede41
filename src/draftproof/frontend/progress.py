"""A bar for what takes a while: starting, and answering many prompts."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

EVERY = 10.0  # seconds between two lines of a log


@contextmanager
def progress_bar() -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar, there from the first call on: what is done, how much, of how much.

    Where nobody looks, now and then a line of the log.
    """
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    console = Console(stderr=True)
    # where nobody looks it would still write lines, and what it writes to may be a full disk
    bar = Progress(*columns, console=console, disable=not (console.is_terminal or console.is_jupyter))
    tasks: dict[str, TaskID] = {}
    told = time.monotonic()

    def show(what: str, done: int, total: int) -> None:
        nonlocal told
        if bar.disable and time.monotonic() - told > EVERY:
            told = time.monotonic()
            logging.getLogger("draftproof").info("%s: %d of %d", what, done, total)
        if what not in tasks:
            tasks[what] = bar.add_task(what, total=total)
            bar.start()
        bar.update(tasks[what], completed=done)

    try:
        yield show
    finally:
        if tasks and not bar.disable:
            bar.stop()
