"""How a command ends badly: one line on standard error, and the exit code."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

import typer


def fail(error: object, code: int) -> NoReturn:
    """Prints the message and exits.

    Raises:
        typer.Exit: always.
    """
    typer.echo(f"keystage: {error}", err=True)
    raise typer.Exit(code)


def make_folder(path: Path) -> None:
    """Makes the folder results go to, before anything long is begun.

    Raises:
        typer.Exit: it cannot be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fail(f"{path} cannot be made a folder: {error.strerror}", 1)


def bad_settings(error: ValueError) -> str:
    """What is wrong with variables of the environment, one after the other; no address is repeated.

    Args:
        error: whatever it is; text is empty where it is not about a part's settings.
    """
    from pydantic import ValidationError

    if not isinstance(error, ValidationError) or not error.title.endswith("Settings"):
        return ""
    found = []
    for fault in error.errors():
        name = "_".join(str(part) for part in fault["loc"]).upper()
        given = "..." if "://" in str(fault["input"]) else fault["input"]  # it may hold a password
        found.append(f"KEYSTAGE_{name}={given}: {fault['msg'].removeprefix('Value error, ')}")
    return "; ".join(found)
