"""A slow request is found from page, trace and terminal to stage and cause: docs/slow-request.md."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from support.browser import need_chromium
from support.slow_request import SLOW, Found, play

from keystage.bundle.api import emulated
from keystage.bundle.store import write

pytestmark = pytest.mark.slow

STAGES = 4
DEVICE = "emulated:alpha=0.005,beta=0.005,load={load_s}"
OUT = Path(__file__).parents[2] / "out"


def played(tmp_path: Path, load_s: float, *, keysmanager: bool) -> Found:
    need_chromium()
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    write(bundle, emulated("em", STAGES, execution="looping", activation_bytes=512))
    device = DEVICE.format(load_s=load_s)
    return asyncio.run(
        play(bundle, tmp_path, OUT, device=device, keysmanager=keysmanager, is_alone=keysmanager)
    )


def leads_to_the_cause(found: Found) -> None:
    """Page, log, command and trace name the stage, that it started cold, and who had sent it away."""
    assert f"Likeliest: stage {SLOW}, no replica was ready" in found.verdict
    assert "cold start" in found.verdict
    assert found.causes.startswith(f"{SLOW} em-stage-{SLOW}")
    asked, woken = f"stage {SLOW}: 1 -> 0, a person asked for 0", f"stage {SLOW}: 0 -> 1, a request waits"
    explained = found.commands[f"explain em/{SLOW}"]
    for told in (found.meanwhile, explained):
        assert 0 <= told.find(asked) < told.find(woken)
    assert 0 <= found.decisions.find(woken) < found.decisions.find(asked)  # the newest first
    spans = {span.name: span for span in found.spans}
    assert spans["cold start"].attributes["keystage.stage"] == SLOW
    assert spans["cold start"].attributes["keystage.replica"].startswith(f"em-stage-{SLOW}-")
    assert spans["queue"].attributes["keystage.cold_start"] is True
    assert found.errors == ()


def test_a_cold_start_that_reads_the_bundle(tmp_path: Path) -> None:
    found = played(tmp_path, 3.0, keysmanager=False)
    leads_to_the_cause(found)
    assert f"stage {SLOW}, em-stage-{SLOW}, " in found.stage
    assert "0 of 1 replica ready" in found.stage
    assert "Cold start: no replica is ready, 1 starting" in found.stage
    assert f"em/{SLOW}: 0 of 1 replicas ready, 1 starting" in found.commands["status em"]
    assert f"Likeliest: stage {SLOW}, no replica was ready" in found.elsewhere
    assert "cold start: a replica was starting" in found.elsewhere
    spans = {span.name: span for span in found.spans}
    assert spans["cold start"].seconds > 0.5 * spans["POST /function/{name}"].seconds


def test_a_cold_start_that_is_over_before_the_next_report(tmp_path: Path) -> None:
    leads_to_the_cause(played(tmp_path, 0.0, keysmanager=True))
