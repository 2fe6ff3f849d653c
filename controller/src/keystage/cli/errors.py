"""How a command ends badly: one line on standard error, and the exit code."""

from __future__ import annotations

from typing import NoReturn

import typer


def fail(error: object, code: int) -> NoReturn:
    """Prints the message and exits.

    Raises:
        typer.Exit: always.
    """
    typer.echo(f"keystage: {error}", err=True)
    raise typer.Exit(code)
