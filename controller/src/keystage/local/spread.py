"""On which node a new replica goes where the controller named none. Pure, asked by `local.ledger`.

Fewest replicas of the function first, so that the loss of a node takes few of them; then fewest of
all; then the order of the nodes.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence


@dataclasses.dataclass(frozen=True, slots=True)
class Places:
    """What the controller said with its last number for a function.

    Attributes:
        sites: nodes of new replicas that are not used up.
        victims: replicas that go first.
        decided_at_s: when it decided, Unix seconds; 0: it never did.
    """

    sites: tuple[str, ...] = ()
    victims: tuple[str, ...] = ()
    decided_at_s: float = 0.0

    def next_site(self) -> tuple[str | None, Places]:
        """The node of the next new replica (None: none is named), and what is left."""
        if not self.sites:
            return None, self
        return self.sites[0], dataclasses.replace(self, sites=self.sites[1:])


def least_used(nodes: Sequence[str], running: Iterable[tuple[str, str]], function: str) -> str:
    """Chooses a node.

    Args:
        nodes: names, at least one.
        running: (function, node) of every replica there is.
        function: whose replica is to be placed.
    """
    of_all: Counter[str] = Counter()
    of_function: Counter[str] = Counter()
    for name, node in running:
        of_all[node] += 1
        of_function[node] += name == function
    return min(nodes, key=lambda node: (of_function[node], of_all[node]))
