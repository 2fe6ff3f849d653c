"""From counts per minute to arrivals within the minute; pure.

Each function and minute has random numbers of its own: SplitMix64 (Steele, Lea and Flood, OOPSLA
2014) started at a hash of the function's key and the minute, so neither the selection of other
functions nor NumPy's version changes an arrival. For n arrivals of a minute of 60 s:

- poisson: n independent uniform times. Given its count, a Poisson process looks exactly so.
- uniform: even spacing, 60/n s, from a first arrival at phase * 60/n; the phase in [0, 1) is drawn
  once a function, so that functions do not all fire at second 0.
- gamma:CV: n gaps of a gamma distribution of that CV (shape 1/CV^2) scaled to 60 s together, laid
  around the minute as around a clock face from a uniform time; so every time of the minute is as
  likely, and bursts of different functions do not meet at the minute's ends. CV 1 has the law of
  poisson. A bursty minute stays in its minute: the counts are the file's, whatever the CV, and a CV
  read over many minutes is that of the counts too. Drawn after Marsaglia and Tsang (ACM TOMS 26,
  2000), in logarithms, so that not all gaps of a large CV vanish.

Times lie in [60 m, 60 (m + 1)) always, so the counts per minute are the file's exactly.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
import numpy.typing as npt

from keystage.loadgen.arrivals import CONSTANT_BELOW_CV, MAX_CV
from keystage.loadgen.traces.model import Floats, Ints

MINUTE_S = 60.0

_Words = npt.NDArray[np.uint64]
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MINUTE_STEP = np.uint64(0xD1342543DE82EF95)
_DURATIONS = np.uint64(0xA0761D6478BD642F)
_GAPS = np.uint64(0xE7037ED1A0B428DB)
_TURN = np.uint64(0x8EBC6AF09C88C6E3)
_PHASE_MINUTE = 0


def parse_within(text: str) -> float | None:
    """The CV of `gamma:CV`, 1 for `poisson`, None for `uniform` (and for a gamma of CV 0).

    Raises:
        ValueError: none of these, or a CV outside 0..MAX_CV.
    """
    if text in ("poisson", "uniform"):
        return 1.0 if text == "poisson" else None
    name, _, rest = text.partition(":")
    try:
        cv = float(rest) if name == "gamma" else math.nan
    except ValueError:
        cv = math.nan
    if not 0 <= cv <= MAX_CV:
        raise ValueError(
            "arrivals within a minute are poisson, uniform or gamma:CV "
            f"with a CV in 0..{MAX_CV:g}, got {text!r}"
        )
    return None if cv < CONSTANT_BELOW_CV else cv


def key(seed: int, function: str, occurrence: int = 0) -> int:
    """The word that a function's random numbers start from (occurrence: its rows beyond the first)."""
    text = f"{seed}\0{function}\0{occurrence}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def place(keys: _Words, counts: Ints, minute: int, cv: float | None) -> Floats:
    """Seconds within the minute, one function after the other, not sorted.

    Args:
        keys: key of each function, shape (f,).
        counts: arrivals of each, at least 1, shape (f,).
        minute: number of the minute in its day, from 1.
        cv: as `parse_within` gives it.

    Returns:
        Shape (sum of counts,), each in [0, 60].
    """
    index = _index(counts)
    if cv is None:
        phase = np.repeat(_unit(_mixed(_state(keys, _PHASE_MINUTE))), counts)
        return (index + phase) * (MINUTE_S / np.repeat(counts, counts))
    if cv == 1.0:
        return MINUTE_S * _uniform(np.repeat(_state(keys, minute), counts), index)
    states = _state(keys, minute)
    turns_s = MINUTE_S * np.repeat(_unit(_mixed(states ^ _TURN)), counts)
    return (_gamma(np.repeat(states ^ _GAPS, counts), counts, 1.0 / (cv * cv)) + turns_s) % MINUTE_S


def draws(keys: _Words, counts: Ints, minute: int) -> Floats:
    """Uniform numbers beside the arrivals (for durations), in [0, 1), shape (sum of counts,)."""
    return _uniform(np.repeat(_state(keys, minute) ^ _DURATIONS, counts), _index(counts))


def in_minute(within_s: Floats, start_s: float) -> Floats:
    """Times of the trace, kept below the next minute where rounding would reach it."""
    end_s = start_s + MINUTE_S
    return np.minimum(start_s + within_s, np.nextafter(end_s, start_s))


def _index(counts: Ints) -> Ints:
    ends = np.cumsum(counts)
    return np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - counts, counts)


def _state(keys: _Words, minute: int) -> _Words:
    steps: _Words = np.full(len(keys), minute, dtype=np.uint64) * _MINUTE_STEP
    return _mixed(keys + steps)


def _uniform(states: _Words, index: Ints) -> Floats:
    return _unit(_mixed(states + _steps(index)))


def _steps(index: Ints) -> _Words:
    return (index.astype(np.uint64) + np.uint64(1)) * _GOLDEN


def _mixed(words: _Words) -> _Words:
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def _unit(words: _Words) -> Floats:
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _gamma(states: _Words, counts: Ints, shape: float) -> Floats:
    """Cumulated gaps; each function's are summed by themselves, so that no other changes a bit of them."""
    logs = _log_gamma(_mixed(states + _steps(_index(counts))), shape)
    times = np.empty(len(logs))
    for count, end in zip(counts.tolist(), np.cumsum(counts).tolist(), strict=True):
        own = logs[end - count : end]
        sums = np.cumsum(np.exp(own - own.max()))
        times[end - count : end] = sums * (MINUTE_S / sums[-1])
    return times


def _log_gamma(states: _Words, shape: float) -> Floats:
    """Logarithm of one gamma variate of scale 1 for each state."""
    boost = 1.0 if shape < 1 else 0.0
    d = shape + boost - 1 / 3
    drawn = np.empty(len(states))
    left = np.arange(len(states))
    attempt = 0
    while len(left):
        first, angle, accept = (_unit(_mixed(states[left] + _nth(4 * attempt + k))) for k in (1, 2, 3))
        normal = np.sqrt(-2 * np.log1p(-first)) * np.cos(2 * np.pi * angle)
        root = np.maximum(1 + normal / math.sqrt(9 * d), 0)
        with np.errstate(divide="ignore"):
            log_v = 3 * np.log(root)
            is_taken = np.log1p(-accept) < normal**2 / 2 + d * (1 - root**3 + log_v)
        drawn[left[is_taken]] = math.log(d) + log_v[is_taken]
        left = left[~is_taken]
        attempt += 1
    return drawn + boost * np.log1p(-_unit(_mixed(states + _nth(4)))) / shape


def _nth(number: int) -> np.uint64:
    return np.uint64(number * int(_GOLDEN) & 0xFFFFFFFFFFFFFFFF)
