"""`keystage top`: what every pipeline does, live in a terminal.

A thread asks the gateway; this one draws and takes keys (`top_view` is what they mean). Without a terminal it
is one table, as `keystage status` has it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from keystage.cli import asking
from keystage.cli.errors import fail
from keystage.cli.openfaas import DEFAULT_GATEWAY
from keystage.cli.output import tell_json
from keystage.cli.top_view import Seen, View, pressed, screen

if TYPE_CHECKING:
    from rich.console import Console

    from keystage.cli.keyboard import ReadKey
    from keystage.observability.api import Report

DRAW_EVERY_S = 0.25
TERMINATED = 128 + signal.SIGTERM


def top(
    every: Annotated[
        float, typer.Option(help="seconds between two reports", min=0.2, max=asking.MOST_S)
    ] = 1.0,
    gateway: asking.Gateway = DEFAULT_GATEWAY,
    user: asking.User = "admin",
    password_file: asking.PasswordFile = None,
    home: asking.Home = None,
    timeout: asking.Timeout = 10.0,
    as_json: asking.AsJson = False,
) -> None:
    """Watch pipelines, stages, queues, replicas and decisions, live.

    Keys: q quits, p pauses, arrows or j and k choose a pipeline, page up and down go through its stages.
    Without a terminal it prints one table; with --json one report. Exit code 2: the gateway cannot be asked.
    """
    from rich.console import Console

    source = asking.source(gateway, user, password_file, home, timeout)
    try:
        first = source.report()
    except asking.NotAsked as error:
        fail(error, asking.NOT_ASKED)
    if as_json:
        tell_json(first)
        return
    console = Console(markup=False, highlight=False)
    if not console.is_terminal or console.is_dumb_terminal:
        _once(console, first)
        return
    poller = Poller(source.report, first, every)
    poller.start()
    try:
        with _term_ends(), _keys() as read:
            _watch(console, poller, read)
    finally:
        poller.stop()


class Poller:
    """Asks again and again, in a thread of its own: a slow answer must not hold up a key.

    Args:
        read: asks once; raises `asking.NotAsked`.
        first: what was read already.
        every_s: between two questions.
    """

    def __init__(self, read: Callable[[], Report], first: Report, every_s: float) -> None:
        self._read = read
        self._every_s = every_s
        self._seen = Seen(first)
        self._changed_s = time.monotonic()
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="top", daemon=True)

    def start(self) -> None:
        """Begins to ask."""
        self._thread.start()

    def stop(self) -> None:
        """Asks no more; an exchange that hangs is not waited for."""
        self._end.set()

    def seen(self) -> Seen:
        """What is known now."""
        with self._lock:
            return dataclasses.replace(self._seen, age_s=time.monotonic() - self._changed_s)

    def _run(self) -> None:
        while not self._end.wait(self._every_s):
            try:
                report, error = self._read(), ""
            except asking.NotAsked as failure:
                report, error = self._seen.report, str(failure)
            with self._lock:
                before = self._seen.report
                if (report.controller, report.number) != (before.controller, before.number):
                    self._changed_s = time.monotonic()
                self._seen = Seen(report, error=error)


def _watch(console: Console, poller: Poller, read: ReadKey) -> None:
    """Draws and takes keys until the person has had enough."""
    from rich.console import Group
    from rich.live import Live

    is_plain = console.options.ascii_only
    view, seen = View(), poller.seen()
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while not view.is_ended:
            if not view.is_paused:
                seen = poller.seen()
            width, height = console.size
            made, view = screen(view, seen, width, height, is_plain=is_plain)
            live.update(Group(*made), refresh=True)
            if key := read(DRAW_EVERY_S):
                view = pressed(view, key, seen.report)


@contextlib.contextmanager
def _keys() -> Iterator[ReadKey]:
    """Keys of the terminal; where standard input is none, nothing ever comes from it."""
    if not sys.stdin.isatty():

        def nothing(timeout_s: float) -> str:
            time.sleep(timeout_s)
            return ""

        yield nothing
        return
    from keystage.cli.keyboard import keys

    with keys(sys.stdin.fileno()) as read:
        yield read


@contextlib.contextmanager
def _term_ends() -> Iterator[None]:
    """SIGTERM leaves the terminal as it was, too."""

    def end(_number: int, _frame: FrameType | None) -> NoReturn:
        raise typer.Exit(TERMINATED)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _once(console: Console, report: Report) -> None:
    """One table, for a pipe or a terminal that cannot be drawn on."""
    from keystage.cli.status import table

    width = console.width if console.is_terminal else None
    for line in table(report, width, is_one=False, is_plain=console.options.ascii_only):
        console.print(line, soft_wrap=True)
