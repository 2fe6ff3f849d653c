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
