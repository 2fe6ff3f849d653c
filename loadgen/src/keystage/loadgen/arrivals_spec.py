"""The language of `--arrivals`: text in, `Process` out. Pure; docs/loadgen.md describes it.

    SPEC    = PIECE { "+" PIECE }                     a sum of processes
    PIECE   = KIND [ ":" ARGS ] [ "@" PROFILE ":" ARGS ]
    ARGS    = KEY "=" VALUE { "," KEY "=" VALUE }      lists are written a/b/c
    KIND    = constant | poisson | gamma | mmpp | replay
    PROFILE = ramp | step | burst

What stands in double quotes is taken as it is: replay:"a+b.txt". First in the flow, used by
`options` (to check) and `plan` (to make). Every error names the piece, the bound and the value.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from keystage.loadgen.arrivals import ArrivalError
from keystage.loadgen.arrivals_intensity import Bursts, Modulation, Profile, Ramp, Steps
from keystage.loadgen.arrivals_process import Piece, Process

MAX_PIECES = 64
MAX_NUMBER = 1e12
"""Rates, shares and seconds; products of them stay numbers."""

MAX_VALUES = 64
"""States of an mmpp, rates of steps."""

_KEYS: Mapping[str, tuple[str, ...]] = {
    "constant": ("rate", "share"),
    "poisson": ("rate", "share"),
    "gamma": ("cv", "rate", "share"),
    "mmpp": ("rates", "dwell", "rate"),
    "replay": ("rate", "share", "loop"),
    "ramp": ("from", "to", "over"),
    "step": ("rates", "at"),
    "burst": ("base", "height", "length", "every", "first"),
}
_PROFILES = ("ramp", "step", "burst")
_KINDS = tuple(name for name in _KEYS if name not in _PROFILES)


def parse(text: str) -> Process:
    """Reads a specification.

    Raises:
        ArrivalError: naming the piece, the bound and the value.
    """
    if text.count('"') % 2:
        raise ArrivalError(f"{text!r} has a quote that is not closed")
    pieces = _split(text, "+")
    if len(pieces) > MAX_PIECES:
        raise ArrivalError(f"at most {MAX_PIECES} pieces, got {len(pieces)}")
    return Process(text.strip(), tuple(_piece(part.strip(), n) for n, part in enumerate(pieces, start=1)))


def _piece(text: str, number: int) -> Piece:
    try:
        return _parsed(text, number)
    except ArrivalError as error:
        raise ArrivalError(f"piece {number} {text!r}: {error}") from error


def _parsed(text: str, number: int) -> Piece:
    if not text:
        raise ArrivalError(f"is empty; give one of {', '.join(_KINDS)}")
    process, *profiles = _split(text, "@")
    if len(profiles) > 1:
        raise ArrivalError(f"one profile at most, got {len(profiles)}")
    name, _, rest = process.strip().partition(":")
    kind = next((known for known in _KINDS if known == name.strip()), None)
    if kind is None:
        raise ArrivalError(f"process must be one of {', '.join(_KINDS)}, got {name.strip()!r}")
    path = None
    if kind == "replay":
        path, rest = _path(rest)
    given = _arguments(kind, rest)
    piece = Piece(
        text,
        number,
        kind,  # type: ignore[arg-type]  # one of the keys above
        cv=_cv(kind, given),
        rate_rps=_number(given, "rate", above=0.0) if "rate" in given else None,
        share=_number(given, "share", above=0.0) if "share" in given else 1.0,
        modulation=_modulation(given) if kind == "mmpp" else None,
        profile=_profile(profiles[0].strip()) if profiles else None,
        path=path,
        looped=_is_true(given, "loop"),
    )
    if kind == "mmpp" and piece.profile is not None:
        raise ArrivalError("an mmpp takes no profile: its states are one")
    if "share" in given and not piece.takes_rate:
        raise ArrivalError("share and a rate of its own contradict each other: a share is of --rate")
    return piece


def _cv(kind: str, given: Mapping[str, str]) -> float | None:
    if kind == "gamma":
        return _number(given, "cv", least=0.0)
    return {"constant": 0.0, "poisson": 1.0}.get(kind)


def _path(text: str) -> tuple[Path, str]:
    first, *rest = _split(text, ",")
    name = first.strip().strip('"')
    if not name or re.match(r"(rate|share|loop)\s*=", name):
        raise ArrivalError(f"a file is needed, as in replay:gaps.txt, got {first.strip()!r}")
    return Path(name), ",".join(rest)


def _modulation(given: Mapping[str, str]) -> Modulation:
    rates = _numbers(given, "rates", least=0.0)
    dwell = _numbers(given, "dwell", above=0.0)
    if not 2 <= len(rates) <= MAX_VALUES:
        raise ArrivalError(f"rates must be of 2 to {MAX_VALUES} states, got {len(rates)}")
    if len(dwell) != len(rates):
        raise ArrivalError(f"dwell must have a mean time for each of {len(rates)} rates, got {len(dwell)}")
    if max(rates) <= 0:
        raise ArrivalError("one of rates must be above 0, all are 0")
    return Modulation(rates, dwell)


def _profile(text: str) -> Profile:
    name, _, rest = text.partition(":")
    makers: Mapping[str, Callable[[Mapping[str, str]], Profile]] = {
        "ramp": _ramp,
        "step": _steps,
        "burst": _bursts,
    }
    make = makers.get(name.strip())
    if make is None:
        raise ArrivalError(f"profile must be one of {', '.join(_PROFILES)}, got {name.strip()!r}")
    try:
        profile = make(_arguments(name.strip(), rest))
        if profile.peak_rps <= 0:
            raise ArrivalError("one of its rates must be above 0, all are 0")
    except ArrivalError as error:
        raise ArrivalError(f"profile {text!r}: {error}") from error
    return profile


def _ramp(given: Mapping[str, str]) -> Profile:
    over_s = _number(given, "over", above=0.0) if "over" in given else None
    return Ramp(_number(given, "from", least=0.0), _number(given, "to", least=0.0), over_s)


def _steps(given: Mapping[str, str]) -> Profile:
    rates, at_s = _numbers(given, "rates", least=0.0), _numbers(given, "at", above=0.0)
    if not 2 <= len(rates) <= MAX_VALUES:
        raise ArrivalError(f"rates must be 2 to {MAX_VALUES}, got {len(rates)}")
    if len(at_s) != len(rates) - 1:
        raise ArrivalError(
            f"at must hold {len(rates) - 1} times for {len(rates)} rates (the first holds from 0), "
            f"got {len(at_s)}"
        )
    if any(later <= earlier for earlier, later in itertools.pairwise(at_s)):
        raise ArrivalError(f"at must be ascending, got {given['at']}")
    return Steps(rates, at_s)


def _bursts(given: Mapping[str, str]) -> Profile:
    made = Bursts(
        _number(given, "base", least=0.0),
        _number(given, "height", least=0.0),
        _number(given, "length", above=0.0),
        _number(given, "every", above=0.0),
        _number(given, "first", least=0.0) if "first" in given else None,
    )
    if made.length_s >= made.every_s:
        raise ArrivalError(f"length must be below every ({made.every_s:g} s), got {made.length_s:g}")
    if made.height_rps <= made.base_rps:
        raise ArrivalError(
            f"height, the rate within a burst, must be above base ({made.base_rps:g}/s), "
            f"got {made.height_rps:g}"
        )
    return made


def _arguments(name: str, text: str) -> dict[str, str]:
    known = _KEYS[name]
    given: dict[str, str] = {}
    for part in _split(text, ",") if text.strip() else []:
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if key == "loop" and not equals:
            equals, value = "=", "yes"
        if not equals or key not in known:
            raise ArrivalError(
                f"{name} takes {', '.join(f'{known_key}=' for known_key in known)}; got {part.strip()!r}"
            )
        if key in given:
            raise ArrivalError(f"{key} is given twice: {given[key]!r} and {value!r}")
        given[key] = value
    return given


def _number(
    given: Mapping[str, str], key: str, *, above: float = -math.inf, least: float = -math.inf
) -> float:
    if key not in given:
        raise ArrivalError(f"{key}= is needed")
    return _value(key, given[key], above, least)


def _numbers(
    given: Mapping[str, str], key: str, *, above: float = -math.inf, least: float = -math.inf
) -> tuple[float, ...]:
    if key not in given:
        raise ArrivalError(f"{key}= is needed, a list as in {key}=1/10")
    return tuple(_value(key, text, above, least) for text in given[key].split("/"))


def _value(key: str, text: str, above: float, least: float) -> float:
    bound = f"above {above:g}" if math.isfinite(above) else f"at least {least:g}"
    try:
        value = float(text)
    except ValueError:
        raise ArrivalError(f"{key} must be a number {bound}, got {text.strip()!r}") from None
    if not (math.isfinite(value) and value > above and value >= least):
        raise ArrivalError(f"{key} must be finite and {bound}, got {text.strip()}")
    if value > MAX_NUMBER:
        raise ArrivalError(f"{key} must be at most {MAX_NUMBER:g}, got {text.strip()}")
    return value


def _is_true(given: Mapping[str, str], key: str) -> bool:
    value = given.get(key, "no")
    if value not in ("yes", "no"):
        raise ArrivalError(f"{key} must be yes or no, got {value!r}")
    return value == "yes"


def _split(text: str, at: str) -> list[str]:
    """Splits outside double quotes."""
    parts, begin, quoted = [], 0, False
    for place, character in enumerate(text):
        if character == '"':
            quoted = not quoted
        elif character == at and not quoted:
            parts.append(text[begin:place])
            begin = place + 1
    parts.append(text[begin:])
    return parts


def resolved(text: str, rate_rps: float | None, *, is_search: bool = False) -> Process:
    """Parses, and refuses a rate that no piece would take, or the lack of one.

    Args:
        text: the specification.
        rate_rps: of `--rate`.
        is_search: the whole is rescaled to one rate after the other; so no piece needs one, and pieces
            with and without one cannot be mixed.

    Raises:
        ArrivalError: naming the flags.
    """
    process = parse(text)
    if is_search:
        for piece in process.pieces:
            if piece.kind == "replay" and not piece.looped:
                raise piece.refused("is used up before a window at a high rate ends: add ,loop to search")
        mixed = {piece.takes_rate for piece in process.pieces}
        if len(mixed) > 1:
            raise ArrivalError(
                f"{text!r}: for --search-rate either every piece names a rate of its own, or none does"
            )
        return process
    if rate_rps is not None and not process.takes_rate:
        raise ArrivalError(
            f"--rate {rate_rps:g} contradicts {text!r}: each of its pieces names a rate of its own "
            "(rate= in a piece rescales its states or profile)"
        )
    if rate_rps is None:
        for piece in process.pieces:
            if piece.takes_rate and piece.kind != "replay":
                raise piece.refused("names no rate: give rate= in the piece, or --rate")
    return process
