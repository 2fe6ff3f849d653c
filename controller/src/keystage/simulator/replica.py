"""One replica of a stage: where it is, what state it is in, what it works on.

Before it: `fleet` makes it and moves it from state to state. After it: `stage` and `ring_stage` give it
work. It is a record: it does nothing by itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from keystage.simulator.cluster import Gpu, Node
from keystage.simulator.tally import Source

if TYPE_CHECKING:
    from keystage.simulator.stage import Stage


class Replica:
    """One replica.

    Attributes:
        number: counts the stage's replicas from 1.
        name: `<function>-<number>`.
        stage: its stage.
        node: where it runs.
        gpus: indices of the GPUs it holds there.
        shared: the GPUs it takes turns on.
        source: where its parameters came from.
        wanted_s: when it was asked for.
        ready_s: when it is expected to be, or was, ready.
        state: `starting`, `ready`, `draining` (ready no more, finishing its batch) or `gone`.
        items: the batch it works on, None while idle.
        came_sum_s: sum of the arrival times of those items.
        service_s: compute time of the batch.
        busy_s: compute seconds so far.
        rows: items so far.
        held: sessions it holds (looping).
    """

    __slots__ = (
        "busy_s", "came_sum_s", "gpus", "held", "items", "name", "node", "number", "ready_s", "rows",
        "service_s", "shared", "source", "stage", "state", "wanted_s",
    )  # fmt: skip

    def __init__(
        self, stage: Stage, number: int, node: Node, gpus: tuple[int, ...], source: Source, wanted_s: float
    ) -> None:
        self.stage = stage
        self.number = number
        self.name = f"{stage.function}-{number}"
        self.node = node
        self.gpus = gpus
        self.shared: list[Gpu] = [node.gpus[i] for i in gpus] if stage.spec.shared else []
        self.source = source
        self.wanted_s = wanted_s
        self.ready_s = wanted_s
        self.state = "starting"
        self.items: list[int] | None = None
        self.came_sum_s = 0.0
        self.service_s = 0.0
        self.busy_s = 0.0
        self.rows = 0
        self.held = 0
