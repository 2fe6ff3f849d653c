"""The next token as a pure function of (logits, seed, position).

The last stage samples here after each wave. Whatever rows share a batch, and however often a
session is replayed, the same logits give the same token: the one uniform number per token comes
from a counter-based generator (Philox, Salmon et al. 2011) keyed by the session's seed, with the
position as its counter. No state, no clock, no generator that is shared.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

_MASK_64 = (1 << 64) - 1
_STREAM = 0x6B657973
"""Second half of the key: keeps these numbers apart from any other use of a session's seed."""
_FIRST_CANDIDATES = 64


class SamplingError(ValueError):
    """Rows that cannot be sampled.

    Attributes:
        rows: indices into the batch.
    """

    http_status = 500

    def __init__(self, reason: str, rows: Sequence[int]) -> None:
        super().__init__(reason)
        self.rows = list(rows)


def uniform(seed: int, position: int) -> float:
    """The uniform number in [0, 1) that belongs to a seed and a position."""
    generator = np.random.Philox(
        key=np.array([seed & _MASK_64, _STREAM], dtype=np.uint64), counter=[position & _MASK_64, 0, 0, 0]
    )
    return (int(generator.random_raw()) >> 11) * 2.0**-53


def sample(
    logits: torch.Tensor,
    seeds: Sequence[int],
    positions: Sequence[int],
    temperatures: Sequence[float],
    top_ps: Sequence[float],
) -> list[int]:
    """Chooses the next token of each row.

    Args:
        logits: float32 [S, vocab], any device.
        seeds: 64-bit seed per row.
        positions: position of the token to be chosen, per row.
        temperatures: per row; 0 takes the likeliest token, the smallest id among equals.
        top_ps: nucleus mass per row, in (0, 1].

    Returns:
        Token ids, one per row.

    Raises:
        SamplingError: logits that are NaN, infinite or all masked, or a parameter out of range.
    """
    if not len(seeds):
        return []
    peaks, choices = logits.max(-1)
    check_logits((~torch.isfinite(peaks)).nonzero().flatten().tolist())
    tokens: list[int] = choices.tolist()
    for row, temperature in enumerate(temperatures):
        if not (temperature >= 0 and 0 < top_ps[row] <= 1):
            raise SamplingError(
                f"row {row}: temperature must be at least 0 and top_p in (0, 1], "
                f"got {temperature} and {top_ps[row]}",
                [row],
            )
        if temperature > 0:
            number = uniform(seeds[row], positions[row])
            tokens[row] = _draw(logits[row], temperature, top_ps[row], number)
    return tokens


def check_logits(bad: Sequence[int]) -> None:
    """Refuses rows whose largest logit is not finite.

    Args:
        bad: their indices.

    Raises:
        SamplingError: there are any.
    """
    if bad:
        raise SamplingError(f"logits of rows {list(bad)} have no finite maximum (NaN or infinite)", bad)


def _draw(logits: torch.Tensor, temperature: float, top_p: float, number: float) -> int:
    """Inverse CDF over the nucleus, in float64 on the CPU."""
    values = logits.cpu().numpy().astype(np.float64)
    masses = np.exp((values - values.max()) / temperature)
    masses /= masses.sum()
    if top_p >= 1:
        ids: npt.NDArray[np.int64] | None = None
    else:
        ids = _nucleus(masses, top_p)
        masses = masses[ids]
    cumulated = masses.cumsum()
    index = int(np.searchsorted(cumulated, number * cumulated[-1], side="right"))
    index = min(index, int(np.flatnonzero(masses)[-1]))
    return index if ids is None else int(ids[index])


def _nucleus(masses: npt.NDArray[np.float64], top_p: float) -> npt.NDArray[np.int64]:
    """Ids of the smallest set of likeliest tokens whose mass reaches top_p, likeliest first.

    Equal masses are taken by id. Only as many candidates are sorted as the mass needs.
    """
    count = min(_FIRST_CANDIDATES, masses.size)
    while True:
        floor = np.partition(masses, masses.size - count)[masses.size - count]
        candidates = np.flatnonzero(masses >= floor)
        if count == masses.size or masses[candidates].sum() >= top_p:
            break
        count = min(count * 8, masses.size)
    ranked = candidates[np.argsort(-masses[candidates], kind="stable")]
    before = masses[ranked].cumsum() - masses[ranked]
    kept = max(1, int(np.count_nonzero(before < top_p)))
    return ranked[:kept].astype(np.int64)
