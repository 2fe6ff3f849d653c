"""Targets that are wrong on purpose: whether crashes, hangs and memory are noticed (`--only itself`)."""

from __future__ import annotations

from pathlib import Path

from fuzz.target import Ready

_kept: list[bytearray] = []


def crash(scratch: Path) -> Ready:
    """Raises what is no refusal, behind three bytes that must be found."""

    def run(data: bytes) -> None:
        if data[:1] == b"a" and data[1:2] == b"b" and data[2:3] > b"c":
            raise KeyError("found")
        raise ValueError("a refusal")

    return Ready(run, (ValueError,), (b"abc", b"x"))


def hang(scratch: Path) -> Ready:
    """Goes on for ever where a length says so, and swallows every exception meanwhile."""

    def run(data: bytes) -> None:
        while data[:1] > b"a":
            try:
                sum(range(1000))
            except Exception:  # noqa: BLE001  # as the worst of parsers would
                continue

    return Ready(run, (ValueError,), (b"a", b"5"))


def memory(scratch: Path) -> Ready:
    """Keeps a megabyte of each input."""

    def run(data: bytes) -> None:
        _kept.append(bytearray(b"x" * (1 << 20)))

    return Ready(run, (), (b"a",))


def claim(scratch: Path) -> Ready:
    """Takes the memory that a length field claims, and touches none of it."""

    def run(data: bytes) -> None:
        bytearray(int.from_bytes(data[:4], "little") * 64)

    return Ready(run, (), (b"\1\0\0\0", b"\0\0\0\1"))
