"""Background fetches: nodes load the parameters of key stages into host memory before a replica is there.

Before it: `fleet` tells which stage became a key stage, which starts read a node's disk, which nodes
failed. After it: `Parameters` has them in memory. A node fetches one stage after the other. Starts have the
disk first: a fetch waits until those under way have ended, one begun stands still while starts read, and
none is made of what a start there is loading. It chooses no stages.
"""

from __future__ import annotations

import math
from collections import deque
from heapq import heappush

from keystage.simulator.cluster import Node
from keystage.simulator.engine import OUTSIDE, Engine
from keystage.simulator.parameters import Parameters
from keystage.simulator.stage import Stage
from keystage.simulator.tally import Source


class _Desk:
    """What one node has yet to fetch; a node that failed gets a new one, so that nothing of the old lands.

    Attributes:
        wanted: stages in order.
        is_at_work: whether an event of this desk is under way.
        stall_s: seconds that starts have held the fetch under way up.
        disk_until_s: when the last start under way has read the disk.
    """

    __slots__ = ("disk_until_s", "is_at_work", "stall_s", "wanted")

    def __init__(self) -> None:
        self.wanted: deque[Stage] = deque()
        self.is_at_work = False
        self.stall_s = 0.0
        self.disk_until_s = -math.inf


class Prefetch:
    """Fetches of all nodes.

    Args:
        engine: clock and heap.
        parameters: where parameters lie.
        nodes: how many.
    """

    def __init__(self, engine: Engine, parameters: Parameters, nodes: int) -> None:
        self._engine = engine
        self._parameters = parameters
        self._desks = [_Desk() for _ in range(nodes)]

    def want(self, at_s: float, stage: Stage, node: Node) -> None:
        """A node shall fetch the parameters of a stage, after what was wanted before."""
        desk = self._desks[node.index]
        desk.wanted.append(stage)
        if not desk.is_at_work:  # begins after all that is decided at this moment
            self._come_back(at_s, node, desk)

    def forget(self, node: Node) -> None:
        """A node failed: nothing it was fetching will ever be there."""
        self._desks[node.index] = _Desk()

    def started(self, at_s: float, took_s: float, source: Source, node: Node) -> None:
        """A replica starts on a node; from disk, fetches there stand still meanwhile."""
        if source != "disk":
            return
        desk = self._desks[node.index]
        until_s = max(desk.disk_until_s, at_s + took_s)
        desk.stall_s += until_s - max(at_s, desk.disk_until_s)
        desk.disk_until_s = until_s

    def _come_back(self, at_s: float, node: Node, desk: _Desk) -> None:
        desk.is_at_work = True
        engine = self._engine
        heappush(engine.heap, (at_s, OUTSIDE, next(engine.order), self._begin, (node, desk)))

    def _begin(self, at_s: float, what: tuple[Node, _Desk]) -> None:
        """The next fetch of a node begins, unless its disk is busy."""
        node, desk = what
        desk.is_at_work = False
        if desk is not self._desks[node.index]:
            return
        source = self._parameters.fetch_source(node)
        if desk.wanted and source == "disk" and desk.disk_until_s > at_s:
            self._come_back(desk.disk_until_s, node, desk)
            return
        while desk.wanted:
            stage = desk.wanted.popleft()
            if stage.function in node.memory or _is_loading(stage, node):
                continue
            desk.is_at_work = True
            desk.stall_s = 0.0
            end_s = at_s + self._parameters.fetch_s(stage.spec, node)
            self._end_at(end_s, stage, node, desk)
            return

    def _end_at(self, end_s: float, stage: Stage, node: Node, desk: _Desk) -> None:
        engine = self._engine
        heappush(engine.heap, (end_s, OUTSIDE, next(engine.order), self._end, (stage, node, desk)))

    def _end(self, at_s: float, what: tuple[Stage, Node, _Desk]) -> None:
        """A fetch is done, if no start held it up and its node did not fail."""
        stage, node, desk = what
        if desk is not self._desks[node.index]:
            return
        stall_s, desk.stall_s = desk.stall_s, 0.0
        if stall_s > 0 and self._parameters.fetch_source(node) == "disk":
            self._end_at(at_s + stall_s, stage, node, desk)
            return
        self._parameters.keep(stage, node)
        self._begin(at_s, (node, desk))


def _is_loading(stage: Stage, node: Node) -> bool:
    return any(r.node is node and r.state == "starting" for r in stage.replicas.values())
