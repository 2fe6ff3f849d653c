"""What sessions answer that have a pipeline to themselves, and what workers tell of their blocks."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

import torch
from support.processes import get
from support.tiny_llama import Chain

from keystage.models.base import Row


@dataclasses.dataclass(frozen=True, slots=True)
class Solo:
    """A prompt and what follows it when it has the model to itself."""

    prompt: list[int]
    tokens: list[int]


def alone(chain: Chain, prompt: list[int], tokens: int) -> Solo | None:
    """Greedy tokens of one session, or None when two tokens are so close that rounding may choose."""
    chain.open(0, len(prompt) + tokens)
    ids, start, found = list(prompt), 0, []
    for _ in range(tokens):
        logits = chain.forward(ids, [Row(0, start, len(ids))], [0])[0]
        best = logits.topk(2)
        if float(best.values[0] - best.values[1]) < 1e-3:
            return None
        start += len(ids)
        ids = [int(best.indices[0])]
        found += ids
    return Solo(prompt, found)


def solos(bundle: Path, prompts: Iterator[list[int]], wanted: int, tokens: int) -> list[Solo]:
    """Solo runs of the first `wanted` prompts that have a clear answer."""
    chain = Chain(bundle)
    found: list[Solo] = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # such small matrices gain nothing from more, and the workers have one
    with torch.inference_mode():
        while len(found) < wanted:
            solo = alone(chain, next(prompts), tokens)
            if solo is not None:
                found.append(solo)
    torch.set_num_threads(threads)
    return found


def metric(url: str, name: str) -> float:
    """Sum of a metric over its labels."""
    _, text = get(f"{url}/metrics")
    found = re.findall(rf"^{name}{{.*}} (\S+)$", text.decode(), re.MULTILINE)
    assert found, f"{name} is not among the metrics of {url}"
    return sum(float(value) for value in found)
