"""`keystage cache`: what a person reads of a node's status."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from keystage.cli.keysmanager import show, size, span
from keystage.keysmanager.api import (
    CacheEntry,
    Gpu,
    HistoryEntry,
    Memory,
    NodeStatus,
    StageName,
    StandbyEntry,
)

MEMORY = Memory(
    limit_bytes=16 << 30, used_bytes=3 << 30, budget_bytes=12 << 30, segment_bytes=5 << 20, origin="cgroup2"
)
HELD = CacheEntry(
    pipeline="smollm2", stage=3, identity="ab" * 32, state="ready", rank=0, nbytes=5 << 20, source="peer",
    load_s=0.254, loaded_at_s=1000.0, used_at_s=4400.0, uses=17, claims=2, pid=99,
)  # fmt: skip


def shown(**changes: object) -> str:
    fields: dict[str, object] = {
        "node": "node-a", "protocol": 1, "started_at_s": 0.0, "holders": (), "standbys": (), "memory": MEMORY,
        "gpus": (), "history": (), **changes,
    }  # fmt: skip
    out = io.StringIO()
    show(NodeStatus(**fields), 4600.0, Console(file=out, width=140))  # type: ignore[arg-type]
    return out.getvalue()


def test_a_held_stage_is_one_row() -> None:
    text = shown(holders=(HELD,))
    row = next(line for line in text.splitlines() if "smollm2/3" in line)
    cells = [cell.strip() for cell in row.strip("│").split("│")]
    assert cells == [
        "0", "smollm2/3", "abababababab", "ready", "5.0 MiB", "peer, 0.25 s", "1 h",
        "3 min 20 s ago", "17", "2",
    ]  # fmt: skip
    assert "node-a: 3.00 GiB of a budget of 12.00 GiB in use (5.0 MiB by segments; limit 16.00 GiB" in text


def test_what_is_known_and_not_held_is_told_with_failures_standbys_and_gpus() -> None:
    name = StageName("file:///bundles/llama", 1)
    text = shown(
        holders=(
            CacheEntry(
                pipeline="p", stage=0, identity="cd" * 32, state="failed", rank=None, nbytes=0,
                source="memory", load_s=0.0, loaded_at_s=0.0, used_at_s=0.0, uses=0, claims=0, pid=0,
                reason="no [source] has it",
            ),
        ),
        history=(
            HistoryEntry(name=name, identity="ef" * 32, at_s=4540.0, uses=3, is_valid=False),
            HistoryEntry(name=name, identity="01" * 32, at_s=4598.0, uses=4),
        ),
        standbys=(StandbyEntry(shape="llama-1", device="cpu", state="idle", pid=7, since_s=4500.0),),
        gpus=(Gpu(index=0, uuid="u", name="H200", total_bytes=140 << 30, free_bytes=100 << 30),),
    )  # fmt: skip
    for words in (
        "failed: no [source] has it", "never", "llama/1", "revoked", "1 min ago", "not held", "2 s ago",
        "standby 7 idle 1 min 40 s: llama-1", "GPU 0 H200: 100.00 GiB of 140.00 GiB free",
    ):  # fmt: skip
        assert words in text
    assert "nothing is held" in shown(gpu_reason="no GPUs are seen: no driver")
    assert "no driver" in shown(gpu_reason="no GPUs are seen: no driver")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "0 s"), (-3.0, "0 s"), (59.9, "59 s"), (60, "1 min"), (3661, "1 h 1 min"), (90061, "1 d 1 h")],
)
def test_lengths_of_time(seconds: float, text: str) -> None:
    assert span(seconds) == text


def test_sizes() -> None:
    assert [size(n) for n in (0, 1 << 19, 1 << 30)] == ["0.0 MiB", "0.5 MiB", "1.00 GiB"]
