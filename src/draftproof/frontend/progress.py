"""Progress bar for start-up and for generating from many prompts."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

LOG_INTERVAL_SECONDS = 10.0


@contextmanager
def progress_bar(console: Console | None = None) -> Iterator[Callable[[str, int, int], None]]:
    """Show a progress bar; yield a function that takes the name of the task, the number done and the total.

    The bar appears with the first call. Without a terminal, progress is logged from time to time.
    """
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    console = console or Console(stderr=True)
    # without a terminal the bar would still write lines, and stderr may be a file on a full disk
    bar = Progress(*columns, console=console, disable=not (console.is_terminal or console.is_jupyter))
    tasks: dict[str, TaskID] = {}
    last_logged = time.monotonic()

    def show(what: str, done: int, total: int) -> None:
        nonlocal last_logged
        if bar.disable and time.monotonic() - last_logged > LOG_INTERVAL_SECONDS:
            last_logged = time.monotonic()
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
