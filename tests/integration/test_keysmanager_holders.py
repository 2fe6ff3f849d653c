"""Holders: one copy of a stage for all replicas forked from them, and what they refuse to hold."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from support.keysmanager_forks import (
    WAIT_S,
    Forks,
    mappings,
    parameters_of,
    pss_bytes,
    random_bundle,
    raw_segment,
    receive,
    status_bytes,
    wait_pid,
)
from support.processes import wait_for

from keystage.bundle import store
from keystage.keysmanager import segment
from keystage.keysmanager.api import Get, Held, Progress, Refused, Segment
from keystage.keysmanager.channel import Channel
from keystage.models.base import Row
from keystage.models.loading import load_stage

MIB = 1 << 20
IDS = [3, 14, 15, 92, 65]


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    with Forks() as running:
        yield running


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """6 MiB, two stages."""
    return random_bundle(tmp_path_factory.mktemp("b") / "small", hidden=256, width=640, vocab=997)


@pytest.fixture(scope="module")
def holder(forks: Forks, bundle: Path) -> Channel:
    channel, held = forks.hold(bundle)
    assert isinstance(held, Held)
    assert held.packed_bytes > 0.9 * parameters_of(bundle).nbytes
    return channel


@pytest.fixture(scope="module")
def fresh(bundle: Path) -> list[list[float]]:
    """What a freshly loaded stage answers to `IDS`, on one thread as the children."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    model = load_stage(bundle, store.load(bundle), 0)
    model.open(1, len(IDS) + 1)
    first = model.forward(torch.tensor(IDS), [Row(1, 0, len(IDS))], [0])
    second = model.forward(torch.tensor(IDS[:1]), [Row(1, len(IDS), 1)], [0])
    torch.set_num_threads(threads)
    return [first[0].tolist(), second[0].tolist()]


@pytest.mark.slow
def test_a_forked_child_computes_what_a_fresh_worker_does(
    forks: Forks, holder: Channel, bundle: Path, fresh: list[list[float]]
) -> None:
    for _ in range(2):
        replica = forks.spawn(holder)
        assert replica.ask("load", str(bundle), 0, "cpu", "float32") == "cpu"
        assert replica.ask("logits", IDS) == fresh
        assert replica.ask("load", str(bundle), 0, "cpu", "float32") == ""  # it had one to give
        phases = [receive(replica.claim) for _ in range(2)]
        assert [p.phase for p in phases if isinstance(p, Progress)] == ["forked", "mapped"]


def test_a_child_of_the_fork_server_has_no_stage_to_give(forks: Forks, bundle: Path) -> None:
    assert forks.spawn().ask("load", str(bundle), 0, "cpu", "float32") == ""


def test_another_stage_or_type_is_not_given(
    forks: Forks, holder: Channel, bundle: Path, tmp_path: Path
) -> None:
    other = random_bundle(tmp_path, hidden=128, width=320, vocab=997)
    replica = forks.spawn(holder)
    assert replica.ask("load", str(other), 0, "cpu", "float32") == ""
    assert replica.ask("load", str(bundle), 5, "cpu", "float32") == ""
    assert len(list(mappings(replica.pid, "keystage-packed"))) > 0
    assert replica.ask("load", str(bundle), 0, "cpu", "bfloat16") == ""
    # Nothing of it will be used here, so nothing of it stays mapped.
    assert list(mappings(replica.pid, "keystage-packed")) == []


def test_a_shared_claim_is_kept_for_life_and_goes_with_the_process(
    forks: Forks, holder: Channel, bundle: Path
) -> None:
    replica = forks.spawn(holder)
    replica.ask("load", str(bundle), 0, "cpu", "float32")
    replica.ask("release")
    replica.ask("report", "ready")
    told = [receive(replica.claim) for _ in range(3)]
    assert [p.phase for p in told if isinstance(p, Progress)] == ["forked", "mapped", "ready"]
    os.kill(replica.pid, signal.SIGKILL)
    assert replica.claim.receive() is None


@pytest.mark.parametrize("prepare", ["cpu", "none"])
def test_a_private_replica_has_its_own_memory_and_lets_go(
    forks: Forks, bundle: Path, fresh: list[list[float]], prepare: str
) -> None:
    channel, held = forks.hold(bundle, prepare="cpu" if prepare == "cpu" else "none")
    assert isinstance(held, Held)
    assert (held.packed_bytes > 0) is (prepare == "cpu")
    replica = forks.spawn(channel, sharing="private")
    assert len(list(mappings(replica.pid, "keystage-"))) > 0
    assert replica.ask("load", str(bundle), 0, "cpu", "float32") == "cpu"
    assert list(mappings(replica.pid, "keystage-")) == []
    assert replica.ask("logits", IDS) == fresh
    replica.ask("release")
    while (received := replica.claim.receive()) is not None:
        assert isinstance(received[0], Progress)


