"""Worlds in files: one JSON object as `api.World` describes it.

Before it: a person wrote a file. After it: `run.simulate`.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from keystage.simulator.api import World
from keystage.simulator.check import check_world
from keystage.simulator.errors import WorldError
from keystage.wire.unreadable import UNREADABLE


def read_world(path: Path) -> World:
    """Reads and checks a world.

    Raises:
        WorldError: the file cannot be read, is no world, or the world cannot be.
    """
    try:
        world = msgspec.json.decode(path.read_bytes(), type=World)
    except OSError as error:
        raise WorldError(f"{path} cannot be read: {error.strerror}") from error
    except UNREADABLE as error:
        raise WorldError(f"{path} is no world: {error}") from error
    check_world(world)
    return world
