"""Progress bars of long stages: live on a terminal, a line now and then in a log file."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

SECONDS_BETWEEN_LINES = 15.0


class Bars:
    """Bars by stage name."""

    def __init__(self, progress: Progress, console: Console) -> None:
        self._progress = progress
        self._console = console
        self._tasks: dict[str, TaskID] = {}
        self._printed: dict[str, float] = {}

    def update(self, stage: str, done: float, total: float, note: str = "") -> None:
        """Set a stage's progress; the bar appears with the first call."""
        if stage not in self._tasks:
            self._tasks[stage] = self._progress.add_task(stage, total=total, note=note)
        self._progress.update(self._tasks[stage], completed=done, total=total, note=note)
        if not self._console.is_terminal:
            self._print_line(stage, done, total, note)

    def _print_line(self, stage: str, done: float, total: float, note: str) -> None:
        now = time.monotonic()
        last = self._printed.get(stage, -SECONDS_BETWEEN_LINES)
        if done >= total or now - last >= SECONDS_BETWEEN_LINES:
            self._printed[stage] = now
            self._console.print(f"{stage}: {done:g}/{total:g} {note}", highlight=False)


@contextmanager
def progress_bars() -> Iterator[Bars]:
    """Bars that stay on screen when the stages end."""
    console = Console()
    columns = (
        TextColumn("{task.description:<9}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        yield Bars(progress, console)
