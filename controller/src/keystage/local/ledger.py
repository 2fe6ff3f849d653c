"""Which replicas there should be and which there are: events in, instructions out.

The supervisor tells the ledger what was asked for (deploy, scale, remove) and what happened to
processes (started, answered, exited); the ledger answers with what to do (start, terminate,
kill). Pure: time comes in with each event, nothing is read or started here, so every rule below
is tested without a process.

A replica's states: starting -> ready -> draining -> gone; failed while a crashed one waits for
its successor. Scale-down, updates and removal are two-phase: out of routing first (`draining`), told to
stop `linger_s` later, when whoever routes has seen it; one of a plain function, whose program need not
finish its work on SIGTERM, only when no gateway has requests at it any longer. Where there are several
nodes, a replica goes to the one that the controller named, else to the one that `spread` chooses.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import assert_never

import msgspec

from keystage.local.api import Deployment, FunctionRecord, Intent, Load, ReplicaRecord, role_of
from keystage.local.errors import UnknownFunction
from keystage.local.events import (
    Answered,
    CoresSet,
    Deployed,
    Event,
    Exited,
    Instruction,
    Intended,
    Kill,
    Loaded,
    Missed,
    Removed,
    Renewed,
    Scaled,
    SetCores,
    Start,
    Started,
    Terminate,
    Ticked,
)
from keystage.local.loads import Loads
from keystage.local.program import (
    TIMEOUT_S,
    Upkeep,
    check,
    check_cores,
    check_replicas,
    threads_of,
    upkeep,
    with_threads,
)
from keystage.local.replica import Replica, first_to_go
from keystage.local.spread import Places, least_used


@dataclasses.dataclass(frozen=True, slots=True)
class Bounds:
    """Time limits in seconds.

    Attributes:
        linger_s: from leaving the routing to SIGTERM; a watcher is told within milliseconds.
        drain_s: from SIGTERM to SIGKILL where the function does not say.
        healthy_s: ready for so long, and an earlier crash is forgotten.
        start_limit_s: from start to ready.
        misses: health probes missed in a row before a replica counts as hung.
        timeout_s: longest that a request may take: so long, or `drain_s` if that is more, a plain function's
            replica that has requests is let work before SIGTERM.
    """

    linger_s: float = 0.3
    drain_s: float = 60.0
    healthy_s: float = 30.0
    start_limit_s: float = 600.0
    misses: int = 3
    timeout_s: float = TIMEOUT_S


DECIDED_S = 1.0
"""Most time from a decision to the starts that follow from it; the controller decides four times a second."""


def backoff_s(restarts: int) -> float:
    """Seconds to wait before start number `restarts` in a row: 0, 0.5, 1, 2 ... 30."""
    return 0.0 if restarts <= 1 else min(30.0, 0.5 * 2.0 ** min(restarts - 2, 10))


class Ledger:
    """Desired and actual replicas of every function.

    Attributes:
        functions: records by name.
        loads: what gateways said.

    Args:
        bounds: time limits.
        nodes: names of the nodes replicas may run on.
    """

    def __init__(self, bounds: Bounds, nodes: Sequence[str] = ("",)) -> None:
        self.functions: dict[str, FunctionRecord] = {}
        self.loads = Loads()
        self._bounds = bounds
        self._replicas: dict[str, Replica] = {}
        self._upkeep: dict[str, Upkeep] = {}
        self._numbers: dict[str, int] = {}
        self._nodes = tuple(nodes)
        self._places: dict[str, Places] = {}
        """What the controller last said of a function's places."""

    def restore(self, record: FunctionRecord) -> None:
        """Takes a record from an earlier run; the next event starts its replicas.

        Raises:
            BadDeployment: it can never run here.
        """
        check(record.deployment)
        self._upkeep[record.deployment.service] = upkeep(record.deployment)
        self.functions[record.deployment.service] = msgspec.structs.replace(record, wake=False)

    def kept(self) -> tuple[list[Replica], dict[str, int]]:
        """Replicas and numbers, for `resume` in another process image."""
        return list(self._replicas.values()), dict(self._numbers)

    def resume(self, replicas: Iterable[Replica], numbers: Mapping[str, int]) -> None:
        """Takes what `kept` gave, after `restore` of all records."""
        self._replicas = {replica.record.replica: replica for replica in replicas}
        self._numbers = dict(numbers)

    def replicas(self) -> list[ReplicaRecord]:
        """All replicas, in order of creation per function."""
        return [r.record for r in self._replicas.values()]

    def handle(self, event: Event, at_s: float) -> list[Instruction]:  # noqa: C901  (one case an event)
        """Takes one event and says what to do.

        Args:
            event: what happened.
            at_s: when, in Unix seconds.

        Raises:
            BadDeployment: a deployment or replica number that is out of bounds.
            UnknownFunction: the event names no deployed function.
        """
        match event:
            case Deployed(deployment):
                self._deploy(deployment, at_s)
            case Renewed(name):
                self.functions[name] = _next_generation(self._get(name))
            case Removed(name):
                self._get(name)
                del self.functions[name], self._upkeep[name]
                self._places.pop(name, None)
            case Intended(name, intent):
                self._intend(name, intent)
            case Scaled(name, replicas, sites, victims, decided_at_s):
                check_replicas(name, replicas)
                self.functions[name] = msgspec.structs.replace(self._get(name), desired=replicas)
                self._places[name] = Places(sites, victims, decided_at_s)
            case Loaded(name, load):
                return self._hear(name, load, at_s)
            case CoresSet(name, cores):
                return list(self._set_cores(name, cores))
            case Started(replica, pid, address, via, source, note):
                self._replicas[replica].set(pid=pid, address=address, via=via, source=source, note=note)
                return [*self._give_cores(replica), *self._reconcile(at_s)]
            case Answered(replica):
                return [*self._answered(replica, at_s), *self._reconcile(at_s)]
            case Missed(replica, is_silent):
                return list(self._missed(replica, is_excused=is_silent and self.is_at_work(replica, at_s)))
            case Exited(replica, reason):
                self._exited(replica, reason, at_s)
            case Ticked():
                self.loads.keep_only(self._is_there)
                return [*self._overdue(at_s), *self._reconcile(at_s)]
            case _:
                assert_never(event)
        return list(self._reconcile(at_s))

    def is_at_work(self, name: str, at_s: float) -> bool:
        """Whether a plain function's replica has requests, as far as gateways said."""
        replica = self._replicas.get(name)
        if replica is None or not replica.is_plain:
            return False
        return self.loads.is_at_work(replica.record.function, name, at_s)

    def _hear(self, name: str, load: Load, at_s: float) -> list[Instruction]:
        if not self._is_there(name):
            self._get(name)
        self.loads.hear(name, load, at_s)
        return []

    def _is_there(self, name: str) -> bool:
        """Deployed, or removed and still draining."""
        return name in self.functions or any(r.record.function == name for r in self._replicas.values())

    def _get(self, name: str) -> FunctionRecord:
        try:
            return self.functions[name]
        except KeyError:
            raise UnknownFunction(f"function {name} is not deployed") from None

    def _deploy(self, deployment: Deployment, at_s: float) -> None:
        check(deployment)
        name = deployment.service
        old = self.functions.get(name)
        if old is None:
            self.functions[name] = FunctionRecord(deployment=deployment, created_at_s=at_s)
        else:
            self.functions[name] = msgspec.structs.replace(
                old, deployment=deployment, generation=old.generation + 1, cores=None
            )
        self._upkeep[name] = upkeep(deployment)

    def _intend(self, name: str, intent: Intent) -> None:
        record = self._get(name)
        if not isinstance(intent.override, msgspec.UnsetType):
            if intent.override is not None:
                check_replicas(name, intent.override.replicas)
            record = msgspec.structs.replace(record, override=intent.override)
        if not isinstance(intent.wake, msgspec.UnsetType):
            record = msgspec.structs.replace(record, wake=intent.wake)
        self.functions[name] = record

    def _set_cores(self, name: str, cores: float) -> Iterator[Instruction]:
        record = self._get(name)
        check_cores(record.deployment, cores)
        self.functions[name] = msgspec.structs.replace(record, cores=cores)
        for replica in list(self._replicas.values()):
            if replica.record.function == name and replica.record.pid:
                yield from self._give_cores(replica.record.replica)

    def _give_cores(self, name: str) -> Iterator[Instruction]:
        """Cores of one replica, where the controller has set any for its function as it is deployed now."""
        replica = self._replicas[name]
        record = self.functions.get(replica.record.function)
        if record is None or record.cores is None or replica.record.generation != record.generation:
            return
        if replica.state in ("starting", "ready"):
            yield SetCores(name, record.cores, tell=replica.state == "ready")

    def _answered(self, name: str, at_s: float) -> Iterator[Instruction]:
        replica = self._replicas.get(name)
        if replica is None:
            return
        replica.misses = 0
        if replica.state == "starting":
            replica.set(state="ready", ready_at_s=at_s)
            yield from self._give_cores(name)  # it answers only now
            record = self.functions.get(replica.record.function)
            if record is not None and record.wake:
                self.functions[replica.record.function] = msgspec.structs.replace(record, wake=False)

    def _missed(self, name: str, *, is_excused: bool) -> Iterator[Instruction]:
        replica = self._replicas.get(name)
        if replica is None or replica.state != "ready" or is_excused:
            return
        replica.misses += 1
        if replica.misses == self._bounds.misses:
            replica.fault = f"did not answer {replica.misses} health probes in a row"
            yield Kill(name)

    def _exited(self, name: str, reason: str, at_s: float) -> None:
        replica = self._replicas[name]
        record = self.functions.get(replica.record.function)
        stale = record is None or replica.record.generation != record.generation
        if replica.state == "draining" or stale:
            del self._replicas[name]
            return
        healthy = replica.state == "ready" and at_s - replica.record.ready_at_s >= self._bounds.healthy_s
        restarts = 1 if healthy else replica.record.restarts + 1
        replica.set(state="failed", restarts=restarts, reason=replica.fault or reason)
        replica.retry_at_s = at_s + backoff_s(restarts)

    def _overdue(self, at_s: float) -> Iterator[Instruction]:
        for name, replica in self._replicas.items():
            if replica.state == "starting" and not replica.fault:
                if at_s - replica.record.started_at_s >= self._bounds.start_limit_s:
                    replica.fault = f"was not ready {self._bounds.start_limit_s:g} s after its start"
                    yield Kill(name)
            elif replica.state == "draining":
                since = at_s - replica.drain_since_s
                if not replica.terminated:
                    if since >= self._bounds.linger_s and not self._is_held(replica, at_s):
                        replica.terminated = True
                        replica.drain_since_s = at_s
                        yield Terminate(name)
                elif since >= replica.drain_s and not replica.fault:
                    replica.fault = f"did not finish within {replica.drain_s:g} s"
                    yield Kill(name)

    def _is_held(self, replica: Replica, at_s: float) -> bool:
        """Whether a draining replica is let work before it is told to stop."""
        left_s = replica.drain_since_s
        if not replica.is_plain or at_s - left_s >= max(replica.drain_s, self._bounds.timeout_s):
            return False
        return self.loads.may_have_work(replica.record.function, replica.record.replica, left_s, at_s)

    def _reconcile(self, at_s: float) -> Iterator[Instruction]:
        owned: dict[str, list[Replica]] = {name: [] for name in self.functions}
        for replica in list(self._replicas.values()):
            if replica.record.function in owned:
                owned[replica.record.function].append(replica)
            elif replica.state != "draining":
                yield from self._drain(replica, at_s)
        for name, replicas in owned.items():
            yield from self._reconcile_function(self.functions[name], replicas, at_s)

    def _reconcile_function(
        self, record: FunctionRecord, replicas: list[Replica], at_s: float
    ) -> Iterator[Instruction]:
        upkeep_ = self._upkeep[record.deployment.service]
        wanted = upkeep_.initial if record.desired is None else record.desired
        if upkeep_.exclusive:
            wanted = min(wanted, 1)
        live = [r for r in replicas if r.state != "draining"]
        new = [r for r in live if r.record.generation == record.generation]
        old = [r for r in live if r.record.generation != record.generation]

        places = self._places.get(record.deployment.service, Places())
        for victim in first_to_go(new, len(new) - wanted, places.victims):
            new.remove(victim)
            yield from self._drain(victim, at_s)
        # An old replica serves until a new one is ready in its place.
        spare = 0 if upkeep_.exclusive else wanted - sum(r.state == "ready" for r in new)
        serving = [r for r in old if r.state == "ready"]
        leaving = [r for r in old if r.state != "ready"] + first_to_go(serving, len(serving) - max(0, spare))
        for victim in leaving:
            yield from self._drain(victim, at_s)

        if upkeep_.exclusive and (old or len(live) < len(replicas)):
            return
        for replica in new:
            if replica.state == "failed" and at_s >= replica.retry_at_s:
                del self._replicas[replica.record.replica]
                yield self._start(record, at_s, replica.record.restarts)
        for _ in range(wanted - len(new)):
            yield self._start(record, at_s)

    def _start(self, record: FunctionRecord, at_s: float, restarts: int = 0) -> Start:
        function = record.deployment.service
        node, wanted_at_s = self._place(function, at_s, is_restart=restarts > 0)
        number = self._numbers.get(function, 0)
        self._numbers[function] = number + 1
        name = f"{function}-{number}"
        entry = ReplicaRecord(
            replica=name,
            function=function,
            generation=record.generation,
            state="starting",
            pid=0,
            address="",
            started_at_s=at_s,
            restarts=restarts,
            node=node,
        )
        own = self._upkeep[function].drain_s
        deployment = record.deployment
        drain_s = self._bounds.drain_s if own is None else own
        self._replicas[name] = Replica(entry, number, drain_s, role_of(deployment) == "function")
        if record.cores is not None:
            deployment = with_threads(deployment, threads_of(record.cores))
        return Start(name, deployment, node, wanted_at_s)

    def _place(self, function: str, at_s: float, *, is_restart: bool) -> tuple[str, float]:
        """Where a new replica goes, and since when it is wanted."""
        places = self._places.get(function, Places())
        # What was decided is carried out at once: a replica that is started later has another cause.
        is_decided = not is_restart and 0 <= at_s - places.decided_at_s <= DECIDED_S
        wanted_at_s = places.decided_at_s if is_decided else at_s
        node, self._places[function] = places.next_site()
        if self._upkeep[function].exclusive:
            return self._nodes[0], wanted_at_s  # a router's address names its node
        if node in self._nodes:
            return node, wanted_at_s
        running = [(r.record.function, r.record.node) for r in self._replicas.values()]
        return least_used(self._nodes, running, function), wanted_at_s

    def _drain(self, replica: Replica, at_s: float) -> Iterator[Instruction]:
        if replica.state == "failed":
            del self._replicas[replica.record.replica]
            return
        served = replica.state == "ready"
        replica.set(state="draining")
        replica.drain_since_s = at_s
        if not served:
            replica.terminated = True
            yield Terminate(replica.record.replica)


def _next_generation(record: FunctionRecord) -> FunctionRecord:
    return msgspec.structs.replace(record, generation=record.generation + 1)
