"""What a worker of a single-pass pipeline is sent for a batch. Pure; used by `single`."""

from __future__ import annotations

from keystage.router.binding import Bound
from keystage.wire import api


def message_of(bound: Bound, *, more: bool) -> api.Work | api.Fetch:
    """The batch itself for the first stage, else where it lies.

    Args:
        bound: the batch; items of a later stage have their inputs at producers.
        more: whether stages follow.
    """
    stage, last, items = bound.stage, bound.last, bound.items
    numbers, epochs = [item.number for item in items], [item.epoch for item in items]
    if stage == 0:
        shapes, payloads = [item.shape for item in items], [item.payload for item in items]
        return api.Work(0, last, numbers, epochs, items[0].dtype, shapes, payloads, more)
    refs = [item.ref for item in items if item.ref is not None]
    producers = [item.producer for item in items if item.producer is not None]
    assert len(refs) == len(producers) == len(items)
    return api.Fetch(stage, last, numbers, epochs, refs, producers, more)
