"""What the policy decided, until the cluster shows it: the platform writes, the reconciler reads.

Before it: `KubernetesPlatform.apply`. After it: `reconciler` writes `desired` and `cores` into each
function's status before it acts on them, so a new leader goes on from there; sites and victims are lost
with the leader, and its successor decides anew. Thread-safe; every change calls back at once, because a
request may be waiting for it. It must not talk to the cluster.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence

from keystage.controller.domain.decision import Site


@dataclasses.dataclass(frozen=True, slots=True)
class Wish:
    """What shall be of one function.

    Attributes:
        replicas: how many, None: nothing was decided here.
        sites: where the next new ones go, in order; a parked pod elsewhere is taken instead.
        victims: which go first when there are too many.
        decided_at_s: Unix seconds of that decision.
        cores: of each replica, None: nothing was decided here.
        is_lifting: a person's wish has expired and is to be taken back.
        is_awake: the function that was to be woken serves.
        uid: of the custom resource that it is about, empty before the reconciler bound it.
    """

    replicas: int | None = None
    sites: tuple[Site, ...] = ()
    victims: tuple[str, ...] = ()
    decided_at_s: float = 0.0
    cores: float | None = None
    is_lifting: bool = False
    is_awake: bool = False
    uid: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Wished:
    """Everything that was decided, at one moment.

    Attributes:
        functions: wishes by function.
        key_stages: stage indices by pipeline, the most important first.
    """

    functions: Mapping[str, Wish]
    key_stages: Mapping[str, tuple[int, ...]]


class Wishes:
    """The wishes of one leader.

    Args:
        changed: called after every change, in the caller's thread; it must not block.
    """

    def __init__(self, changed: Callable[[], None] = lambda: None) -> None:
        self._lock = threading.Lock()
        self._wishes: dict[str, Wish] = {}
        self._key_stages: dict[str, tuple[int, ...]] = {}
        self._changed = changed

    def on_change(self, changed: Callable[[], None]) -> None:
        """Replaces what is called after a change."""
        self._changed = changed

    def set_replicas(
        self,
        function: str,
        replicas: int,
        sites: Sequence[Site] = (),
        victims: Sequence[str] = (),
        decided_at_s: float = 0.0,
    ) -> None:
        """A function shall have so many replicas; what was said of its sites and victims is replaced."""
        self._set(
            function,
            replicas=replicas,
            sites=tuple(sites),
            victims=tuple(victims),
            decided_at_s=decided_at_s,
        )

    def set_cores(self, function: str, cores: float) -> None:
        """Every replica of a function shall have so many cores."""
        self._set(function, cores=cores)

    def lift_override(self, function: str) -> None:
        """A person's wish shall be taken back."""
        self._set(function, is_lifting=True)

    def clear_wake(self, function: str) -> None:
        """The annotation that asks for a first replica shall go."""
        self._set(function, is_awake=True)

    def key_stages(self, pipeline: str, stages: Sequence[int]) -> None:
        """Replaces a pipeline's list of key stages."""
        with self._lock:
            if self._key_stages.get(pipeline) == tuple(stages):
                return
            self._key_stages[pipeline] = tuple(stages)
        self._changed()

    def read(self) -> Wished:
        """Everything that was decided."""
        with self._lock:
            return Wished(dict(self._wishes), dict(self._key_stages))

    def use_sites(self, function: str, count: int) -> None:
        """The first `count` sites are used up, wherever their replicas are; later ones get the next."""
        with self._lock:
            wish = self._wishes.get(function)
            if wish is not None and count:
                self._wishes[function] = dataclasses.replace(wish, sites=wish.sites[count:])

    def done(self, function: str, *, lifted: bool = False, awake: bool = False) -> None:
        """A wish about a person's wish or a wake was carried out."""
        with self._lock:
            wish = self._wishes.get(function)
            if wish is not None:
                self._wishes[function] = dataclasses.replace(
                    wish,
                    is_lifting=wish.is_lifting and not lifted,
                    is_awake=wish.is_awake and not awake,
                )

    def forget(self, function: str, *, cores: bool = False) -> None:
        """Drops what was decided of a function, or its cores alone: it was redeployed with others."""
        with self._lock:
            wish = self._wishes.get(function)
            if wish is not None and cores:
                self._wishes[function] = dataclasses.replace(wish, cores=None)
            else:
                self._wishes.pop(function, None)

    def bind(self, uids: Mapping[str, str]) -> None:
        """Drops wishes about functions that are gone, or were removed and deployed anew under their name.

        Args:
            uids: the custom resources that there are, by name.
        """
        with self._lock:
            kept: dict[str, Wish] = {}
            for name, wish in self._wishes.items():
                uid = uids.get(name)
                if uid is not None and wish.uid in ("", uid):
                    kept[name] = dataclasses.replace(wish, uid=uid)
            self._wishes = kept

    def _set(self, function: str, **changes: object) -> None:
        with self._lock:
            old = self._wishes.get(function, Wish())
            new = dataclasses.replace(old, **changes)  # type: ignore[arg-type]  # fields of Wish
            if new == old:
                return
            self._wishes[function] = new
        self._changed()
