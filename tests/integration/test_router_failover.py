"""A router is killed in the middle of streams: with a journal that costs a pause, and no token."""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.keyed_client import KeyedStream
from support.processes import WAIT_S, EmulatedFunction, get, wait_for
from support.servers import RedisServer
from support.tiny_llama import tiny_model, write_folder
from support.wire_nodes import ready_stages

from keystage.bundle.split import split

pytestmark = pytest.mark.slow
TOKENS = 400
PROMPT = [3, 17, 40, 9, 61]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    model = write_folder(tiny_model(max_position_embeddings=1024), folder / "model")
    return split(model, 2, "parameters", folder / "bundle", "tiny")


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="ks", dir="/tmp") as name:
        yield Path(name)


@pytest.fixture
def redis(folder: Path) -> Iterator[RedisServer]:
    with RedisServer(folder / "r") as server:
        yield server


class Cell:
    """Routers and a worker with both stages of the tiny model, which knows the inboxes of two routers."""

    def __init__(self, folder: Path, bundle: Path, **env: str) -> None:
        folder.mkdir(exist_ok=True)
        self.function = EmulatedFunction(folder, "looping", 2)
        self.env = {"KEYSTAGE_BUNDLE": f"file://{bundle}", "KEYSTAGE_PIPELINE": "tiny", **env}
        self.inboxes = [f"ipc://{folder}/run/router{number}" for number in range(2)]
        self.routers = 0
        self.router, self.url = self.begin()
        self.function.start(
            "worker", "w", KEYSTAGE_STAGES="0-1", KEYSTAGE_DEVICE="cpu", KEYSTAGE_DTYPE="fp32",
            KEYSTAGE_THREADS="1", KEYSTAGE_DETERMINISTIC="1",
            **{**self.env, "KEYSTAGE_ROUTER": ",".join(self.inboxes)},
        )  # fmt: skip
        wait_for(lambda: ready_stages(self.url) == {0, 1}, "both stages")

    def begin(self, inbox: int = 0) -> tuple[subprocess.Popen[bytes], str]:
        """Starts a router; the workers of the one before find it."""
        self.routers += 1
        env = {**self.env, "KEYSTAGE_ROUTER": self.inboxes[inbox]}
        return self.function.start("router", f"router{self.routers}", **env)

    def kill(self, how: signal.Signals = signal.SIGKILL) -> None:
        """Ends the router and starts another."""
        self.router.send_signal(how)
        self.router.wait(WAIT_S)
        self.router, self.url = self.begin()


def request(**fields: Any) -> dict[str, Any]:
    return {"prompt": PROMPT, "max_tokens": TOKENS, "ignore_eos": True, **fields}


def undisturbed(url: str, **fields: Any) -> list[int]:
    body = request(return_token_ids=True, **fields)
    status, answer = get(url, json.dumps(body).encode())
    assert status == 200, answer
    ids: list[int] = json.loads(answer)["token_ids"]
    return ids


def check(stream: KeyedStream, url: str, **fields: Any) -> None:
    """The joined stream is what nobody disturbed would have been, whatever seed the router drew."""
    assert stream.last is not None
    assert (stream.last["finish_reason"], stream.last["tokens"]) == ("length", TOKENS)
    assert stream.tokens == undisturbed(url, **{**fields, "seed": stream.last["seed"]})


def longest_pause(stream: KeyedStream) -> float:
    """Seconds from a token to the next at the client: the fail-over is the longest."""
    return max(b - a for a, b in itertools.pairwise(stream.times_s))


def told(what: str, **seconds: float) -> None:
    print(f"fail-over, {what}: " + ", ".join(f"{name} {s:.3f} s" for name, s in seconds.items()))


@pytest.mark.parametrize("temperature", [0, 1], ids=["greedy", "drawn seed"])
def test_a_killed_router_costs_a_reconnect_and_a_pause(
    folder: Path, bundle: Path, redis: RedisServer, temperature: int
) -> None:
    cell = Cell(folder / "a", bundle, KEYSTAGE_REDIS=redis.url, KEYSTAGE_JOURNAL_WAIT_S="5")
    try:
        streams = [KeyedStream(request(temperature=temperature), f"k{n}") for n in range(3)]
        for number, stream in enumerate(streams):
            assert stream.read(cell.url, 20 + 30 * number) == 200
        killed_s = time.monotonic()
        cell.kill()
        up_s = time.monotonic()
        for stream in streams:
            stream.read_through(cell.url)
            check(stream, cell.url, temperature=temperature)
        told("router started anew", process=up_s - killed_s, pause=longest_pause(streams[0]))
        again = KeyedStream(request(temperature=temperature), "k1")
        again.read_through(cell.url)
        assert again.tokens == streams[1].tokens
    finally:
        cell.function.stop()


