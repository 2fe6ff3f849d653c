"""Records of the controller over small worlds, for tests of what operators are told."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
from support.controller_world import FluidWorld

from keystage.controller.decisions import Record
from keystage.controller.domain.snapshot import Snapshot
from keystage.controller.domain.state import PolicyState
from keystage.controller.policy.decide import decide
from keystage.controller.policy.settings import PolicySettings


def ticks(world: FluidWorld, rates_rps: Iterable[float]) -> Iterator[Record]:
    """A record for each tick of a fluid world at these rates."""
    for rate_rps in rates_rps:
        before = world.state
        decision = world.step(rate_rps)
        yield Record(settings=world.settings, before=before, snapshot=world.seen, decision=decision)


def decided(snapshot: Snapshot, before: PolicyState | None = None) -> Record:
    """The record of one look."""
    settings, state = PolicySettings(), before or PolicyState()
    return Record(
        settings=settings, before=state, snapshot=snapshot, decision=decide(settings, snapshot, state)
    )


def changed(record: Record, **fields: Any) -> Record:
    """The same record with another snapshot."""
    return msgspec.structs.replace(record, snapshot=msgspec.structs.replace(record.snapshot, **fields))
