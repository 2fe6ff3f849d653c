"""What a pod does where the better way to its parameters turns out to be closed. A real daemon and bundle."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.keysmanager_bundles import folder_server
from support.keysmanager_daemon import Node, node_of
from support.keysmanager_forks import random_bundle
from support.processes import wait_for

from keystage.bundle import store
from keystage.keysmanager import packed_segment
from keystage.keysmanager.api import StageName
from keystage.keysmanager.client import Got
from keystage.keysmanager.pod_supply import Place, PodSupply


@pytest.fixture(scope="module")
def node() -> Iterator[tuple[Node, Path]]:
    """A daemon, and a bundle."""
    with tempfile.TemporaryDirectory(prefix="ks", dir="/tmp") as name:
        folder = Path(name)
        bundle = random_bundle(folder / "b", hidden=192, width=384, layers=2, vocab=512, stages=2)
        with node_of(folder) as found:
            yield found, bundle


@pytest.mark.slow
def test_a_packed_form_that_cannot_be_used_is_asked_for_as_raw_bytes(
    node: tuple[Node, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As with another torch of the same version: the form is taken, and nothing can be made of it."""
    manager, bundle = node
    pipeline = store.load(bundle)
    asyncio.run(manager.client.key_stages([StageName(bundle.as_uri(), 1)]))

    def is_packed() -> bool:
        holders = asyncio.run(manager.client.status()).holders
        return [h.state for h in holders if h.identity == pipeline.stages[1].identity and h.pid] == ["ready"]

    wait_for(is_packed, "the stage is held")
    monkeypatch.setattr(packed_segment, "_interface", lambda: None)
    supply = PodSupply(Place(str(bundle), bundle, manager.client.path, is_cpu=True), None, lambda: None)
    assert supply.stage(pipeline, 1, "cpu", "float32") is not None
    assert "this torch makes no tensor of packed memory" in caplog.text
    assert supply.source in ("memory", "disk")
    assert supply.note == ""


class _Unfilled(PodSupply):
    """Its device refuses to be filled."""

    def _built(self, got: Got, *_: object) -> None:
        os.close(got.fd)
        got.claim.close()


@pytest.mark.slow
def test_a_stage_whose_arena_cannot_be_filled_is_fetched(node: tuple[Node, Path], tmp_path: Path) -> None:
    manager, bundle = node
    pipeline = store.load(bundle)
    with folder_server(bundle) as home:
        supply = _Unfilled(Place(home, tmp_path, manager.client.path), None, lambda: None)
        assert supply.stage(pipeline, 0, "cuda:0", "float32") is None
    assert supply.note == "the arena of stage 0 could not be filled"
    assert (tmp_path / pipeline.stages[0].file).stat().st_size == pipeline.stages[0].nbytes
