"""Whether decoders can run as spans here (`cuda_span`), and what is done for that before a fork."""

from __future__ import annotations

import importlib
import importlib.util
import shutil

_COMPILERS = ("cc", "gcc", "clang")
_KERNELS = ("keystage.models.cuda_kernels", "keystage.models.cuda_attention")
_KEY_PLACES = ("triton.runtime.cache", "triton.compiler.compiler")
"""Where `triton_key` is, by version."""


def is_available() -> bool:
    """Triton is there, and a C compiler, with which it builds its launchers once."""
    return importlib.util.find_spec("triton") is not None and any(map(shutil.which, _COMPILERS))


def prepare() -> None:
    """Imports the kernels and computes the hashes by which Triton finds them compiled.

    Part of every process's start otherwise: Triton hashes the whole of its own library before the first
    launch, and keeps the result. Forked processes have it. Starts no thread and no CUDA.

    Raises:
        ModuleNotFoundError: Triton is not there.
    """
    jit = importlib.import_module("triton.runtime.jit")
    for name in _KERNELS:
        for value in vars(importlib.import_module(name)).values():
            if isinstance(value, jit.JITFunction):
                _ = value.cache_key
    for place in _KEY_PLACES:
        key = getattr(importlib.import_module(place), "triton_key", None)
        if callable(key):  # not a documented name: without it a start is slower, no more
            key()
            return
