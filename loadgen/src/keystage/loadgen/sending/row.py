"""One request as it went: the row that the sender fills and everything after it reads.

Comes first in `sending`; `measures` and `report` come after. It holds no behaviour but its own reading.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable


@dataclasses.dataclass(slots=True)
class Row:
    """One request as it went. Times are seconds since the start of the run on the monotonic clock.

    Attributes:
        index: position in the schedule.
        scheduled_s: when it should be sent.
        sent_s: when it was first handed to the HTTP client; connecting counts as latency.
        first_s: when the first text (streams) or byte (else) arrived, None if none did.
        last_s: when the last text arrived, or the request failed.
        status: HTTP status, 0 if there was no answer.
        prompt_tokens: as counted by the server, None if it did not say.
        output_tokens: as counted by the server, else chunks with text.
        error: empty for a complete answer, else `class: detail`.
        target: which of the plan's addresses it went to.
        attempts: how often it was sent to the server: 1, and more only where retries were asked for.
    """

    index: int
    scheduled_s: float
    sent_s: float = 0.0
    first_s: float | None = None
    last_s: float = 0.0
    status: int = 0
    prompt_tokens: int | None = None
    output_tokens: int = 0
    error: str = ""
    target: int = 0
    attempts: int = 1

    @property
    def is_served(self) -> bool:
        """Whether the whole answer came."""
        return not self.error

    @property
    def error_class(self) -> str:
        """The error without its detail."""
        return self.error.partition(":")[0]


Progress = Callable[[Row], None]
"""Called with each row when its request has ended."""
