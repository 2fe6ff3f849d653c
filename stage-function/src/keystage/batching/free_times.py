"""When each replica of a group is free: the first by number that is free in time, in O(log G). Pure.

A tournament tree over the replicas in order of their numbers: each inner place holds the least time below
it. Symphony's Algorithm 1 wants the smallest number among those free in time, not the earliest one
(Figure 18): only so do idle replicas stay idle and can be released.
"""

from __future__ import annotations

import math

NEVER_S = math.inf


class FreeTimes:
    """Times by replica number."""

    __slots__ = ("_leaves", "_numbers", "_places", "_tree")

    def __init__(self) -> None:
        self._numbers: list[int] = []
        self._places: dict[int, int] = {}
        self._leaves = 1
        self._tree = [NEVER_S, NEVER_S]

    def __len__(self) -> int:
        return len(self._places)

    def add(self, number: int) -> None:
        """A replica more, free never; in O(1) amortised when its number is the largest so far."""
        if self._numbers and number < self._numbers[-1]:
            times = {known: self._tree[self._leaves + place] for known, place in self._places.items()}
            self._rebuild(sorted([*times, number]), {**times, number: NEVER_S})
            return
        if len(self._numbers) == self._leaves:
            times = {known: self._tree[self._leaves + place] for known, place in self._places.items()}
            self._rebuild(sorted(times), times)
        self._places[number] = len(self._numbers)
        self._numbers.append(number)

    def discard(self, number: int) -> None:
        """One less; its place stays empty until the next rebuild."""
        self.put(number, NEVER_S)
        place = self._places.pop(number)
        # The largest number's place may be used anew at once, others wait.
        if place == len(self._numbers) - 1:
            self._numbers.pop()

    def put(self, number: int, free_s: float) -> None:
        """A replica is free from then on; `-inf`: is free, `inf`: nobody knows."""
        tree = self._tree
        at = self._leaves + self._places[number]
        tree[at] = free_s
        while at > 1:
            other = tree[at ^ 1]
            if other < free_s:
                free_s = other
            at >>= 1
            if tree[at] == free_s:
                return
            tree[at] = free_s

    def first(self, by_s: float) -> int | None:
        """The smallest number that is free by then."""
        tree = self._tree
        if tree[1] > by_s or tree[1] == NEVER_S:
            return None
        at, leaves = 1, self._leaves
        while at < leaves:
            at <<= 1
            if tree[at] > by_s:
                at += 1
        return self._numbers[at - leaves]

    def of(self, number: int) -> float:
        """When this one is free."""
        return self._tree[self._leaves + self._places[number]]

    def least_s(self) -> float:
        """When the first of all is free."""
        return self._tree[1]

    def _rebuild(self, numbers: list[int], times: dict[int, float]) -> None:
        self._numbers = numbers
        self._places = {number: place for place, number in enumerate(numbers)}
        self._leaves = 1 << len(numbers).bit_length()
        tree = [NEVER_S] * (2 * self._leaves)
        for place, number in enumerate(numbers):
            tree[self._leaves + place] = times[number]
        for at in range(self._leaves - 1, 0, -1):
            tree[at] = min(tree[2 * at], tree[2 * at + 1])
        self._tree = tree
