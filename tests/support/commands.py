"""All commands of `keystage` with their flags, as the command line itself has them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer.main

from keystage.cli.main import app

JSON = "--json"


def commands() -> Iterator[tuple[str, set[str]]]:
    """Name as it is typed after `keystage`, and the flags it takes, of every command."""
    yield from _below(typer.main.get_command(app), ())


def _below(command: Any, names: tuple[str, ...]) -> Iterator[tuple[str, set[str]]]:
    children = getattr(command, "commands", None)
    if children is None:
        yield " ".join(names), {flag for parameter in command.params for flag in parameter.opts}
        return
    for name, child in children.items():
        yield from _below(child, (*names, name))
