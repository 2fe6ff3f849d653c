"""Which request ends the workers that run it, told from those that only were there. Pure.

Before it: a core hears that a worker died, and how (`Ending`). After it: the core runs a *suspect* apart, so
that nobody else is there when the next worker dies, and fails it alone if one does. Decision 026:

- A worker that was killed from outside blames nobody.
- A death counts against a request only until the request gets past the place where it was (`passed`), and
  one that was none (a worker was silent, and is there again) no longer (`returned_alive`).
- A request is convicted when it was alone at a death, and that was its second crash, or the death one more
  than `max_losses` of any kind with it alone.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from enum import StrEnum


class Cause(StrEnum):
    """What is known of a worker's end."""

    OUTSIDE = "outside"
    CRASH = "crash"
    UNKNOWN = "unknown"


@dataclasses.dataclass(frozen=True, slots=True)
class Ending:
    """How a worker ended.

    Attributes:
        cause: killed from outside, by what it did, or nobody knows.
        words: the same for people: exit status, signal, its own last words.
        replica: its name.
        process: which it was: told again if it is there again; empty: it never is.
        is_shared: whether other routers may have had requests at it: then nobody was surely alone.
    """

    cause: Cause = Cause.UNKNOWN
    words: str = "nobody knows how it ended"
    replica: str = "a worker"
    process: str = ""
    is_shared: bool = False


UNTOLD = Ending()


@dataclasses.dataclass(frozen=True, slots=True)
class Death:
    """A worker's end, with a request.

    Attributes:
        ending: how it ended.
        is_alone: whether it ran nothing else.
    """

    ending: Ending
    is_alone: bool

    @property
    def words(self) -> str:
        """Who, and how."""
        return f"{self.ending.replica}: {self.ending.words}"


@dataclasses.dataclass(slots=True)
class Suspicion:
    """What speaks against one request.

    Attributes:
        places: by stage of the workers that died with it how far it had come; beyond that it is cleared.
        deaths: of workers that ran it.
        is_apart: whether it is to run apart.
    """

    places: dict[int, float]
    deaths: list[Death]
    is_apart: bool = False

    @property
    def stages(self) -> set[int]:
        """Where it runs apart."""
        return set(self.places)


class Suspects:
    """Requests whose workers died, by number.

    Args:
        max_losses: deaths of any kind that a request survives.

    Attributes:
        convicted: requests that were failed for what they did to workers.
        set_apart: requests that ever had to run apart.
        cleared: those of them that got past the place where their worker had died.
    """

    def __init__(self, max_losses: int) -> None:
        self._max_losses = max_losses
        self._of: dict[int, Suspicion] = {}
        self.convicted = 0
        self.set_apart = 0
        self.cleared = 0

    def __contains__(self, number: object) -> bool:
        return number in self._of

    def blame(
        self, points: Mapping[int, float], stages: Iterable[int], ending: Ending, others: int = 0
    ) -> dict[int, str]:
        """A worker died with these requests.

        Args:
            points: how far each had come, by number.
            stages: what the worker hosted.
            ending: how it ended.
            others: how many more it ran, which have ended for their clients.

        Returns:
            Why a request is failed, by number: at most one, which was alone.
        """
        if ending.cause is Cause.OUTSIDE:
            return {}
        hosted, is_alone = set(stages), len(points) == 1 and others <= 0
        for number, point in points.items():
            found = self._of.get(number)
            if found is None:
                found = self._of[number] = Suspicion({}, [])
            for stage in hosted:
                found.places[stage] = max(point, found.places.get(stage, point))
            found.deaths.append(Death(ending, is_alone))
            if ending.cause is Cause.CRASH or len(found.deaths) > 1:
                self.set_apart += not found.is_apart
                found.is_apart = True
        if not is_alone:
            return {}
        (number,) = points
        deaths = self._of[number].deaths
        crashes = sum(death.ending.cause is Cause.CRASH for death in deaths)
        is_proved = ending.cause is Cause.CRASH and crashes > 1 and not ending.is_shared
        if not is_proved and sum(death.is_alone for death in deaths) <= self._max_losses:
            return {}
        self.convicted += 1
        return {number: _sentence(deaths, self._max_losses, is_proved=is_proved)}

    def returned_alive(self, process: str) -> None:
        """A worker that was given up is there again: it had not died."""
        for found in self._of.values():
            found.deaths = [death for death in found.deaths if death.ending.process != process]

    def apart(self, number: int) -> Suspicion | None:
        """What is held against a request that is to run apart, None for any other."""
        found = self._of.get(number)
        return found if found is not None and found.is_apart else None

    def passed(self, number: int, point: float) -> bool:
        """A request has come so far; whether that clears it."""
        found = self._of.get(number)
        if found is None or point <= max(found.places.values(), default=-1.0):
            return False
        self.clear(number)
        return True

    def is_due(self, number: int, stage: int, point: float) -> bool:
        """Whether a request is at the place where its worker died, and is to run apart there."""
        found = self.apart(number)
        return found is not None and point >= found.places.get(stage, math.inf)

    def returned(self, number: int, stage: int, point: float) -> None:
        """A request has passed a stage, so far on; that clears it where it was suspected of nothing more."""
        found = self._of.get(number)
        if found is not None and point >= found.places.get(stage, math.inf):
            del found.places[stage]
            if not found.places:
                self.clear(number)

    def clear(self, number: int) -> None:
        """Nothing speaks against a request any more."""
        self.cleared += self._of.pop(number).is_apart

    def forget(self, number: int) -> None:
        """A request has ended."""
        self._of.pop(number, None)


def _sentence(deaths: list[Death], most: int, *, is_proved: bool) -> str:
    told = "; ".join(death.words for death in deaths[-4:])
    bound = "" if is_proved else f", the bound is {most} (KEYSTAGE_MAX_LOSSES)"
    ran = f"{len(deaths)} workers ended while they ran this request, the last with nothing else"
    return f"{ran}{bound}: {told}"