def test_a_holder_that_prepared_nothing_gives_the_raw_bytes(
    forks: Forks, bundle: Path, fresh: list[list[float]]
) -> None:
    channel, held = forks.hold(bundle, prepare="none")
    assert isinstance(held, Held)
    assert held.packed_bytes == 0
    replica = forks.spawn(channel)
    assert [e["line"].split()[1] for e in mappings(replica.pid, "keystage-raw")] == ["r--s"]
    assert replica.ask("load", str(bundle), 0, "cpu", "float32") == "cpu"
    assert replica.ask("logits", IDS) == fresh
    # Packed for itself: the raw bytes are of no use any more.
    assert list(mappings(replica.pid, "keystage-raw")) == []


def test_what_needs_no_packing_is_used_in_place(forks: Forks, tmp_path: Path) -> None:
    half = random_bundle(tmp_path, hidden=256, width=640, vocab=997, dtype="float16")
    channel, held = forks.hold(half, dtype="float16")
    assert isinstance(held, Held)
    assert held.packed_bytes == 0
    replica = forks.spawn(channel)
    assert replica.ask("load", str(half), 0, "cpu", "float16") == "cpu"
    expected = forks.spawn(channel)
    expected.ask("load", str(half), 0, "cpu", "float16")
    assert replica.ask("logits", IDS) == expected.ask("logits", IDS)
    assert len(list(mappings(replica.pid, "keystage-raw"))) == 1


def test_the_switch_keeps_parameters_on_the_host(
    forks: Forks, holder: Channel, bundle: Path, fresh: list[list[float]]
) -> None:
    replica = forks.spawn(holder, KEYSTAGE_DEVICE_COPY="0")
    assert replica.ask("load", str(bundle), 0, "cuda:0", "float32") == "cpu"
    assert replica.ask("logits", IDS) == fresh


@contextlib.contextmanager
def daemon_with(path: Path, bundle: Path) -> Iterator[list[Channel]]:
    """Answers every `Get` at a socket with the stage's segment; gives its ends of the claims."""
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listening.bind(str(path))
    listening.listen()
    claims: list[Channel] = []

    def serve() -> None:
        with contextlib.suppress(OSError):  # closed below
            while True:
                channel = Channel(listening.accept()[0])
                claims.append(channel)
                received = channel.receive()
                assert received is not None
                assert isinstance(received[0], Get)
                stage = received[0].name.stage
                fd = raw_segment(bundle, stage)
                channel.send(Segment(parameters=parameters_of(bundle, stage)), (fd,))
                os.close(fd)

    serving = threading.Thread(target=serve)
    serving.start()
    try:
        yield claims
    finally:
        listening.shutdown(socket.SHUT_RDWR)
        serving.join(WAIT_S)
        listening.close()
        for channel in claims:
            channel.close()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_worker_of_several_stages_gets_them_from_the_daemon(
    forks: Forks, tmp_path: Path, dtype: str
) -> None:
    several = random_bundle(tmp_path / "b", hidden=128, layers=2, stages=2, dtype=dtype)
    env = {
        "KEYSTAGE_KEYSMANAGER": str(tmp_path / "k"),
        "KEYSTAGE_BUNDLE": f"file://{several}",
        "KEYSTAGE_STAGES": "0-1",
    }
    with daemon_with(tmp_path / "k", several) as claims:
        replica = forks.spawn(**env)
        for stage in (0, 1):
            assert replica.ask("load", str(several), stage, "cpu", dtype) == "cpu"
        assert len(claims) == 2
        if dtype == "float16":  # used in place, for life
            assert len(list(mappings(replica.pid, "keystage-raw"))) == 2
            os.kill(replica.pid, signal.SIGKILL)
        for claim in claims:
            assert claim.receive() is None
    # Without a daemon the worker reads its bundle.
    assert forks.spawn(**env).ask("load", str(several), 0, "cpu", dtype) == ""


