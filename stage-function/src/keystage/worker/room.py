"""What the owner of a path knows of the free KV blocks along it. Pure.

Every wave brings back the least free blocks over the stages, counted where it passed, after its own
rows had theirs. What later waves took since is subtracted, what sessions gave back that those waves
freed on their way is added: a path keeps order, so at every stage a wave finds exactly that. Only
other paths over the same workers make the figure wrong; then rows come back starved.
"""

from __future__ import annotations

import dataclasses

from keystage.wire.api import UNBOUNDED

PROBE_S = 0.02
"""A path on which somebody waits and nothing runs asks this often for the free blocks, with an empty wave."""


@dataclasses.dataclass(slots=True)
class PathRoom:
    """Free blocks of one path.

    Attributes:
        blocks: blocks of the worker on it that has fewest.
        told_s: when a wave last told, on the clock of whoever calls.
    """

    blocks: int = UNBOUNDED
    told_s: float = float("-inf")
    _free: int = UNBOUNDED
    _room: int = UNBOUNDED
    _told_wave: int = 0
    _flying: dict[int, int] = dataclasses.field(default_factory=dict)

    @property
    def free(self) -> int:
        """Blocks that rows of running sessions may take."""
        return min(self._free, self.blocks) - sum(self._flying.values())

    @property
    def room(self) -> int:
        """Blocks that sessions may be admitted to: older ones of other paths go first."""
        return min(self._room, self.blocks) - sum(self._flying.values())

    def sent(self, wave: int, taken: int) -> None:
        """A wave leaves whose rows take so many blocks more than its drops free."""
        self._flying[wave] = taken

    def told(self, wave: int, free: int, room: int, now_s: float) -> None:
        """A wave is back."""
        self._flying.pop(wave, None)
        if wave > self._told_wave:
            self._told_wave, self._free, self._room, self.told_s = wave, free, room, now_s