def test_a_router_killed_again_and_again_loses_no_token(
    folder: Path, bundle: Path, redis: RedisServer
) -> None:
    cell = Cell(folder / "a", bundle, KEYSTAGE_REDIS=redis.url, KEYSTAGE_JOURNAL_WAIT_S="5")
    try:
        stream = KeyedStream(request(temperature=1), "k")
        for count, how in ((1, signal.SIGKILL), (90, signal.SIGTERM), (180, signal.SIGKILL)):
            stream.read(cell.url, count)
            cell.kill(how)
        stream.read_through(cell.url)
        check(stream, cell.url, temperature=1)
    finally:
        cell.function.stop()


def test_another_router_goes_on_while_the_first_is_dead_or_stands_still(
    folder: Path, bundle: Path, redis: RedisServer
) -> None:
    env = {"KEYSTAGE_REDIS": redis.url, "KEYSTAGE_JOURNAL_WAIT_S": "5", "KEYSTAGE_JOURNAL_LEASE_S": "1"}
    first = Cell(folder / "a", bundle, **env)
    second = Cell(folder / "b", bundle, **env)
    try:
        stream = KeyedStream(request(temperature=1), "dead")
        stream.read(first.url, 50)
        first.router.kill()
        first.router.wait(WAIT_S)
        stream.read_through(second.url)
        told("another router, same node", pause=longest_pause(stream))
        check(stream, second.url, temperature=1)
        first.router, first.url = first.begin()

        stream, stuck = (KeyedStream(request(temperature=1), "still") for _ in range(2))
        reading = stuck.connect(first.url)
        stream.read(first.url, 30)
        first.router.send_signal(signal.SIGSTOP)
        stream.read_through(second.url)
        told("another router, the first stands still", pause=longest_pause(stream))
        check(stream, second.url, temperature=1)
        first.router.send_signal(signal.SIGCONT)
        # It finds itself fenced; whoever still reads there gets the answer that the other one made.
        stuck.follow(reading)
        assert stuck.tokens == stream.tokens
        reading.close()
    finally:
        for cell in (first, second):
            cell.router.send_signal(signal.SIGCONT)
            cell.function.stop()


def test_two_routers_of_one_worker_take_over_from_each_other(
    folder: Path, bundle: Path, redis: RedisServer
) -> None:
    cell = Cell(folder / "a", bundle, KEYSTAGE_REDIS=redis.url, KEYSTAGE_JOURNAL_WAIT_S="5")
    try:
        other, url = cell.begin(1)
        wait_for(lambda: ready_stages(url) == {0, 1}, "both stages at the second router")
        streams = [KeyedStream(request(temperature=1), f"k{n}") for n in range(4)]
        for number, stream in enumerate(streams):
            stream.read((cell.url, url)[number % 2], 30 + 5 * number)
        cell.router.kill()
        cell.router.wait(WAIT_S)
        for stream in streams:
            stream.read_through(url)
        told("a router of the same worker", pause=longest_pause(streams[0]))
        cell.router, cell.url = cell.begin()
        other.kill()
        other.wait(WAIT_S)
        wait_for(lambda: ready_stages(cell.url) == {0, 1}, "the worker found the new router")
        for number, stream in enumerate(streams):
            again = KeyedStream(request(temperature=1), f"k{number}")
            again.read_through(cell.url)  # what both had made, from Redis
            assert (again.tokens, again.last) == (stream.tokens, stream.last)
            check(stream, cell.url, temperature=1)
    finally:
        cell.function.stop()


def test_without_redis_the_key_does_not_outlive_the_router(folder: Path, bundle: Path) -> None:
    cell = Cell(folder / "a", bundle)
    try:
        given, greedy, drawn = (
            KeyedStream(request(**fields), key)
            for key, fields in (
                ("given", {"temperature": 1, "seed": 5}),
                ("greedy", {"temperature": 0}),
                ("drawn", {"temperature": 1}),
            )
        )
        for stream in (given, greedy, drawn):
            stream.read(cell.url, 40)
        kept = KeyedStream(request(temperature=1), "drawn")
        kept.read_through(cell.url)  # as long as the router lives, the key has its answer
        assert kept.tokens[: len(drawn.tokens)] == drawn.tokens
        cell.kill()
        for stream, fields in ((given, {"temperature": 1}), (greedy, {"temperature": 0})):
            stream.read_through(cell.url)  # made again from the start, and the same
            check(stream, cell.url, **fields)
        wait_for(lambda: drawn.read(cell.url) != 0, "the new router answers")
        assert drawn.error is not None
        assert drawn.error["code"] == "answer_lost"
    finally:
        cell.function.stop()
