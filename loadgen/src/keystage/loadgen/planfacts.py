"""What a run was asked to send, in a form that two runs can be compared by.

Comes after `plan`; `report` keeps it and `compare` refuses runs whose facts differ. Pure.
"""

from __future__ import annotations

import dataclasses
import hashlib

import numpy as np

from keystage.loadgen.plan import Plan

BODIES_HASHED = 1000
"""Bodies are made when they are asked for; to make all of a long run again would take as long as sending."""


@dataclasses.dataclass(frozen=True, slots=True)
class PlanFacts:
    """What was asked. Two runs with equal facts sent the same requests at the same times.

    Attributes:
        source: where arrivals and lengths come from.
        rate_rps: asked, None for a trace at its own speed.
        cv: asked, None for a trace.
        seed: of everything drawn.
        duration_s: length of the schedule.
        target: kind of the requests.
        requests: how many.
        prompt_tokens: asked, over all requests.
        output_tokens: likewise.
        times_hash: of the scheduled times (float64, little-endian; BLAKE2b, 16 bytes, as the others).
        lengths_hash: of the asked token lengths.
        bodies_hash: of `BODIES_HASHED` bodies, evenly spaced (all, where there are no more).
        targets_hash: of which address each request goes to.
    """

    source: str
    rate_rps: float | None
    cv: float | None
    seed: int
    duration_s: float
    target: str
    requests: int
    prompt_tokens: int
    output_tokens: int
    times_hash: str
    lengths_hash: str
    bodies_hash: str
    targets_hash: str


def facts(plan: Plan, *, seed: int, target: str) -> PlanFacts:
    """Facts of a schedule."""
    count = len(plan.times_s)
    bodies = hashlib.blake2b(digest_size=16)
    for index in sorted({k * count // BODIES_HASHED for k in range(BODIES_HASHED)} if count else ()):
        bodies.update(plan.bodies[index])
    asked = ((length.prompt_tokens, length.output_tokens) for length in plan.lengths)
    sizes = np.fromiter(asked, dtype=np.dtype(("<i8", 2)), count=count)
    prompt_tokens, output_tokens = (int(total) for total in sizes.sum(axis=0))
    return PlanFacts(
        source=plan.source,
        rate_rps=plan.asked_rate_rps,
        cv=plan.asked_cv,
        seed=seed,
        duration_s=plan.duration_s,
        target=target,
        requests=count,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        times_hash=_hash(np.asarray(plan.times_s, dtype="<f8").tobytes()),
        lengths_hash=_hash(sizes.tobytes()),
        bodies_hash=bodies.hexdigest(),
        targets_hash=_hash(np.asarray(plan.targets, dtype="<i4").tobytes()),
    )


def _hash(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def differences(a: PlanFacts, b: PlanFacts) -> list[str]:
    """What differs between two plans, in words; empty if both sent the same at the same times."""
    found = []
    for field in dataclasses.fields(PlanFacts):
        left, right = getattr(a, field.name), getattr(b, field.name)
        if left != right:
            name = field.name.removesuffix("_hash")
            said = f"{name} {left!r} and {right!r}" if name == field.name else f"the {name} themselves"
            found.append(said)
    return found
