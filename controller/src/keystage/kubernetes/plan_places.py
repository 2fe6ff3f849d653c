"""Where a missing replica comes from: a parked pod, or a new one, and on which node and GPU. Pure.

Before it: `plan` knows how many are missing. After it: operations. One `Supply` lives for one plan, so that
no parked pod and no GiB is given out twice. A new pod keeps to the site that was decided while its node
takes pods, else the scheduler chooses; a parked pod is taken wherever it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from keystage.controller.domain.decision import Site
from keystage.kubernetes.manifests_pod import Place
from keystage.kubernetes.scene import Function, Pod, Scene


class Supply:
    """Parked pods and GPU memory that this plan may still give out.

    Args:
        scene: what there is.
    """

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._parked = [pod for pod in scene.pods.values() if _is_usable(scene, pod)]
        self._gib = {
            (node.name, index): gib
            for node in scene.nodes.values()
            if is_open(scene, node.name)
            for index, gib in node.gpu_gib.items()
        }

    def take_parked_at(self, function: Function, site: Site) -> Pod | None:
        """A parked pod of a function's shape at its site that can be activated now."""
        fit = (p for p in self._parked if p.pool == function.shape and p.state == "ready" and _is_at(p, site))
        chosen = min(fit, key=lambda p: (p.created_s, p.name), default=None)
        if chosen is not None:
            self._parked.remove(chosen)
        return chosen

    def take_parked(self, function: Function, site: Site | None, mine: Iterable[Pod]) -> Pod | None:
        """A parked pod of a function's shape, wherever it is: it serves seconds before any new pod does.

        Those that can be activated now come first, then those that will be soon; of these the one at the
        site, else one on a node with the fewest replicas of this function.

        Args:
            function: the stage.
            site: where the decision wants the replica, None: anywhere.
            mine: its other replicas.
        """
        there = Counter(pod.node for pod in mine)
        fit = [pod for pod in self._parked if pod.pool == function.shape]
        if not fit:
            return None
        chosen = min(
            fit, key=lambda p: (p.state != "ready", not _is_at(p, site), there[p.node], p.created_s, p.name)
        )
        self._parked.remove(chosen)
        return chosen

    def place(self, function: Function, site: Site | None) -> Place:
        """Where a new pod goes.

        Args:
            function: the stage.
            site: as decided, None: anywhere.
        """
        if site is not None and not is_open(self._scene, site.node):
            site = None
        if not function.gpu_gib:
            return Place(site.node) if site is not None else Place()
        if site is not None and site.gpus:
            self._use(site.node, site.gpus[0], function.gpu_gib)
            return Place(site.node, site.gpus[0])
        return self._any_gpu(function.gpu_gib, site.node if site is not None else "")

    def elsewhere(self, function: Function, pod: Pod) -> Place:
        """Where a pod goes that its site had no room for: there if it can be, else anywhere."""
        if function.gpu_gib:
            return self._any_gpu(function.gpu_gib, "")
        return Place(pod.site, is_required=False) if is_open(self._scene, pod.site) else Place()

    def _any_gpu(self, gib: int, node: str) -> Place:
        """The GPU with most free memory; without any that fits the pod waits, and says so."""
        fit = [key for key, free in self._gib.items() if free >= gib and node in ("", key[0])]
        if not fit:
            return Place(node, 0)
        chosen = min(fit, key=lambda key: (-self._gib[key], key))
        self._use(*chosen, gib)
        return Place(*chosen)

    def _use(self, node: str, index: int, gib: int) -> None:
        if (node, index) in self._gib:
            self._gib[node, index] -= gib


def is_open(scene: Scene, node: str) -> bool:
    """Whether new pods may come to a node."""
    known = scene.nodes.get(node)
    return known is not None and known.is_open and not known.is_lost


def _is_usable(scene: Scene, pod: Pod) -> bool:
    return (
        pod.is_parked
        and bool(pod.uid)
        and pod.state in ("ready", "starting")
        and pod.name not in scene.busy
        and is_open(scene, pod.node)
    )


def _is_at(pod: Pod, site: Site | None) -> bool:
    if site is None:
        return True
    return pod.node == site.node and (not site.gpus or pod.gpu == site.gpus[0])
