"""A stream program run to its end in one process: for debugging, and as what deployments are held to.

Over `streams.runtime`: this chooses which module runs next and which messages share a batch, by a rule or by
a seed. A program's answers must not depend on the choice.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from keystage.streams.api import Program
from keystage.streams.runtime import Answer, LocalRuntime, TraceStep

if TYPE_CHECKING:
    import torch


@dataclass(slots=True)
class LocalRun:
    """What a local run gave.

    Attributes:
        answers: one for each body, in order.
        trace: the executions.
        executed: how often each request passed each module.
    """

    answers: list[Answer]
    trace: list[TraceStep]
    executed: list[Counter[str]]


def run_local(
    program: Program,
    bodies: Sequence[bytes],
    *,
    content_type: str = "application/json",
    batch: int = 0,
    seed: int | None = None,
    device: torch.device | str = "cpu",
    report: Callable[[TraceStep], None] | None = None,
    is_strict: bool = False,
) -> LocalRun:
    """Runs requests through a program to their ends.

    Args:
        program: which.
        bodies: one request each.
        content_type: of all bodies.
        batch: largest batch; 0: no bound.
        seed: None: all requests come at once and the first module that has work takes what waits; else
            arrivals, modules and batches are drawn at random.
        device: where modules compute.
        report: called after each execution, `print` for instance.
        is_strict: see `LocalRuntime`.

    Returns:
        Answers in the order of the bodies, and how they came about.

    Raises:
        ValueError: batch below 0.
    """
    if batch < 0:
        raise ValueError(f"batch must be at least 0, got {batch}")
    runtime = LocalRuntime(program, device, is_strict=is_strict)
    choose = None if seed is None else random.Random(seed)
    unsent = list(reversed(bodies))
    while unsent or runtime.waiting:
        names = list(runtime.waiting)
        if unsent and (choose is None or not names or choose.random() < 0.5):
            runtime.submit(unsent.pop(), content_type)
            continue
        step = runtime.step(choose.choice(names) if choose else names[0], batch, choose)
        if report is not None and step is not None:
            report(step)
    answers = [runtime.answer(number) for number in range(len(bodies))]
    return LocalRun(
        [answer for answer in answers if answer is not None],
        runtime.trace,
        [runtime.executed(number) for number in range(len(bodies))],
    )