@pytest.mark.slow
def test_replicas_outlive_their_holder_and_holders_the_fork_server(
    bundle: Path, fresh: list[list[float]]
) -> None:
    with Forks() as mortal:
        (one, first), (two, second) = mortal.hold(bundle), mortal.hold(bundle)
        assert isinstance(first, Held)
        assert isinstance(second, Held)
        replica = mortal.spawn(one)
        assert replica.ask("load", str(bundle), 0, "cpu", "float32") == "cpu"
        os.kill(first.pid, signal.SIGKILL)
        assert one.receive() is None
        wait_for(lambda: not Path(f"/proc/{first.pid}").exists(), "the holder reaped by the kernel")
        mortal.process.kill()
        mortal.process.wait(WAIT_S)
        assert replica.ask("logits", IDS) == fresh
        assert replica.ask("facts")["parent"] == os.getpid()
        assert mortal.spawn(two).ask("load", str(bundle), 0, "cpu", "float32") == "cpu"
        two.close()
        assert os.waitstatus_to_exitcode(wait_pid(second.pid)) == 0


def test_what_a_holder_was_not_promised_it_refuses(forks: Forks, bundle: Path, tmp_path: Path) -> None:
    right = parameters_of(bundle)
    other = random_bundle(tmp_path, hidden=128, width=320, vocab=997)

    def refusal(**changes: object) -> str:
        channel, answer = forks.hold(bundle, **changes)  # type: ignore[arg-type]
        assert isinstance(answer, Refused)
        assert channel.receive() is None  # it has ended
        return answer.reason

    wrong = msgspec.structs.replace(right, identity="0" * 64)
    assert "the segment holds 000000000000" in refusal(parameters=wrong)
    assert "bytes for stage-00.safetensors" in refusal(fd=raw_segment(other))
    draft = segment.create(right.nbytes, "unsealed")
    assert "SHRINK, GROW, WRITE missing" in refusal(fd=os.dup(draft.fileno()))
    draft.discard()
    draft = segment.create(right.nbytes, "zeros")
    assert "safetensors" in refusal(fd=draft.seal())
    assert "float99" in refusal(dtype="float99")


def test_equal_parameters_of_another_configuration_are_not_handed_out(forks: Forks, tmp_path: Path) -> None:
    """Hashes name the parameters, not what a model makes of them."""
    bundle = random_bundle(tmp_path, hidden=128, width=320, vocab=997)
    channel, held = forks.hold(bundle)
    assert isinstance(held, Held)
    same, other = forks.spawn(channel), forks.spawn(channel)
    assert same.ask("load", str(bundle), 0, "cpu", "float32") == "cpu"
    pipeline = store.load(bundle)
    changed = msgspec.structs.replace(pipeline, config={**pipeline.config, "rms_norm_eps": 0.5})
    store.write(bundle, changed)
    assert other.ask("load", str(bundle), 0, "cpu", "float32") == ""


@pytest.mark.slow
def test_eight_replicas_of_one_stage_share_one_copy(forks: Forks, tmp_path: Path) -> None:
    """1.3 times the parameters is allowed for all eight, and nothing of it anonymous.

    172 MiB, or as many layers as KEYSTAGE_TEST_LAYERS says (18 are 1 GB).
    """
    layers = int(os.environ.get("KEYSTAGE_TEST_LAYERS", "3"))
    bundle = random_bundle(tmp_path, hidden=1024, width=3072, layers=layers, vocab=4000)
    size = parameters_of(bundle).nbytes
    assert size > 128 * MIB
    base = forks.spawn()
    base.ask("facts")
    base_bytes = status_bytes(base.pid, "RssAnon")
    channel, held = forks.hold(bundle)
    assert isinstance(held, Held)
    replicas = [forks.spawn(channel) for _ in range(8)]
    answers = []
    for replica in replicas:
        assert replica.ask("load", str(bundle), 0, "cpu", "float32") == "cpu"
        answers.append(replica.ask("logits", IDS))
    assert all(answer == answers[0] for answer in answers)
    pids = [replica.pid for replica in replicas]
    mapped = [sum(int(e["Rss"].split()[0]) * 1024 for e in mappings(pid, "keystage-")) for pid in pids]
    assert min(mapped) > 0.85 * size  # each has read nearly all of it (the embedding but for 5 rows)
    shares = sum(pss_bytes(pid, "keystage-") for pid in (*pids, held.pid))
    grown = [status_bytes(pid, "RssAnon") - base_bytes for pid in (*pids, held.pid)]
    print(f"{size} bytes: PSS of all {shares}, anonymous memory grew by at most {max(grown)} bytes")
    assert shares < 1.3 * size
    assert max(grown) < 0.15 * size
    assert shares + 8 * max(0, *grown) < 2.3 * size
    flags = {e["line"].split()[1] for pid in pids for e in mappings(pid, "keystage-")}
    assert flags == {"r--s"}
