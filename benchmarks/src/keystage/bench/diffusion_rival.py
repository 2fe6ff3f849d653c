"""Request-level batching of a diffusion program, as good as it can be made: Clockwork-like. Pure.

Called by `diffusion_whole` with what waits when a device is free, and by `tuned`, which tries rules on
emulated devices before anything is served. It knows what a batch of whole requests takes for every size and
every number of steps (measured where it then serves), starts no batch that would miss its first deadline, and
refuses at once what cannot be in time.

Of what waits, earliest deadline first, a batch takes the first and whoever still fits: with `equal` only
requests of its number of steps (Clockwork in NeuStream's section 6.1), with `padded` any: those that have
done their steps wait, computing nothing, for the longest, since answers come when the batch ends.

Under overload the first in line has so little time left that batches stay small. So a rule may ask for a
`least` size: who cannot be in time in a batch of so many (or of all that wait) is given up for those behind,
as Nexus drops early, and as our own rounds give up newcomers that would hold the others down. Or it takes the
`densest` batch, begun at whomever gives most requests a second of the device, and lets those before wait.
`tuned` tries all of these.
"""

from __future__ import annotations

import bisect
import dataclasses
import heapq
from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias

from keystage.streams.interpolate import TableProfile, table

Grouping: TypeAlias = Literal["equal", "padded"]

LEASTS = (0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 14, 16, 18, 20)
"""`Rule.least` that are tried."""
_LEAST_S = 1e-6


@dataclasses.dataclass(frozen=True, slots=True)
class WholeProfile:
    """What a batch of whole requests takes.

    Attributes:
        step: seconds of one step of a batch.
        beside: seconds of all that is not a step: text, decoder, the way to the device and back.
    """

    step: TableProfile
    beside: TableProfile

    def seconds(self, steps: Sequence[int]) -> float:
        """Of a batch of requests of so many steps each, in any order.

        Raises:
            ProfileError: it is larger than any that was measured.
        """
        total_s, done = self.beside.latency_s(len(steps)), 0
        for place, count in enumerate(sorted(steps)):
            total_s += (count - done) * self.step.latency_s(len(steps) - place)
            done = count
        return total_s


def whole_profile(measured: Mapping[int, tuple[float, float]], few: int, many: int) -> WholeProfile:
    """A profile from batches of two numbers of steps.

    Args:
        measured: seconds of `few` and of `many` steps, by batch size.
        few: steps, fewer than `many`.
        many: steps.
    """
    sizes = sorted(measured)
    steps_s = [max(_LEAST_S, (measured[b][1] - measured[b][0]) / (many - few)) for b in sizes]
    step = table(sizes, steps_s)
    # Times of a step were made to rise with the batch: what is beside them is reckoned for `many`.
    besides_s = [max(_LEAST_S, measured[b][1] - many * step.latency_s(b)) for b in sizes]
    return WholeProfile(step, table(sizes, besides_s))


@dataclasses.dataclass(frozen=True, slots=True)
class Rule:
    """What is tuned.

    Attributes:
        grouping: who may share a batch.
        least: smallest batch that the first in line may make small; 0: the densest batch.
        margin_ratio: by how much longer than its profile a batch is reckoned.
    """

    grouping: Grouping
    least: int = 1
    margin_ratio: float = 0.0

    def __str__(self) -> str:
        return f"{self.grouping}, {f'least {self.least}' if self.least else 'densest'}"


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Waiting:
    """A request that waits; they are ordered by deadline.

    Attributes:
        due_s: its deadline.
        number: unique.
        steps: that it asks for.
    """

    due_s: float
    number: int
    steps: int


