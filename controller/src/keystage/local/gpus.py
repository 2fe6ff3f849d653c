"""Which GPU of this machine a new replica gets, where its function asks for one without saying which.

Asked by `local.supervisor` for stages whose `KEYSTAGE_DEVICE` is `cuda`; `cuda:N` is left as it is. Fewest
replicas of the function first, since two of them on one GPU take turns; then the GPU that was promised; then
fewest replicas of all. The promise, told to each replica as `KEYSTAGE_NEXT_DEVICE`, is where the function's
next one goes: there the node's KeysManager keeps its standby. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

DEVICE = "KEYSTAGE_DEVICE"
NEXT_DEVICE = "KEYSTAGE_NEXT_DEVICE"
ANY_GPU = "cuda"


class Gpus:
    """GPUs by replica.

    Args:
        count: how many replicas see; with one at most nothing is chosen.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._given: dict[str, tuple[str, int]] = {}
        self._promised: dict[str, int] = {}

    def assign(self, replica: str, function: str, device: str, living: Collection[str]) -> dict[str, str]:
        """Chooses a GPU.

        Args:
            replica: the new one.
            function: whose it is.
            device: what its function asks for.
            living: replicas there are; GPUs of others are free again.

        Returns:
            Variables of its environment, none where nothing is to be chosen.
        """
        if self._count < 2 or device != ANY_GPU:
            return {}
        for gone in self._given.keys() - set(living):
            del self._given[gone]
        gpu = self._next(function)
        self._given[replica] = function, gpu
        self._promised[function] = self._next(function, promised=-1)
        return {DEVICE: f"cuda:{gpu}", NEXT_DEVICE: f"cuda:{self._promised[function]}"}

    def _next(self, function: str, promised: int | None = None) -> int:
        if promised is None:
            promised = self._promised.get(function, -1)
        own = Counter(gpu for name, gpu in self._given.values() if name == function)
        of_all = Counter(gpu for _, gpu in self._given.values())
        return min(range(self._count), key=lambda gpu: (own[gpu], gpu != promised, of_all[gpu], gpu))
