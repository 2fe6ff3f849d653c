"""Where parameters lie, and how long a replica takes to start from there.

Before it: the world's `LoadSpec` and the state of nodes. After it: `fleet` starts replicas, `view` tells
start times. Sources in order: a GPU of the same node that serves the stage, host memory, disk, remote.
"""

from __future__ import annotations

from keystage.simulator.api import LoadSpec, StageSpec
from keystage.simulator.cluster import Node
from keystage.simulator.stage import Stage
from keystage.simulator.tally import SOURCES, Source


class Parameters:
    """Sources of parameters.

    Args:
        load: rates and holders.
        has_nodes: whether there are nodes at all.
    """

    def __init__(self, load: LoadSpec, has_nodes: bool) -> None:
        self._load = load
        self._has_nodes = has_nodes
        self._bps: dict[Source, float] = {
            "gpu": load.gpu_bps,
            "memory": load.memory_bps,
            "disk": load.disk_bps,
            "remote": load.remote_bps,
        }

    @property
    def is_prewarming(self) -> bool:
        """Whether nodes fetch the parameters of key stages before a replica is there."""
        return self._load.holders in ("key-stages", "ran") and self._load.prewarm

    def is_kept(self, is_key: bool) -> bool:
        """Whether a node where a stage serves keeps its parameters."""
        return is_key or self._load.holders == "ran"

    def source(self, stage: Stage, node: Node) -> Source:
        """Where a replica on a node takes its parameters from."""
        load = self._load
        is_on_gpu = (
            load.gpu_bps > 0
            and stage.spec.gpus > 0
            and self._has_nodes
            and any(r.node is node and r.state == "ready" for r in stage.replicas.values())
        )
        has: dict[Source, bool] = {
            "gpu": is_on_gpu,
            "memory": load.memory_bps > 0 and (load.holders == "all" or stage.function in node.memory),
            "disk": self.fetch_source(node) == "disk",
            "remote": True,
        }
        return next(source for source in SOURCES if has[source])

    def fetch_source(self, node: Node) -> Source:
        """Where a node gets parameters from that lie in none of its memories."""
        return "disk" if self._load.disk_bps > 0 and node.spec.disk else "remote"

    def fetch_s(self, spec: StageSpec, node: Node) -> float:
        """Seconds in which a node fetches the parameters of a stage into its host memory."""
        return self.start_s(spec, self.fetch_source(node)) - self._load.fixed_s

    def start_s(self, spec: StageSpec, source: Source) -> float:
        """Seconds from wanted to ready, without spread; what has no rate takes no time."""
        bps = self._bps[source]
        return self._load.fixed_s + (spec.parameter_bytes / bps if bps > 0 else 0.0)

    def keep(self, stage: Stage, node: Node) -> None:
        """A node keeps the parameters of a stage that serves or starts there, or was fetched ahead."""
        if self._load.holders in ("key-stages", "ran"):
            node.keep(stage.function, stage.spec.parameter_bytes)
