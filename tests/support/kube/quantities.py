"""Quantities of Kubernetes (`500m`, `1Gi`): their value, and how the server writes them. Pure."""

from __future__ import annotations

import re
from fractions import Fraction

_DECIMAL = {"n": -9, "u": -6, "m": -3, "": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_BINARY = {"Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40, "Pi": 50, "Ei": 60}
_SHAPE = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+))(?:([eE][+-]?\d+)|([numkMGTPE]|[KMGTPE]i)?)")


def value_of(text: str | float) -> Fraction:
    """The number.

    Raises:
        ValueError: it is no quantity.
    """
    found = _SHAPE.fullmatch(str(text))
    if found is None:
        raise ValueError(f"quantities must match the regular expression {_SHAPE.pattern!r}, not {text!r}")
    number, exponent, suffix = Fraction(found[1]), found[2], found[3] or ""
    if exponent:
        return Fraction(number * Fraction(10) ** int(exponent[1:]))
    if suffix in _BINARY:
        return Fraction(number * 2 ** _BINARY[suffix])
    return Fraction(number * Fraction(10) ** _DECIMAL[suffix])


def canonical(text: str | float) -> str:
    """As the server writes it: the largest suffix without a fraction, in the given one's family.

    Raises:
        ValueError: it is no quantity.
    """
    value = value_of(text)
    if value == 0:
        return "0"
    if re.search(r"[KMGTPE]i$", str(text)):
        for suffix, power in reversed(_BINARY.items()):
            if (scaled := value / 2**power).denominator == 1:
                return f"{scaled}{suffix}"
    exponent = re.search(r"[eE][+-]?\d+$", str(text)) is not None
    for suffix, power in sorted(_DECIMAL.items(), key=lambda pair: -pair[1]):
        scaled = value / Fraction(10) ** power
        if scaled.denominator == 1:
            return f"{scaled}{f'e{power}' if exponent and power else '' if exponent else suffix}"
    nanos = -(-value * 10**9 // 1)  # finer ones are rounded up
    return f"{nanos}n"
