"""What the tokenizers library does with a file or a text that it cannot take, as a refusal of ours.

It raises plain `Exception`s, and where its own code panics something that is none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

_PANIC = "PanicException"
"""Of Rust's Python bindings; it derives from `BaseException` and cannot be imported."""


@contextlib.contextmanager
def refusing(refusal: Callable[[str], Exception]) -> Iterator[None]:
    """Turns whatever the library raises inside into a refusal.

    Args:
        refusal: makes it of the library's words.
    """
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != _PANIC:
            raise
        raise refusal(str(error)) from error
