"""When people's scale requests end, on a clock that does not step.

Before it: function records, in which the gateway has written wall-clock seconds. After it: `local_view`,
whose time is steady. Gateway, supervisor and controller of one machine share its wall clock, so what is left
of a request is read once, when it is first seen; a clock that is set later neither ends nor prolongs it.
Clocks come in as arguments.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from keystage.local.api import FunctionRecord, Override


class Expiries:
    """Requests that were seen, by function, with when they end."""

    def __init__(self) -> None:
        self._ends: dict[str, tuple[Override, float]] = {}

    def steadied(
        self, functions: Sequence[FunctionRecord], at_s: float, wall_s: float
    ) -> list[FunctionRecord]:
        """The same functions, with the ends of requests in steady seconds.

        Args:
            functions: every function there is; requests of others are forgotten.
            at_s: steady Unix seconds.
            wall_s: the wall clock's Unix seconds, as the gateway reads it.
        """
        ends: dict[str, tuple[Override, float]] = {}
        found = []
        for record in functions:
            asked = record.override
            if asked is not None:
                name = record.deployment.service
                known = self._ends.get(name)
                is_known = known is not None and known[0] == asked
                ends[name] = (
                    known if known is not None and is_known else (asked, asked.expires_at_s - wall_s + at_s)
                )
                record = msgspec.structs.replace(record, override=Override(asked.replicas, ends[name][1]))
            found.append(record)
        self._ends = ends
        return found
