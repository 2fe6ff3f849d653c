"""Names that a shell completes: of the gateway that the command line so far means, where it answers at once.

Used by `explain` and `status` as typer's completion. A person waits for it with a finger on the key: it asks
once and briefly, and whatever goes wrong is no names and no words.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterable, Sequence
from pathlib import Path

import typer

from keystage.cli import asking
from keystage.cli.figures import clean
from keystage.cli.openfaas import DEFAULT_GATEWAY
from keystage.observability.api import Report

WAIT_S = 1.0
MOST = 200
"""Names of one answer: nobody reads more."""


def pipelines(ctx: typer.Context, incomplete: str) -> list[str]:
    """Pipelines whose names begin like this."""
    report = _asked(ctx)
    return _like(incomplete, [one.pipeline for one in report.pipelines]) if report is not None else []


def stages(ctx: typer.Context, incomplete: str) -> list[str]:
    """What `explain` takes, pipelines and plain functions first."""
    report = _asked(ctx)
    if report is None:
        return []
    names = [one.pipeline for one in report.pipelines]
    names += [one.function for one in report.functions]
    for one in report.pipelines:
        for stage in one.stages:
            names += [f"{one.pipeline}/{stage.stage}", stage.function]
    return _like(incomplete, names)


def joined(words: Sequence[str], place: int) -> tuple[list[str], int]:
    """Words of a line as they were typed: bash cuts them at `:` and `=`, and addresses hold both.

    Args:
        words: as bash has them.
        place: of the one to be completed.

    Returns:
        The words, and the place of the one to be completed among them.

    >>> joined(["keystage", "status", "--gateway", "http", ":", "//h", ":", "80", "e"], 8)
    (['keystage', 'status', '--gateway', 'http://h:80', 'e'], 4)
    """
    made: list[str] = []
    is_cut, found = False, 0
    for number, word in enumerate(words):
        is_break = bool(word) and set(word) <= {":", "="}
        if made and (is_cut or is_break):
            made[-1] += word
        else:
            made.append(word)
        is_cut = is_break
        if number == place:
            found = len(made) - 1
    return made, found


def _like(incomplete: str, names: Iterable[str]) -> list[str]:
    """Names that begin so; one that a shell or a terminal would take for more than a name is left out."""
    found = (name for name in dict.fromkeys(names) if name.startswith(incomplete))
    return [name for name in found if name and clean(name) == name and not set(name) & set(" '\"`$\\;|&<>")][
        :MOST
    ]


def _asked(ctx: typer.Context) -> Report | None:
    given = ctx.params
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            source = asking.source(
                given.get("gateway") or DEFAULT_GATEWAY,
                given.get("user") or "admin",
                _path(given.get("password_file")),
                _path(given.get("home")),
                WAIT_S,
            )
        return source.report()
    except (asking.NotAsked, typer.Exit, ValueError, OSError):
        return None


def _path(given: object) -> Path | None:
    return Path(str(given)) if given is not None else None
