"""From an import path to a program: what `pipeline.json` and the command line name.

Used where a bundle is made, in workers, and by the local run. The function is the user's own code and runs
in this process.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from keystage.streams.api import Program, ProgramError


def open_program(
    path: str, options: Mapping[str, Any] | None = None, check: Callable[[str], None] | None = None
) -> Program:
    """Makes a program.

    Args:
        path: `package.module:function`.
        options: keyword arguments of the function.
        check: called with the module that the function was written in; raises if it is not to be called.

    Raises:
        ProgramError: no such module or function, options it does not take, or it returns something else.
        GraphError: see `Program`.
    """
    module_name, colon, name = path.partition(":")
    if not colon or not module_name or not name:
        raise ProgramError(f"a program is named package.module:function, got {path!r}")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if module_name != missing and not module_name.startswith(f"{missing}."):
            raise
        raise ProgramError(f"program {path}: there is no module {missing}") from error
    make = getattr(module, name, None)
    if not callable(make):
        raise ProgramError(f"program {path}: module {module_name} has no function {name}")
    if check is not None:
        check(str(getattr(make, "__module__", None) or ""))
    program = _called(path, make, dict(options or {}))
    if not isinstance(program, Program):
        raise ProgramError(f"program {path}: the function returned {type(program).__name__}, not a Program")
    return program


def _called(path: str, make: Any, options: dict[str, Any]) -> object:
    try:
        inspect.signature(make).bind(**options)
    except TypeError as error:
        raise ProgramError(f"program {path}: options {sorted(options)}: {error}") from error
    made: object = make(**options)
    return made
