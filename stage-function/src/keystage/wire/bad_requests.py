"""What a server made with aiohttp logs of requests that are none: one line, and nothing of their content.

By itself it logs a traceback with the line that it could not read, which may be one with credentials; whoever
reaches the port could fill logs so. The sender's answer is the same either way. It must not import aiohttp,
which not every process of the wire has need of.
"""

from __future__ import annotations

import logging
import re

_QUOTED = re.compile(r"""[:'"\n]""")
"""Behind the first of these aiohttp says what it read."""


class _OneLine(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and type(error).__module__ == "aiohttp.http_exceptions":
            words = _QUOTED.split(str(getattr(error, "message", "")), maxsplit=1)[0].strip()
            record.exc_info = record.exc_text = None
            record.levelno, record.levelname = logging.WARNING, logging.getLevelName(logging.WARNING)
            record.msg, record.args = "a request that cannot be read: %s: %s", (type(error).__name__, words)
        return True


_ONE_LINE = _OneLine()


def tell_in_one_line() -> None:
    """Has every aiohttp server of this process do so; called as often as one is made."""
    logging.getLogger("aiohttp.server").addFilter(_ONE_LINE)
