"""Small parts of the daemon: whom it lets in, what it reads from environments, what it counts."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from pydantic import ValidationError

from keystage.bundle.errors import BundleError
from keystage.keysmanager import daemon_needs
from keystage.keysmanager.api import (
    CacheEntry,
    Gpu,
    HistoryEntry,
    Memory,
    NodeStatus,
    Parameters,
    StageName,
    StandbyEntry,
)
from keystage.keysmanager.config import KeysManagerConfig
from keystage.keysmanager.daemon_names import Names
from keystage.keysmanager.door import is_allowed
from keystage.keysmanager.metrics import Counts, text

STAGES = {"KEYSTAGE_STAGES": "2", "KEYSTAGE_BUNDLE": "file:///b"}


@pytest.mark.parametrize(
    ("uid", "own", "allowed"), [(1000, 1000, True), (0, 1000, True), (1001, 1000, False), (1000, 0, False)]
)
def test_the_same_user_and_root_may_ask(uid: int, own: int, allowed: bool) -> None:
    assert is_allowed(uid, own) is allowed


@pytest.mark.parametrize(
    ("env", "names", "device", "dtype", "prepare"),
    [
        ({}, (), "", "", "none"),
        ({"KEYSTAGE_BUNDLE": "file:///b"}, (), "", "", "none"),
        ({**STAGES, "KEYSTAGE_DEVICE": "emulated:alpha=1"}, (), "", "", "none"),
        (STAGES, (StageName("file:///b", 2),), "cpu", "", "cpu"),
        ({**STAGES, "KEYSTAGE_BUNDLE": "/b"}, (StageName("file:///b", 2),), "cpu", "", "cpu"),
        (
            {**STAGES, "KEYSTAGE_STAGES": "0-1", "KEYSTAGE_DEVICE": "cuda:1", "KEYSTAGE_DTYPE": "bf16"},
            (StageName("file:///b", 0), StageName("file:///b", 1)), "cuda:1", "bfloat16", "none",
        ),
    ],
)  # fmt: skip
def test_needs_are_read_from_the_replicas_environment(
    env: dict[str, str], names: tuple[StageName, ...], device: str, dtype: str, prepare: str
) -> None:
    found = daemon_needs.of(env)
    assert (found.names, found.device, found.dtype, found.prepare) == (names, device, dtype, prepare)


@pytest.mark.parametrize(
    ("env", "word"),
    [
        ({"KEYSTAGE_STAGES": "1"}, "KEYSTAGE_BUNDLE"),
        ({**STAGES, "KEYSTAGE_STAGES": "two"}, "KEYSTAGE_STAGES='two'"),
        ({**STAGES, "KEYSTAGE_DTYPE": "int3"}, "KEYSTAGE_DTYPE=int3"),
    ],
)
def test_environments_that_cannot_work_are_named(env: dict[str, str], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        daemon_needs.of(env)


def test_settings_take_empty_values_as_unset_and_need_a_token_for_tcp(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in {
        "MEMORY": "",
        "PEERS": "http://a:1, http://b:2/",
        "TOKEN_FILE": str(tmp_path),
    }.items():
        monkeypatch.setenv(f"KEYSTAGE_KEYSMANAGER_{name}", value)
    monkeypatch.setenv("KEYSTAGE_HOME_IS_REMOTE", "")
    config = KeysManagerConfig()
    assert (config.keysmanager_memory, config.home_is_remote) == (None, None)
    assert config.peers == ("http://a:1", "http://b:2")
    with pytest.raises(ValueError, match="cannot be read"):
        config.token()
    monkeypatch.setenv("KEYSTAGE_KEYSMANAGER_TOKEN_FILE", "")
    with pytest.raises(ValidationError, match="without a token"):
        KeysManagerConfig()
    monkeypatch.setenv("KEYSTAGE_KEYSMANAGER_PEERS", "b:2")
    with pytest.raises(ValidationError, match="peer 'b:2'"):
        KeysManagerConfig()


class Shelf:
    """A catalog in memory."""

    def __init__(self) -> None:
        self.identities: dict[StageName, str] = {}

    def resolve(self, name: StageName) -> tuple[Parameters, bytes]:
        if name not in self.identities:
            raise BundleError(f"{name.bundle}: no such bundle")
        found = self.identities[name]
        return Parameters(
            name=name, pipeline="p", identity=found, dtype="float32", file="f", nbytes=1, chunks=(found,)
        ), found.encode()


def test_an_identity_is_replaced_when_no_name_stands_for_it_any_longer() -> None:
    async def body() -> None:
        shelf, replaced = Shelf(), list[str]()
        one, two = StageName("file:///one", 0), StageName("file:///two", 0)
        shelf.identities = {one: "old", two: "old"}
        names = Names(shelf, replaced.append)
        await names.resolve_known([one, two, StageName("file:///three", 0)])
        shelf.identities[one] = "new"
        await names.recheck()
        assert replaced == []
        shelf.identities[two] = "newer"
        await names.recheck()
        assert replaced == ["old"]
        assert (names.parameters("old"), names.pipeline("old")) == (None, b"old")
        del shelf.identities[two]
        await names.recheck()
        assert names.parameters("newer") is not None
        with pytest.raises(BundleError, match="no bundle known here"):
            names.pipeline("never")
        names.close()

    asyncio.run(body())


def test_metrics_tell_starts_by_phase_and_what_is_held() -> None:
    counts = Counts()
    counts.starts["holder"] += 1
    counts.refusals[507] += 1
    counts.loaded("disk", 4096, 0.5)
    for seconds in (0.02, 0.031, 120.0):
        counts.reached("p", "holder", "mapped", seconds)
    entry = CacheEntry(
        pipeline="p", stage=1, identity="a" * 64, state="ready", rank=0, nbytes=4096, source="disk",
        load_s=0.5, loaded_at_s=1.0, used_at_s=2.0, uses=3, claims=2, pid=4,
    )  # fmt: skip
    status = NodeStatus(
        node="n", protocol=1, started_at_s=0.0, holders=(entry,),
        standbys=(StandbyEntry(shape="s", device="cpu", state="idle", pid=5, since_s=0.0),),
        memory=Memory(limit_bytes=100, used_bytes=40, budget_bytes=85, segment_bytes=4096, origin="host"),
        gpus=(Gpu(index=0, uuid="GPU-1", name="g", total_bytes=10, free_bytes=7),),
        history=(HistoryEntry(name=StageName("file:///b", 0), identity="a", at_s=0.0, uses=1),),
    )  # fmt: skip
    lines = text(status, counts, restarts=6).decode().splitlines()
    start = 'keystage_start_seconds_bucket{le="%s",node="n",phase="mapped",pipeline="p",via="holder"} %s'
    for bound, count in (("0.01", "0.0"), ("0.02", "1.0"), ("0.05", "2.0"), ("60.0", "2.0"), ("+Inf", "3.0")):
        assert start % (bound, count) in lines
    for line in (
        'keystage_start_seconds_count{node="n",phase="mapped",pipeline="p",via="holder"} 3.0',
        'keystage_starts_total{node="n",via="holder"} 1.0',
        'keystage_start_refusals_total{node="n",reason="507"} 1.0',
        'keystage_load_bytes_total{node="n",source="disk"} 4096.0',
        'keystage_holder_claims{node="n",pipeline="p",stage="1"} 2.0',
        'keystage_memory_budget_bytes{node="n"} 85.0',
        'keystage_fork_server_restarts_total{node="n"} 6.0',
        'keystage_gpu_free_bytes{gpu="GPU-1",node="n"} 7.0',
        'keystage_standbys{node="n"} 1.0',
    ):
        assert line in lines
