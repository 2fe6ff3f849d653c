"""Learns the weights of `maths.attention` from examples; the only place that runs torch for it.

Before it: examples, simulated and recorded. After it: `Weights` in plain numbers, that `Attention` reads
without torch. The network below is the formula of `maths.attention`, term by term; a test holds the two
to the same result. The loss is the smooth L1 error of log CV behind the entry, so that a chain that went
wild does not outweigh the others. One fixed schedule, no choice by held-out data: those only report.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from keystage.controller.maths import attention, qna
from keystage.controller.maths.attention import FEATURES, FORMAT, Weights
from keystage.training.dataset import Example, Table, table

if TYPE_CHECKING:
    import torch


@dataclasses.dataclass(frozen=True, slots=True)
class FitOptions:
    """How to train.

    Attributes:
        epochs: passes over the examples.
        seed: of the first weights and of the order.
        heads: attention heads.
        width: numbers per head.
        hidden: numbers between attention and correction.
        batch: chains per step.
        rate: first learning rate; it falls to 0 on a cosine.
        decay: weight decay.
        beta: error of log CV up to which the loss is quadratic.
    """

    epochs: int = 250
    seed: int = 0
    heads: int = 4
    width: int = 8
    hidden: int = 24
    batch: int = 64
    rate: float = 3e-3
    decay: float = 1e-3
    beta: float = 0.1


@dataclasses.dataclass(frozen=True, slots=True)
class _Batch:
    """Chains of one length: features [n, k, f], CV by qna [n, k], wanted correction [n, k]."""

    x: torch.Tensor
    cv: torch.Tensor
    target: torch.Tensor


def fit(
    examples: Sequence[Example],
    options: FitOptions,
    version: str,
    progress: Callable[[int, float], None] | None = None,
) -> Weights:
    """Trains.

    Args:
        examples: chains of any lengths, at least two stages each.
        options: how.
        version: name kept in the weights.
        progress: told the epoch (from 1) and its mean loss.

    Raises:
        ValueError: there is nothing to learn from.
    """
    import torch

    groups: dict[int, list[Example]] = {}
    for example in examples:
        if len(example.stations) >= 2:
            groups.setdefault(len(example.stations), []).append(example)
    if not groups:
        raise ValueError(f"no chain of two or more stages among {len(examples)} examples to learn from")
    torch.manual_seed(options.seed)
    data = [_batch(table(group)) for _, group in sorted(groups.items())]
    weights = _initial(options)
    tuned = torch.optim.AdamW(list(weights.values()), lr=options.rate, weight_decay=options.decay)
    falling = torch.optim.lr_scheduler.CosineAnnealingLR(tuned, options.epochs)
    for epoch in range(1, options.epochs + 1):
        losses = []
        for group in data:
            for rows in torch.randperm(len(group.x)).split(options.batch):  # type: ignore[no-untyped-call]
                tuned.zero_grad()
                delta = correction(weights, group.x[rows], group.cv[rows])
                loss = torch.nn.functional.smooth_l1_loss(
                    delta[:, 1:], group.target[rows][:, 1:], beta=options.beta
                )
                loss.backward()  # type: ignore[no-untyped-call]
                tuned.step()
                losses.append(float(loss.detach()))
        falling.step()
        if progress is not None:
            progress(epoch, sum(losses) / len(losses))
    return _plain(weights, version)


def correction(weights: dict[str, torch.Tensor], x: torch.Tensor, cv: torch.Tensor) -> torch.Tensor:
    """`Attention.correction` in torch: [n, k]; the entry's is left as it comes."""
    import torch

    n, k, _ = x.shape
    h = torch.einsum("pkf,hfd->pkhd", x, weights["project"])
    mine = torch.einsum("pkhd,hd->pkh", h, weights["own"])
    theirs = torch.einsum("pkhd,hd->pkh", h, weights["other"])
    scores, seen = [], []
    for role, shift in enumerate((-1, 0, 1)):
        index = torch.arange(k) + shift
        is_there = (index >= 0) & (index < k)
        j = index.clamp(0, k - 1)
        leaky = torch.nn.functional.leaky_relu(mine + theirs[:, j], attention.SLOPE)
        score = leaky + weights["theta"] * cv[:, j, None] + weights["role"][role]
        scores.append(score.masked_fill(~is_there[None, :, None], -torch.inf))
        seen.append(h[:, j])
    alpha = torch.softmax(torch.stack(scores), dim=0)
    gathered = (alpha[..., None] * torch.stack(seen)).sum(dim=0).reshape(n, k, -1)
    hidden = torch.tanh(torch.cat((gathered, x), dim=-1) @ weights["mix"] + weights["mix_bias"])
    raw = hidden @ weights["out"] + weights["out_bias"]
    return attention.BOUND * torch.tanh(raw / attention.BOUND)


def _batch(data: Table) -> _Batch:
    import torch

    flow = qna.flow(data.entry_scv, data.chains)
    x = attention.features(data.chains, flow)
    cv = np.sqrt(flow.scv)
    least = attention.LEAST_CV
    target = np.log(np.maximum(data.cv, least) / np.maximum(cv, least))
    return _Batch(*(torch.tensor(a, dtype=torch.float32) for a in (x, cv, target)))


def _initial(options: FitOptions) -> dict[str, torch.Tensor]:
    import torch

    count, inner = len(FEATURES), options.heads * options.width + len(FEATURES)
    shapes: dict[str, tuple[tuple[int, ...], float]] = {
        "project": ((options.heads, count, options.width), count**-0.5),
        "own": ((options.heads, options.width), 0.3),
        "other": ((options.heads, options.width), 0.3),
        "theta": ((options.heads,), 0.0),
        "role": ((3, options.heads), 1.0),
        "mix": ((inner, options.hidden), inner**-0.5),
        "mix_bias": ((options.hidden,), 0.0),
        "out": ((options.hidden,), 0.05),
        "out_bias": ((1,), 0.0),
    }
    return {name: (scale * torch.randn(shape)).requires_grad_() for name, (shape, scale) in shapes.items()}


def _plain(weights: dict[str, torch.Tensor], version: str) -> Weights:
    """Numbers of five digits: more than the data can tell apart, and a small file."""

    def rounded(value: Any) -> Any:
        return [rounded(v) for v in value] if isinstance(value, list) else float(f"{value:.5g}")

    numbers = {name: rounded(tensor.detach().tolist()) for name, tensor in weights.items()}
    numbers["out_bias"] = numbers["out_bias"][0]
    return Weights(format=FORMAT, version=version, features=FEATURES, **numbers)
