"""What msgspec raises for bytes that others sent and that are not what they should be.

Its own error is `msgspec.DecodeError`; a text in them that is no UTF-8 is a `UnicodeDecodeError` all the
same, and values that are nested a thousand deep are a `RecursionError`. Whoever decodes what came over a
network or out of a file catches all three.
"""

from __future__ import annotations

import msgspec

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
