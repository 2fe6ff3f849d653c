"""Which nodes hold the parameters of which function, kept while nodes change one by one.

Before it: `NodeView.in_memory` or `on_disk` of every node. After it: `placement_index` asks for the
nodes of one function. Many nodes often hold the very same set (every disk holds everything): such a
common set is kept once and is part of a node's class; only sets of few nodes are indexed by function.
What it answers depends on the present sets alone, not on how they came about.
"""

from __future__ import annotations

COMMON = 64
"""Nodes from which on a set counts as common: fewer are looked at one by one in a fraction of a ms."""

NOTHING: frozenset[str] = frozenset()


class Holdings:
    """Sets of function names per node, with an index by function.

    Args:
        sets: the set of every node.
    """

    def __init__(self, sets: list[frozenset[str]]) -> None:
        self._sets = sets
        self._members: dict[frozenset[str], set[int]] = {}
        self._nodes: dict[str, set[int]] = {}
        for j, held in enumerate(sets):
            self._members.setdefault(held, set()).add(j)
        for held, members in self._members.items():
            if len(members) < COMMON:
                self._index(held, members)

    def holds(self, j: int, function: str) -> bool:
        """Whether a node holds a function's parameters."""
        return function in self._sets[j]

    def common(self, j: int) -> frozenset[str]:
        """The node's set if it is common, else the empty set."""
        held = self._sets[j]
        return held if len(self._members[held]) >= COMMON else NOTHING

    def nodes_with(self, function: str) -> set[int]:
        """Nodes that hold a function's parameters in a set that is not common."""
        return self._nodes.get(function, set())

    def put(self, j: int, held: frozenset[str]) -> set[int]:
        """Replaces a node's set; answers the nodes whose `common` may have changed, itself included."""
        before = self._sets[j]
        if before is held or before == held:
            return {j}
        changed = {j}
        members = self._members[before]
        if len(members) < COMMON:
            self._forget(before, {j})
        members.discard(j)
        if len(members) == COMMON - 1:
            self._index(before, members)
            changed |= members
        if not members:
            del self._members[before]
        self._sets[j] = held
        members = self._members.setdefault(held, set())
        if len(members) == COMMON - 1:
            self._forget(held, members)
            changed |= members
        members.add(j)
        if len(members) < COMMON:
            self._index(held, {j})
        return changed

    def _index(self, held: frozenset[str], members: set[int]) -> None:
        for function in held:
            self._nodes.setdefault(function, set()).update(members)

    def _forget(self, held: frozenset[str], members: set[int]) -> None:
        for function in held:
            nodes = self._nodes[function]
            nodes -= members
            if not nodes:
                del self._nodes[function]
