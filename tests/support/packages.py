"""Packages that carry a model or a voice: tests of them skip where one is absent, and say so."""

from __future__ import annotations

import importlib.util
import os

import pytest


def need_package(name: str) -> None:
    """Skips the test without the package, or fails it under KEYSTAGE_REQUIRE_ALL=1."""
    if importlib.util.find_spec(name) is not None:
        return
    if os.environ.get("KEYSTAGE_REQUIRE_ALL") == "1":
        pytest.fail(f"package {name} is not installed and KEYSTAGE_REQUIRE_ALL=1")
    pytest.skip(f"package {name} is not installed")
