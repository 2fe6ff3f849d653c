"""A tiny random Llama as a bundle, and the right answers, by transformers in this process.

The unsplit model computes the logits, so stages, wire and KV blocks are held against something that has none
of them; only the draw of a token is the worker's own function. Logits of the same row differ by about 1e-5
with the rows beside it (other kernels for other batch sizes), so a request counts only if no token of it
changes when all logits are shaken by thirty times as much: whatever differs then is wrong.
"""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import torch
from support.tiny_llama import tiny_model, write_folder

from chaos.requests import Case, shape
from keystage.bundle.split import split
from keystage.worker.sampling import sample

CONTEXT = 512
VOCABULARY = 97
SHAKE = 3e-4
SHAKES = 4


def write_bundle(folder: Path, name: str, stages: int) -> tuple[Path, Any]:
    """Writes the bundle; returns its folder and the unsplit model."""
    model = tiny_model(max_position_embeddings=CONTEXT, num_hidden_layers=max(4, stages))
    source = write_folder(model, folder / "model")
    return split(source, stages, "uniform", folder / "bundle", name), model


def cases(model: Any, seed: int, count: int) -> list[Case]:
    """Draws cases and computes their answers; those that hang on rounding are left out.

    Args:
        model: the unsplit model.
        seed: of the cases.
        count: how many.
    """
    torch.set_num_threads(1)  # they are small: threads would wait for each other, and for the system's
    rng = random.Random(f"{seed} cases")
    found: list[Case] = []
    while len(found) < count:
        case = shape(rng, CONTEXT, VOCABULARY)
        answer = answered(model, case)
        if answer is not None:
            found.append(dataclasses.replace(case, expected=answer))
    return found


@torch.inference_mode()
def answered(model: Any, case: Case) -> tuple[int, ...] | None:
    """The answer, or None where a token of it hangs on rounding."""
    noise = torch.Generator().manual_seed(case.seed & 0xFFFF)
    tokens: list[int] = []
    while len(tokens) < case.max_tokens:
        ids = torch.tensor([[*case.prompt, *tokens]])  # all anew: what is compared has caches enough
        logits = model(ids, use_cache=False).logits[0, -1:].float()
        position = len(case.prompt) + len(tokens)
        shaken = logits + SHAKE * (2 * torch.rand(SHAKES, logits.shape[-1], generator=noise) - 1)
        rows = torch.cat([logits, shaken])
        number = len(rows)
        chosen = sample(
            rows, [case.seed] * number, [position] * number, [case.temperature] * number,
            [case.top_p] * number,
        )  # fmt: skip
        if len(set(chosen)) > 1:
            return None
        tokens.append(chosen[0])
    return tuple(tokens)
