"""A supervisor that takes connections and never answers costs the controller a bounded wait."""

from __future__ import annotations

import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from keystage.controller.domain.platform import PlatformError
from keystage.controller.platforms.local import LocalPlatform


@pytest.fixture
def folder() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="ksc-", dir="/tmp"))  # a UNIX socket's path holds 107 bytes
    yield path
    shutil.rmtree(path)


def test_slow_supervisors_are_not_waited_for_without_bound(folder: Path) -> None:
    with socket.socket(socket.AF_UNIX) as silent:  # it never answers
        silent.bind(str(folder / "s"))
        silent.listen(8)
        platform = LocalPlatform(folder / "s", folder, timeout_s=0.05)
        with pytest.raises(PlatformError, match="timed out"):
            platform.observe()
        platform.close()
