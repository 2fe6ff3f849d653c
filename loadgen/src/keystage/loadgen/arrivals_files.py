"""Reads files of inter-arrival times for `--arrivals replay:FILE`.

Comes after `arrivals_spec`, which only names the file. A text file, also gzipped (`.gz`): seconds
from one arrival to the next, one number a line; the first is from the start of the run to the first
arrival. Blank lines and lines that begin with `#` are passed over.
"""

from __future__ import annotations

import array
import dataclasses
import gzip
import io
import math
import zlib
from pathlib import Path

import numpy as np

from keystage.loadgen.arrivals import MAX_ARRIVALS, ArrivalError, Floats
from keystage.loadgen.arrivals_process import Process

MAX_RATE_RPS = 1e9
"""Mean rate of a file; beyond it lie mistakes of units, and numbers that overflow."""


def with_files(process: Process) -> Process:
    """The process with the gaps of its replayed files.

    Raises:
        ArrivalError: a file cannot be used; names piece, file and line.
    """
    pieces = []
    for piece in process.pieces:
        if piece.path is None:
            pieces.append(piece)
            continue
        try:
            pieces.append(dataclasses.replace(piece, gaps_s=read_gaps(piece.path)))
        except ArrivalError as error:
            raise piece.refused(str(error)) from error
    return dataclasses.replace(process, pieces=tuple(pieces))


MAX_LINE = 4096
"""Characters; a gzip file can hold a line that no memory does."""


def read_gaps(path: Path) -> Floats:
    """The inter-arrival times in a file, in seconds, shape (n,), n at least 1.

    Raises:
        ArrivalError: the file cannot be read, holds no gap, only zeros, or something else than a gap.
    """
    found = array.array("d")
    try:
        with _opened(path) as file:
            lines = iter(lambda: file.readline(MAX_LINE + 1), "")
            for number, line in enumerate(lines, start=1):
                if len(line) > MAX_LINE:
                    raise ArrivalError(f"{path}, line {number}: more than {MAX_LINE} characters")
                text = line.strip()
                if text and not text.startswith("#"):
                    found.append(_gap(path, number, text))
                if len(found) > MAX_ARRIVALS:
                    raise ArrivalError(f"{path}, line {number}: more than {MAX_ARRIVALS} gaps")
    except UnicodeDecodeError as error:
        raise ArrivalError(f"{path} is not text: {error}") from error
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ArrivalError(f"{path} is no whole gzip file: {error}") from error
    except OSError as error:
        raise ArrivalError(f"{path} cannot be read: {error.strerror or error}") from error
    gaps_s = np.array(found, dtype=np.float64)
    if len(gaps_s) == 0:
        raise ArrivalError(f"{path} holds no inter-arrival time")
    with np.errstate(over="ignore"):
        total_s = float(gaps_s.sum())
    if not 1 / MAX_RATE_RPS <= total_s / len(gaps_s) < math.inf:
        raise ArrivalError(
            f"{path}: its {len(gaps_s)} gaps sum to {total_s:g} s, they must be finite and have a mean of "
            f"{1 / MAX_RATE_RPS:g} s at least"
        )
    return gaps_s


def _opened(path: Path) -> io.TextIOBase:
    if path.suffix == ".gz":
        return io.TextIOWrapper(gzip.open(path), encoding="utf-8-sig")
    return path.open(encoding="utf-8-sig")


def _gap(path: Path, number: int, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        shown = text if len(text) <= 80 else text[:77] + "..."
        raise ArrivalError(
            f"{path}, line {number}: an inter-arrival time is a number of seconds, at least 0, got {shown!r}"
        )
    return value
