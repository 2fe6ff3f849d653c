"""Every setting that a program reads from its environment is in docs/environment.md."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
from pydantic_settings import BaseSettings

ROOT = Path(__file__).parents[2]
MODULES = sorted(
    ".".join(file.with_suffix("").parts[file.parts.index("keystage") :])
    for file in ROOT.glob("*/src/keystage/*/*config.py")
    if "BaseSettings" in file.read_text() or "ClusterSettings" in file.read_text()
)


def test_there_are_settings() -> None:
    assert {"keystage.gateway.config", "keystage.controller.config", "keystage.worker.config"} <= set(MODULES)


@pytest.mark.parametrize("module", MODULES)
def test_each_is_documented(module: str) -> None:
    page = (ROOT / "docs" / "environment.md").read_text()
    documented = set(map(str.upper, re.findall(r"`((?:KEYSTAGE|OTEL)_[A-Z0-9_]+|secret_mount_path)`", page)))
    settings = [
        value
        for value in vars(importlib.import_module(module)).values()
        if isinstance(value, type) and issubclass(value, BaseSettings) and value is not BaseSettings
    ]
    assert settings
    for one in settings:
        prefix = one.model_config.get("env_prefix", "")
        names = {
            str(field.validation_alias or f"{prefix}{name}").upper()
            for name, field in one.model_fields.items()
        }
        assert names <= documented, f"{module}: {sorted(names - documented)} are not in docs/environment.md"
