"""`bench e2e`, `mixed` and `soak` run from end to end on real processes, shorter than their quick form."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from keystage.bench import e2e, e2e_cells, mixed, soak
from keystage.bench.frame import BenchResult
from keystage.bench.sim_vs_local import Profile

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def known_hand_offs(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a quiet machine measures; measuring it takes half a minute."""
    for module in (e2e, mixed):
        monkeypatch.setattr(module, "measured_beside", lambda: Profile(0.005, 0.0008))


def check(result: BenchResult, pictures: list[Path]) -> None:
    """Rows of one shape, figures with samples, pictures that are there."""
    assert len({tuple(row) for row in result.rows}) == 1
    assert all(figure.samples for figure in result.figures.values())
    assert all(picture.read_bytes().startswith(b"\x89PNG") for picture in pictures)


def test_e2e(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short = dataclasses.replace(e2e_cells.QUICK, duration_s=5.0, policies=("keystage", "off"))
    monkeypatch.setattr(e2e, "QUICK", short)
    result = e2e.run(quick=True, out=tmp_path)
    check(result, [tmp_path / "e2e" / "e2e.png"])
    assert [(row["policy"], row["world"]) for row in result.rows] == [
        (policy, world) for policy in ("keystage", "off") for world in ("live", "simulated", "sim / live")
    ]
    live = [row for row in result.rows if row["world"] == "live"]
    assert all(row["unserved"] == 0 and row["mean_ms"] > 130 for row in live)
    assert 0.5 < result.figures["latency_sim_vs_live"].median < 2
    assert not (tmp_path / "benchmarks").exists()


def test_mixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short = dataclasses.replace(
        mixed.QUICK, minutes=10, live_minutes=1, policies=("keystage", "off", "cocktail")
    )
    monkeypatch.setattr(mixed, "QUICK", short)
    monkeypatch.setattr(mixed, "SEARCH_MINUTES", 4)
    result = mixed.run(quick=True, out=tmp_path)
    check(result, [tmp_path / "mixed" / f"mixed-{name}.png" for name in ("simulated", "live")])
    kinds = {(row["cell"], row["policy"]) for row in result.rows}
    assert kinds == {(c, p) for c in ("as tuned", "equal", "live") for p in ("keystage", "off", "cocktail")}
    assert any(note.startswith("equal GPU-seconds, seed 310, cocktail") for note in result.notes)
    assert any(" + 0 unaccounted for" in note for note in result.notes)


def test_soak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "QUICK_MINUTES", 2)
    result = soak.run(quick=True, seconds=12.0, speed=10.0, out=tmp_path)
    check(result, [tmp_path / "soak" / f"soak-{name}.png" for name in ("simulated", "live")])
    assert not [note for note in result.notes if note.startswith("FAILED")]
    assert result.figures["unaccounted"].median == 0
    assert result.figures["served_ratio"].median == 1
    assert result.figures["simulated_unserved"].median == 0
    sent = [row for row in result.rows if row["part"] == "live" and row["sent"] != ""]
    assert len(sent) == 3
    assert all(row["sent"] == row["served"] > 0 for row in sent)