class WholeQueue:
    """What waits for any device.

    Args:
        profile: of a batch on a device.
        rule: how batches are formed.
        most: largest batch.
    """

    def __init__(self, profile: WholeProfile, rule: Rule, most: int) -> None:
        self._profile = profile
        self._rule = rule
        self._most = min(most, profile.step.most)
        self._waiting: list[Waiting] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, request: Waiting) -> None:
        """A request comes."""
        bisect.insort(self._waiting, request)

    def take_hopeless(self, now_s: float) -> list[Waiting]:
        """Takes out those that could not be in time even alone, on a device that is free now."""
        hopeless = [one for one in self._waiting if self._end_s([one], now_s) > one.due_s]
        if hopeless:
            self._waiting = [one for one in self._waiting if one not in hopeless]
        return hopeless

    def next_batch(self, now_s: float, idle: int = 1) -> tuple[list[Waiting], list[Waiting]]:
        """Takes out the batch that a free device starts now, and those that are given up.

        Args:
            now_s: the time.
            idle: devices that are free, this one among them: they share what waits evenly.
        """
        given_up = self.take_hopeless(now_s)
        batch: list[Waiting] = []
        while self._waiting and not batch:
            if not self._rule.least:
                batch = self._densest(now_s, idle)
                break
            most, grown = self._from(0, now_s, idle)
            if len(grown) >= min(self._rule.least, most):
                batch = grown
            else:
                given_up.append(self._waiting.pop(0))
        taken = {one.number for one in batch}
        self._waiting = [one for one in self._waiting if one.number not in taken]
        return batch, given_up

    def _densest(self, now_s: float, idle: int) -> list[Waiting]:
        """Of the batches that begin at anyone the one with most requests a second, the earliest of equals."""
        batches = [self._from(place, now_s, idle)[1] for place in range(len(self._waiting))]
        return max(batches, key=self._density_rps, default=[])

    def _density_rps(self, batch: Sequence[Waiting]) -> float:
        return len(batch) / self._profile.seconds([one.steps for one in batch])

    def _from(self, place: int, now_s: float, idle: int) -> tuple[int, list[Waiting]]:
        """How large a batch that begins here may be, and whom it can take."""
        mates = self._mates(place)
        most = min(self._most, -(-len(mates) // idle))
        return most, self._grown(mates, most, now_s)

    def _mates(self, place: int) -> list[Waiting]:
        """Who may be in a batch that begins here, its first in front."""
        behind = self._waiting[place:]
        if self._rule.grouping == "padded":
            return behind
        return [one for one in behind if one.steps == behind[0].steps]

    def _grown(self, mates: Sequence[Waiting], most: int, now_s: float) -> list[Waiting]:
        """From the first on, whoever the batch can take and still end by the first one's deadline."""
        batch = [mates[0]]
        for one in mates[1:]:
            if len(batch) >= most:
                break
            if self._end_s([*batch, one], now_s) <= batch[0].due_s:
                batch.append(one)
        return batch

    def _end_s(self, batch: Sequence[Waiting], now_s: float) -> float:
        reckoned_s = self._profile.seconds([one.steps for one in batch])
        return now_s + reckoned_s * (1 + self._rule.margin_ratio)


def emulated(
    profile: WholeProfile,
    rule: Rule,
    most: int,
    devices: int,
    arrivals: Sequence[tuple[float, float, int]],
) -> tuple[int, int]:
    """Serves a schedule on devices that take exactly their profile.

    Args:
        profile: of each device.
        rule: how batches are formed.
        most: largest batch.
        devices: how many.
        arrivals: when each request comes (ascending), its objective, its steps.

    Returns:
        How many were in time, and how many batches ran.
    """
    queue = WholeQueue(profile, rule, most)
    free_s = [0.0] * devices
    coming = good = batches = 0
    while coming < len(arrivals) or len(queue):
        now_s = free_s[0]
        if not len(queue):
            now_s = max(now_s, arrivals[coming][0])
        while coming < len(arrivals) and arrivals[coming][0] <= now_s:
            at_s, objective_s, steps = arrivals[coming]
            queue.add(Waiting(at_s + objective_s, coming, steps))
            coming += 1
        batch, _ = queue.next_batch(now_s, sum(at_s <= now_s for at_s in free_s))
        if not batch:
            continue
        end_s = now_s + profile.seconds([one.steps for one in batch])
        heapq.heapreplace(free_s, end_s)
        good += sum(end_s <= one.due_s for one in batch)
        batches += 1
    return good, batches


def tuned(
    profile: WholeProfile,
    grouping: Grouping,
    most: int,
    devices: int,
    schedules: Sequence[Sequence[tuple[float, float, int]]],
    margin_ratio: float,
) -> Rule:
    """The rule that serves most in time on emulated devices, the first of several.

    Args:
        profile: see `emulated`.
        grouping: of the rule.
        most: see `emulated`.
        devices: see `emulated`.
        schedules: of the same kind as what is going to be served.
        margin_ratio: of the rule.
    """
    rules = [Rule(grouping, least, margin_ratio) for least in LEASTS if least <= most]
    return max(
        rules,
        key=lambda rule: sum(emulated(profile, rule, most, devices, schedule)[0] for schedule in schedules),
    )
