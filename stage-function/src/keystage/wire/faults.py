"""Faults of a program's environment in words: the variable, what it says, what is wrong with it."""

from __future__ import annotations

from pydantic import ValidationError

_SECRET = frozenset({"REDIS"})
"""They may hold a password: what they say is not repeated."""


def faults_of(error: ValidationError) -> list[str]:
    """A line for each fault.

    Args:
        error: of settings whose variables are `KEYSTAGE_` and the field's name.
    """
    lines = []
    for fault in error.errors():
        name = "_".join(str(part) for part in fault["loc"]).upper()
        given = "..." if name in _SECRET else fault["input"]
        said = " is missing" if fault["type"] == "missing" else f"={given}: {fault['msg']}"
        lines.append(f"KEYSTAGE_{name}{said}")
    return lines
