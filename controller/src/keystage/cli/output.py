"""Standard output and error as every command has them: never a traceback for where they go, JSON in UTF-8.

`main` calls `prepare` before a command and `closing` around it. What a terminal of another encoding cannot
show is written as its escape; JSON is UTF-8 whatever the terminal has (RFC 8259).
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from collections.abc import Iterator, Sequence

import msgspec
import typer

JSON = "--json"
CANNOT_WRITE = 1
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def tell_json(value: object) -> None:
    """Prints a value as one JSON document on standard output.

    Args:
        value: what msgspec encodes.
    """
    typer.echo(msgspec.json.format(msgspec.json.encode(value), indent=1).decode())


class CannotWrite(OSError):
    """Standard output takes nothing: a full disk, a pipe whose reader is gone."""


class Output(io.TextIOWrapper):
    """Standard output whose failures are told apart from those of files."""

    def write(self, text: str, /) -> int:
        """See `TextIOWrapper.write`.

        Raises:
            CannotWrite: it takes nothing.
        """
        try:
            return super().write(text)
        except OSError as error:
            raise CannotWrite(error.errno, error.strerror) from error

    def flush(self) -> None:
        """See `TextIOWrapper.flush`.

        Raises:
            CannotWrite: it takes nothing.
        """
        try:
            super().flush()
        except OSError as error:
            raise CannotWrite(error.errno, error.strerror) from error


def prepare(arguments: Sequence[str]) -> None:
    """Makes both streams take every character.

    Args:
        arguments: of the command line.
    """
    out, errors = sys.stdout, sys.stderr
    if isinstance(errors, io.TextIOWrapper):
        errors.reconfigure(errors="backslashreplace")
    if isinstance(out, io.TextIOWrapper):
        encoding = "utf-8" if JSON in arguments else out.encoding
        is_lines, is_through = out.line_buffering, out.write_through
        sys.stdout = sys.__stdout__ = Output(  # type: ignore[misc]  # nobody else is to have the old one
            out.detach(),
            encoding=encoding,
            errors="backslashreplace",
            line_buffering=is_lines,
            write_through=is_through,
        )


@contextlib.contextmanager
def closing() -> Iterator[None]:
    """Ends the command with one line and code 1 where what it writes finds no room, or no reader.

    Raises:
        SystemExit: code 1; the reader of a pipe that is gone is told nothing.
    """
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except CannotWrite as error:
        # What is left in the buffer goes nowhere, else the interpreter would complain of it at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        if error.errno != errno.EPIPE:
            sys.stderr.write(f"keystage: standard output cannot be written: {error.strerror}\n")
        sys.exit(CANNOT_WRITE)
    except OSError as error:
        if error.filename is not None or error.errno not in _FULL:
            raise
        sys.stderr.write(f"keystage: a file cannot be written: {error.strerror}\n")
        sys.exit(CANNOT_WRITE)
