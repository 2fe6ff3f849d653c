"""Who held work when it was hit, by the event logs of routers (`KEYSTAGE_EVENTS`). Pure but for reading.

Before it: routers wrote `route`, `start`, `move`, `release`, `lost` while the run went on. After it: `report`
counts a fault as one in mid-request when the log says that sessions were held then: by the worker that was
hit, or by anybody, for parts that hold none themselves. A router's death ends all it had.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True)
class Hit:
    """A fault that was carried out.

    Attributes:
        kind: name of its class.
        part: whom it hit: `worker`, `router`, ...
        victims: names; of a cut the workers that are on another node than the router.
        at_s: when, Unix seconds.
        until_s: when the stopped process went on, the link was mended; `at_s` for a kill.
        note: anything to be told: packets dropped, why it was not done.
    """

    kind: str
    part: str
    victims: tuple[str, ...]
    at_s: float
    until_s: float
    note: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """What the log says of a fault.

    Attributes:
        held: sessions held when it struck: by the victims, for workers, else by all workers.
        noticed_s: seconds until the router wrote that the victim is lost, None: it did not in time.
        lost_as: the router's word for it.
    """

    held: int
    noticed_s: float | None = None
    lost_as: str = ""


HOLDING = ("worker", "workers", "nodes")
"""Parts whose victims are workers: one that was hit, or those behind a cut link."""
NOTICED_S = 20.0
"""A loss later than this belongs to another fault."""


def read_events(folder: Path, pipeline: str) -> list[dict[str, Any]]:
    """All lines of the routers' logs, in order of time; a line that a death cut off is left out."""
    lines = []
    for file in sorted(folder.glob(f"{pipeline}-*.jsonl")):
        if file.stem.removeprefix(f"{pipeline}-").isdigit():
            for line in file.read_bytes().split(b"\n"):
                try:
                    found = json.loads(line)
                except ValueError:
                    continue
                if isinstance(found, dict) and "t" in found:
                    lines.append(found)
    return sorted(lines, key=lambda line: float(line["t"]))


class Ledger:
    """Sessions by worker, as the events tell."""

    def __init__(self) -> None:
        self._paths: dict[int, list[str]] = {}
        self._held: dict[int, tuple[int, set[str]]] = {}
        """Session: epoch, and its workers."""

    def apply(self, event: Mapping[str, Any]) -> None:
        """Takes one event."""
        match event["event"]:
            case "route":
                self._paths[event["path"]] = list(event["replicas"])
            case "start" | "move":
                told = zip(event["sessions"], event["epochs"], event["paths"], strict=True)
                for session, epoch, path in told:
                    self._held[session] = (epoch, set(self._paths.get(path, [event["replica"]])))
            case "release":
                for session, epoch in zip(event["sessions"], event["epochs"], strict=True):
                    self._release(session, epoch, event["replica"])
            case "lost":
                for session, (epoch, _) in list(self._held.items()):
                    self._release(session, epoch, event["replica"])
            case _:
                pass

    def forget(self) -> None:
        """The router is dead, and what it had with it."""
        self._held.clear()

    def held(self, replicas: Sequence[str] = ()) -> int:
        """Sessions held by these workers, by any without names."""
        if not replicas:
            return len(self._held)
        wanted = set(replicas)
        return sum(bool(wanted & workers) for _, workers in self._held.values())

    def _release(self, session: int, epoch: int, replica: str) -> None:
        if session in self._held:
            known, workers = self._held[session]
            if epoch >= known:
                workers.discard(replica)
            if not workers:
                del self._held[session]


def prove(events: Iterable[Mapping[str, Any]], hits: Sequence[Hit]) -> list[Found]:
    """Says of each fault who held what.

    Args:
        events: in order of time.
        hits: in any order.
    """
    order = sorted(range(len(hits)), key=lambda i: hits[i].at_s)
    found: list[Found] = [Found(0)] * len(hits)
    lost: dict[str, list[tuple[float, str]]] = {}
    ledger, at = Ledger(), 0
    for event in [*events, {"t": float("inf"), "event": "end"}]:
        while at < len(order) and hits[order[at]].at_s <= event["t"]:
            hit = hits[order[at]]
            found[order[at]] = Found(ledger.held(hit.victims if hit.part in HOLDING else ()))
            if hit.part == "router" and hit.kind.startswith("kill"):
                ledger.forget()
            at += 1
        ledger.apply(event)
        if event["event"] == "lost":
            lost.setdefault(str(event["replica"]), []).append((float(event["t"]), str(event.get("why", ""))))
    for number, hit in enumerate(hits):
        for name in hit.victims:
            for at_s, why in lost.get(name, []):
                if hit.at_s <= at_s <= hit.until_s + NOTICED_S and found[number].noticed_s is None:
                    found[number] = dataclasses.replace(found[number], noticed_s=at_s - hit.at_s, lost_as=why)
    return found
