"""Who waits for KV blocks at this worker, on whichever path: the oldest goes first. Pure.

Several owners may share a stage, and none knows what the others want. Each wave therefore carries the
oldest session of its path that waits for room (`Step.claim`), and every stage remembers it until the
path's next wave. A session that is opened leaves what older ones of other paths wait for: so the
oldest of all gets its blocks once what runs has ended, and no two owners take each other's for ever.
Session numbers grow with the time of arrival; those of several routers too, which start at the clock.
"""

from __future__ import annotations

import dataclasses

NEWEST = 2**63
"""Greater than any session number: a path on which nobody waits."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Claim:
    router: str
    session: int
    blocks: int


class Claims:
    """The claims of all paths over this worker."""

    def __init__(self) -> None:
        self._by_path: dict[int, _Claim] = {}

    def __len__(self) -> int:
        return len(self._by_path)

    def note(self, path: int, router: str, session: int, blocks: int) -> None:
        """A wave says who waits on its path; a negative session: nobody does any more."""
        if session < 0:
            self._by_path.pop(path, None)
        else:
            self._by_path[path] = _Claim(router, session, blocks)

    def ahead_of(self, path: int, session: int) -> int:
        """Blocks that older sessions of other paths wait for."""
        if not self._by_path:
            return 0
        return sum(
            claim.blocks
            for other, claim in self._by_path.items()
            if other != path and claim.session < session
        )

    def forget_path(self, path: int) -> None:
        """The path is gone."""
        self._by_path.pop(path, None)

    def forget_router(self, router: str) -> None:
        """The router restarted: nobody waits for it any more."""
        for path in [path for path, claim in self._by_path.items() if claim.router == router]:
            del self._by_path[path]
