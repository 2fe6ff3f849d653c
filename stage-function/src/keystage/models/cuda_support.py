"""Whether decoders can run as spans here (`cuda_span`), without importing what that needs."""

from __future__ import annotations

import importlib.util
import shutil

_COMPILERS = ("cc", "gcc", "clang")


def is_available() -> bool:
    """Triton is there, and a C compiler, with which it builds its launchers once."""
    return importlib.util.find_spec("triton") is not None and any(map(shutil.which, _COMPILERS))
