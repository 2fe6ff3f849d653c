"""Real router and worker processes of an emulated pipeline: starting, draining, dying, restarting."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from support.processes import WAIT_S, EmulatedFunction, get, wait_for

from keystage.router.api import RouterStats


@pytest.fixture
def looping() -> Iterator[EmulatedFunction]:
    with tempfile.TemporaryDirectory(prefix="ks", dir="/tmp") as folder:
        function = EmulatedFunction(Path(folder), "looping", 2)
        yield function
        function.stop()


def complete(url: str, max_tokens: int) -> tuple[int, bytes]:
    body = {"model": "em", "prompt": "abc", "max_tokens": max_tokens, "temperature": 0}
    return get(f"{url}/v1/completions", json.dumps(body).encode())


def stats(url: str) -> RouterStats:
    return msgspec.json.decode(get(f"{url}/_/stats")[1], type=RouterStats)


def ready_stages(url: str) -> set[int]:
    status, body = get(f"{url}/_/stats")
    if status != 200:
        return set()
    replicas = msgspec.json.decode(body, type=RouterStats).replicas
    return {stage for r in replicas if r.state == "ready" for stage in r.stages}


def test_health_while_loading_and_ready_only_after_the_warm_up(looping: EmulatedFunction) -> None:
    process, url = looping.start(
        "worker", "w0", wait=False, KEYSTAGE_STAGES="0", KEYSTAGE_DEVICE="emulated:load=3"
    )
    wait_for(lambda: get(f"{url}/_/health")[0] == 200, "health")
    status, state = get(f"{url}/_/ready")
    assert (status, state) in ((503, b"loading"), (503, b"warming"))
    wait_for(lambda: get(f"{url}/_/ready")[0] == 200, "ready")
    process.send_signal(signal.SIGTERM)
    assert process.wait(WAIT_S) == 0


def test_sigterm_while_loading_ends_at_once(looping: EmulatedFunction) -> None:
    process, url = looping.start(
        "worker", "w0", wait=False, KEYSTAGE_STAGES="0", KEYSTAGE_DEVICE="emulated:load=1000"
    )
    wait_for(lambda: get(f"{url}/_/ready") == (503, b"warming"), "warming")
    process.send_signal(signal.SIGTERM)
    assert process.wait(WAIT_S) == 0


@pytest.mark.parametrize(
    ("env", "named"),
    [
        ({"KEYSTAGE_STAGES": "7"}, "KEYSTAGE_STAGES=7"),
        ({"KEYSTAGE_STAGES": "x"}, "KEYSTAGE_STAGES='x'"),
        ({"KEYSTAGE_DEVICE": "emulated:gamma=1"}, "gamma"),
        ({"KEYSTAGE_DEVICE": "cpu"}, "KEYSTAGE_DEVICE=cpu"),
        ({"KEYSTAGE_BUNDLE": "file:///nowhere"}, "nowhere"),
        ({"KEYSTAGE_RUN": "/nowhere/run"}, "/nowhere/run"),
        ({"KEYSTAGE_HTTP": "nonsense"}, "nonsense"),
    ],
)
def test_a_worker_that_cannot_start_says_why_and_exits_2(
    looping: EmulatedFunction, env: dict[str, str], named: str
) -> None:
    process, _ = looping.start("worker", "w0", wait=False, **{"KEYSTAGE_STAGES": "0", **env})
    _, said = process.communicate(timeout=WAIT_S)
    assert process.returncode == 2, said
    assert named in said.decode()
    assert "Traceback" not in said.decode()


def test_a_router_that_cannot_start_says_why_and_exits_2(looping: EmulatedFunction) -> None:
    process, _ = looping.start("router", "r", wait=False, KEYSTAGE_BUNDLE="file:///nowhere")
    _, said = process.communicate(timeout=WAIT_S)
    assert process.returncode == 2, said
    assert "nowhere" in said.decode()
    assert "Traceback" not in said.decode()


def test_the_end_of_the_lifeline_ends_a_worker(looping: EmulatedFunction) -> None:
    read_end, write_end = os.pipe()
    process, _ = looping.start(
        "worker", "w0", pass_fds=(read_end,), KEYSTAGE_STAGES="0", KEYSTAGE_LIFELINE_FD=str(read_end)
    )
    os.close(read_end)
    assert process.poll() is None
    os.close(write_end)
    assert process.wait(WAIT_S) == 1


def test_sigterm_with_a_held_session_finishes_it_first(looping: EmulatedFunction) -> None:
    _, url = looping.start("router", "router")
    worker, _ = looping.start("worker", "w0", KEYSTAGE_STAGES="0-1", KEYSTAGE_DEVICE="emulated:beta=0.01")
    wait_for(lambda: ready_stages(url) == {0, 1}, "both stages")
    answers: list[tuple[int, bytes]] = []
    client = threading.Thread(target=lambda: answers.append(complete(url, 60)))
    client.start()
    wait_for(lambda: sum(r.held_slots for r in stats(url).replicas), "a held session")
    worker.send_signal(signal.SIGTERM)
    client.join(WAIT_S)
    assert worker.wait(WAIT_S) == 0
    [(status, body)] = answers
    assert status == 200, body
    assert json.loads(body)["usage"]["completion_tokens"] == 60
    wait_for(lambda: not stats(url).replicas, "the worker's goodbye")
    assert stats(url).replayed_tokens == 0


def test_a_killed_worker_is_replaced_and_its_session_replayed(looping: EmulatedFunction) -> None:
    _, url = looping.start("router", "router")
    looping.start("worker", "w0", KEYSTAGE_STAGES="0", KEYSTAGE_DEVICE="emulated:beta=0.005")
    worker, _ = looping.start("worker", "w1", KEYSTAGE_STAGES="1", KEYSTAGE_DEVICE="emulated:beta=0.005")
    wait_for(lambda: ready_stages(url) == {0, 1}, "both stages")
    undisturbed = json.loads(complete(url, 60)[1])["usage"]
    answers: list[tuple[int, bytes]] = []
    client = threading.Thread(target=lambda: answers.append(complete(url, 60)))
    client.start()
    wait_for(lambda: sum(r.held_slots for r in stats(url).replicas), "a held session")
    worker.kill()
    # The next one comes under the same address, as after a restart by a supervisor.
    looping.start("worker", "w1", KEYSTAGE_STAGES="1")
    client.join(WAIT_S)
    [(status, body)] = answers
    assert status == 200, body
    assert json.loads(body)["usage"] == undisturbed
    assert stats(url).replayed_tokens > 0
    wait_for(lambda: not sum(r.held_slots for r in stats(url).replicas), "no credit held")


@pytest.mark.slow
def test_workers_introduce_themselves_to_a_restarted_router(looping: EmulatedFunction) -> None:
    router, url = looping.start("router", "router")
    _, worker_url = looping.start("worker", "w0", KEYSTAGE_STAGES="0")
    looping.start("worker", "w1", KEYSTAGE_STAGES="1", KEYSTAGE_DEVICE="emulated:beta=0.01")
    wait_for(lambda: ready_stages(url) == {0, 1}, "both stages")
    lost = threading.Thread(target=lambda: complete(url, 2000))
    lost.start()
    wait_for(lambda: sum(r.held_slots for r in stats(url).replicas), "a held session")
    router.kill()
    lost.join(WAIT_S)
    _, url = looping.start("router", "router", wait=False)
    wait_for(lambda: ready_stages(url) == {0, 1}, "both stages at the new router")
    status, body = complete(url, 5)
    assert status == 200, body
    wait_for(
        lambda: (
            b'keystage_worker_sessions{pipeline="em",replica="w0"} 0.0' in get(f"{worker_url}/metrics")[1]
        ),
        "the lost session is gone from the worker",
    )
