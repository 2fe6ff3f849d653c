"""Sampled tokens drawn where the logits are; the same function as `sampling.sample`, for many rows at once.

`cuda_executor` takes greedy tokens from its graph; rows with a temperature come here. The uniform number of
a token is a function of its session's seed and its position (`sampling.uniform`), so a token does not
depend on the rows beside it, nor on how often a session is replayed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def draw(
    logits: torch.Tensor, temperatures: Sequence[float], top_ps: Sequence[float], numbers: Sequence[float]
) -> torch.Tensor:
    """Inverse CDF over each row's nucleus, in float64 on the logits' device; nothing waits for it.

    Args:
        logits: float32 [S, vocab], finite.
        temperatures: per row, above 0.
        top_ps: nucleus mass per row, in (0, 1].
        numbers: uniform in [0, 1), per row.

    Returns:
        Token ids int64 [S] on the device.
    """
    columns = torch.tensor([temperatures, top_ps, numbers], dtype=torch.float64).to(logits.device)
    heat, mass, number = (column.unsqueeze(1) for column in columns)
    wide = logits.double()
    masses = torch.softmax((wide - wide.amax(-1, keepdim=True)) / heat, -1)
    tokens = _inverse(masses, number)
    if min(top_ps) < 1:
        ranked, ids = masses.sort(dim=-1, descending=True, stable=True)
        before = ranked.cumsum(-1) - ranked
        kept = before < mass
        kept[:, 0] = True
        place = _inverse(ranked * kept, number)
        tokens = torch.where(mass < 1, ids.gather(1, place), tokens)
    return tokens.squeeze(1)


def _inverse(masses: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
    """Index [S, 1] of the first of the masses [S, n] that the numbers [S, 1] fall into."""
    cumulated = masses.cumsum(-1)
    index = torch.searchsorted(cumulated, number * cumulated[:, -1:], right=True)
    positive = masses > 0
    last = masses.shape[1] - 1 - positive.flip(-1).to(torch.uint8).argmax(-1, keepdim=True)
    return torch.minimum(index, last)
