"""A cluster of plain values that plans are carried out on: for tests of the planner alone.

`Toy` holds pods as `scene.Pod`, carries operations out at once, and moves pods forward as a test asks.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable
from typing import Any

from keystage.kubernetes.manifests import Settings, shape_hash, template_hash
from keystage.kubernetes.operations import (
    Activate,
    Apply,
    Create,
    Delete,
    Leave,
    Note,
    Operation,
    Park,
    RemoveWorkload,
)
from keystage.kubernetes.plan import plan
from keystage.kubernetes.scene import Function, Node, Pod, Scene, Workload
from keystage.local.api import Deployment

SETTINGS = Settings(namespace="keystage", function_namespace="keystage-fn")


def stage_function(index: int = 0, *, desired: int = 1, image: str = "a", **changes: Any) -> Function:
    """Stage `index` of pipeline `llm`."""
    env = {
        "KEYSTAGE_ROLE": "stage",
        "KEYSTAGE_PIPELINE": "llm",
        "KEYSTAGE_BUNDLE": "b",
        "KEYSTAGE_STAGES": str(index),
    }
    deployment = Deployment(service=f"llm-stage-{index}", image=image, envVars=env)
    gib = changes.get("gpu_gib", 0)
    return Function(
        name=deployment.service,
        uid=f"uid-{deployment.service}",
        deployment=deployment,
        role="stage",
        template=template_hash(deployment, SETTINGS),
        shape=shape_hash(deployment, SETTINGS, gib),
        desired=desired,
        **changes,
    )


def router_function() -> Function:
    """The router of pipeline `llm`."""
    env = {"KEYSTAGE_ROLE": "router", "KEYSTAGE_PIPELINE": "llm", "KEYSTAGE_BUNDLE": "b"}
    deployment = Deployment(service="llm", image="r", envVars=env)
    return Function(
        name="llm",
        uid="uid-llm",
        deployment=deployment,
        role="router",
        template=template_hash(deployment, SETTINGS),
    )


class Toy:
    """The cluster.

    Args:
        functions: what is deployed.
        nodes: names of nodes.
        parked: size of a pool.
    """

    def __init__(
        self, functions: Iterable[Function] = (), nodes: Iterable[str] = ("n1", "n2"), parked: int = 0
    ) -> None:
        self.at_s = 1000.0
        self.functions = {function.name: function for function in functions}
        self.nodes = {name: Node(name=name) for name in nodes}
        self.pods: dict[str, Pod] = {}
        self.workloads: dict[str, Workload] = {}
        self.parked = parked
        self.in_use: set[str] = set()
        self._numbers = itertools.count()

    def scene(self) -> Scene:
        """As it is now."""
        return Scene(
            at_s=self.at_s,
            functions=self.functions,
            pods=self.pods,
            nodes=self.nodes,
            workloads=self.workloads,
            in_use=frozenset(self.in_use),
            parked_per_pipeline=self.parked,
        )

    def plan(self) -> list[Operation]:
        """What is to be done."""
        return plan(self.scene(), lambda prefix: f"{prefix}-{next(self._numbers)}")

    def turn(self) -> list[Operation]:
        """Plans, and does it."""
        operations = self.plan()
        for operation in operations:
            self.do(operation)
        return operations

    def do(self, operation: Operation) -> None:
        """Carries one operation out."""
        match operation:
            case Create(function, name, place):
                of = self.functions[function]
                self.pods[name] = Pod(
                    name=name,
                    uid=f"uid-{name}",
                    function=function,
                    template=of.template,
                    pipeline=of.pipeline,
                    owner=of.uid,
                    site=place.node if place.is_required else "",
                    gpu=place.gpu if of.gpu_gib else None,
                    created_s=self.at_s,
                )
            case Park(function, name, pipeline, shape, place):
                self.pods[name] = Pod(
                    name=name,
                    uid=f"uid-{name}",
                    pool=shape,
                    pipeline=pipeline,
                    owner=self.functions[pipeline].uid,
                    gpu=place.gpu if self.functions[function].gpu_gib else None,
                    created_s=self.at_s,
                )
            case Activate(function, name, _, is_resumed):
                if not is_resumed:
                    of = self.functions[function]
                    self.change(
                        name,
                        function=function,
                        template=of.template,
                        owner=of.uid,
                        activated_s=self.at_s,
                        state="starting",
                    )
            case Leave(name, uid, _):
                assert self.pods[name].uid == uid
                self.change(name, state="draining", leaving_s=self.at_s)
            case Delete(name, uid):
                assert self.pods[name].uid == uid
                if self.pods[name].node and not operation.is_gone and self.pods[name].state != "failed":
                    self.change(name, state="draining", is_deleted=True)
                else:
                    del self.pods[name]
            case Apply(name):
                of = self.functions[name]
                self.workloads[name] = Workload(
                    name=name, uid=f"d-{name}", owner=of.uid, template=of.template, replicas=of.desired
                )
            case RemoveWorkload(name):
                del self.workloads[name]
            case Note():
                pass

    def change(self, name: str, **changes: Any) -> None:
        """Another state of one pod."""
        self.pods[name] = dataclasses.replace(self.pods[name], **changes)

    def function(self, name: str, **changes: Any) -> None:
        """Another wish, or another deployment."""
        self.functions[name] = dataclasses.replace(self.functions[name], **changes)

    def schedule(self, name: str, node: str = "") -> None:
        """The scheduler binds a pod."""
        pod = self.pods[name]
        self.change(
            name, node=pod.site or node or next(iter(self.nodes)), scheduled_s=self.at_s, unschedulable_s=0.0
        )

    def ready(self, *names: str) -> None:
        """Pods come to serve; without names all that start."""
        for name in names or [n for n, p in self.pods.items() if p.state == "starting"]:
            pod = self.pods[name]
            if not pod.node:
                self.schedule(name)
            is_told = bool(pod.pool and pod.function)
            self.change(name, state="ready", running_s=self.at_s, is_serving=is_told)

    def settle(self, turns: int = 20) -> None:
        """Turns, with everything ready at once and the clock running, until nothing is to be done."""
        for _ in range(turns):
            self.at_s += 1.0
            self.turn()
            self.ready()
            self.pods = {name: pod for name, pod in self.pods.items() if not pod.is_deleted}

    def of(self, function: str = "llm-stage-0") -> list[Pod]:
        """Pods of a function that stay."""
        return [p for p in self.pods.values() if p.function == function and p.state in ("starting", "ready")]

    def pool(self) -> list[Pod]:
        """Parked pods that stay."""
        return [p for p in self.pods.values() if p.is_parked and p.state in ("starting", "ready")]
