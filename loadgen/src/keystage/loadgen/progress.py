"""Tells how a replay is going: a bar on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from rich import progress as bars
from rich.console import Console

from keystage.loadgen.sender import Progress, Row

LINE_EVERY_S = 10.0


@contextlib.contextmanager
def following(console: Console, total: int, what: str) -> Iterator[Progress]:
    """Yields a function to call with every request that has ended."""
    if console.is_terminal:
        with _bar(console, total, what) as advance:
            yield advance
    else:
        yield _lines(console, total, what)


@contextlib.contextmanager
def _bar(console: Console, total: int, what: str) -> Iterator[Progress]:
    columns = (
        bars.TextColumn("{task.description}"),
        bars.BarColumn(),
        bars.MofNCompleteColumn(),
        bars.TextColumn("failed {task.fields[failed]}"),
        bars.TimeElapsedColumn(),
    )
    failed = 0
    with bars.Progress(*columns, console=console, refresh_per_second=4) as shown:
        task = shown.add_task(what, total=total, failed=0)

        def advance(row: Row) -> None:
            nonlocal failed
            failed += not row.is_served
            shown.update(task, advance=1, failed=failed)

        yield advance


def _lines(console: Console, total: int, what: str) -> Progress:
    ended = failed = 0
    begun_s = told_s = time.monotonic()

    def advance(row: Row) -> None:
        nonlocal ended, failed, told_s
        ended += 1
        failed += not row.is_served
        now_s = time.monotonic()
        if ended == total or now_s - told_s >= LINE_EVERY_S:
            told_s = now_s
            console.print(f"{what}: {ended} of {total} ended, {failed} failed, {now_s - begun_s:.0f} s")

    return advance
