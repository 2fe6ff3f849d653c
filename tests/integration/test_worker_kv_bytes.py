"""A worker whose KV state cannot hold one block says so and does not start."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from keystage.bundle.split import split


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return split("random:llama-tiny", 2, "uniform", tmp_path_factory.mktemp("b") / "bundle", "tiny", "fp32")


@pytest.mark.slow
def test_too_few_bytes_for_a_block_are_refused(bundle: Path, tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "KEYSTAGE_PIPELINE": "tiny",
        "KEYSTAGE_STAGES": "1",
        "KEYSTAGE_BUNDLE": bundle.as_uri(),
        "KEYSTAGE_ROUTER": f"ipc://{tmp_path}/r",
        "KEYSTAGE_REPLICA": "w",
        "KEYSTAGE_RUN": str(tmp_path),
        "KEYSTAGE_KV_BYTES": "8191",
    }
    # 2 layers x 2 heads x 16 numbers x 4 bytes for keys, as many for values: 512 bytes a position.
    ended = subprocess.run(
        [sys.executable, "-m", "keystage.worker.app"],
        env=environment,
        capture_output=True,
        timeout=60,
        text=True,
    )
    assert ended.returncode == 2, ended.stderr
    said = "KEYSTAGE_KV_BYTES=8191: stages 1 of tiny need more for one block of 16 positions"
    assert said in ended.stderr
    assert "Traceback" not in ended.stderr
