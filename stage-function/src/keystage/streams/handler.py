"""Which code a bundle may name: the ready programs, and the user's own folder. Nothing else is imported.

`pipeline.json` comes from outside, and says which function makes its program and with which arguments. Were
any import path taken, a bundle could name `os:system`. The user's folder is the worker's own setting
(`KEYSTAGE_HANDLER`): what lies there is trusted because whoever runs the worker put it there. What such code
imports is not: a handler that uses `subprocess.run` is no reason to let a bundle name `handler:run`.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from keystage.streams.api import Program, ProgramError
from keystage.streams.opening import open_program

BUILT_IN = "keystage.streams.programs."


def open_allowed(
    path: str, options: Mapping[str, Any] | None = None, handler: str | os.PathLike[str] | None = None
) -> Program:
    """Makes a program whose code is built in or lies in the user's folder.

    Args:
        path: `package.module:function`.
        options: keyword arguments of the function.
        handler: the user's folder, None for none; it is put on the import path.

    Raises:
        ProgramError: the code lies elsewhere; or as `open_program` says.
        GraphError: see `Program`.
    """
    module = path.partition(":")[0]
    if module.startswith(BUILT_IN):
        return open_program(path, options, partial(_check_built_in, path))
    if handler is None or not str(handler):
        raise ProgramError(
            f"program {path}: only {BUILT_IN}* is built in; KEYSTAGE_HANDLER names no folder for other code",
            422,
        )
    folder = Path(handler).resolve()
    if not folder.is_dir():
        raise ProgramError(f"KEYSTAGE_HANDLER={handler}: no such folder", 422)
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
        importlib.invalidate_caches()
    _check_place(path, folder, module)
    return open_program(path, options, partial(_check_place, path, folder))


def _check_built_in(path: str, module: str) -> None:
    """Refuses a function that a ready program only imported."""
    if not module.startswith(BUILT_IN):
        raise ProgramError(f"program {path}: the function is of {module or 'no module'}, not built in", 422)


def _check_place(path: str, folder: Path, module: str) -> None:
    """Refuses a module whose outermost package is not in the folder, unless it is built in."""
    if module.startswith(BUILT_IN):
        return
    top = module.partition(".")[0]
    try:
        spec = importlib.util.find_spec(top) if top else None
    except ValueError:  # `__main__`, which has none
        spec = None
    places = [*(spec.submodule_search_locations or [])] if spec is not None else []
    # The origin of `os` is the word "frozen", of `posix` "built-in": names, which lie in no folder.
    if spec is not None and spec.origin and spec.has_location:
        places.append(spec.origin)
    if not places or not all(Path(place).resolve().is_relative_to(folder) for place in places):
        raise ProgramError(
            f"program {path}: module {top or module!r} is not in KEYSTAGE_HANDLER={folder}", 422
        )
