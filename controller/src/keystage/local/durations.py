"""Durations as Go writes them (`1h30m`, `10m0s`, `1.5s`): OpenFaaS labels and time-outs are written so.

Pure. Used where labels are read, and where functions are told their time-outs.
"""

from __future__ import annotations

import math
import re
from decimal import Decimal

MAX_S = 9_223_372_036.0
"""Go keeps nanoseconds in 63 bits; a little under 293 years."""
_UNITS = {
    "ns": Decimal("1e-9"),
    "us": Decimal("1e-6"),
    "µs": Decimal("1e-6"),
    "μs": Decimal("1e-6"),
    "ms": Decimal("1e-3"),
    "s": Decimal(1),
    "m": Decimal(60),
    "h": Decimal(3600),
}
_PART = re.compile(r"([0-9]+\.?[0-9]*|\.[0-9]+)(ns|us|µs|μs|ms|s|m|h)")
_MAX_TEXT = 100


def go_duration(seconds: float) -> str:
    """Writes a duration as Go's `Duration.String` does from a second up; shorter ones in milliseconds.

    Args:
        seconds: 0 or more; rounded to microseconds.

    Raises:
        ValueError: it is negative, no number, or more than Go holds.
    """
    if not 0 <= seconds <= MAX_S:
        raise ValueError(f"a duration must be in 0..{MAX_S:.0f} s, not {seconds}")
    micros = round(seconds * 1e6)
    if micros == 0:
        return "0s"
    if micros < 1_000_000:
        return f"{_plain(Decimal(micros) / 1000)}ms"
    minutes, micros = divmod(micros, 60_000_000)
    hours, minutes = divmod(minutes, 60)
    text = f"{_plain(Decimal(micros) / 1_000_000)}s"
    if hours:
        return f"{hours}h{minutes}m{text}"
    return f"{minutes}m{text}" if minutes else text


def parse_go_duration(text: str) -> float:
    """Reads a duration as Go's `ParseDuration` does, in seconds; a bare number but 0 is refused as there.

    Raises:
        ValueError: it is none, negative, or more than Go holds; names the text.
    """
    said = f"{text[:_MAX_TEXT]!r}"
    body = text.removeprefix("+")
    if body == "0":
        return 0.0
    if body.startswith("-"):
        raise ValueError(f"duration {said} is negative")
    total = Decimal(0)
    end = 0
    if body and len(text) <= _MAX_TEXT:
        for part in _PART.finditer(body):
            if part.start() != end:
                break
            total += Decimal(part[1]) * _UNITS[part[2]]
            end = part.end()
    if not body or end != len(body):
        raise ValueError(f"{said} is no duration: write it like 30s, 15m or 1h30m")
    seconds = float(total)
    if not math.isfinite(seconds) or seconds > MAX_S:
        raise ValueError(f"duration {said} is more than {MAX_S:.0f} s")
    return seconds


def _plain(value: Decimal) -> str:
    return f"{value.normalize():f}"
