"""Pipelines over two emulated nodes: the same answers as on one, nothing shared, deaths replayed."""

from __future__ import annotations

import json
import os
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.processes import WAIT_S, get, wait_for
from support.tiny_llama import tiny_model, write_folder
from support.wire_nodes import NodesFunction, mapped_rings, ready_stages, stats

from keystage.bundle.split import split
from keystage.wire.secret import create_secret

PROMPTS = [[3 + i, 17, 40, 5 * i + 1] + [7 + i] * (9 * i) for i in range(5)]


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="ks", dir="/tmp") as name:
        yield Path(name)


def complete(url: str, model: str, prompt: list[int], max_tokens: int, **fields: Any) -> list[int]:
    body = {
        "model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True, **fields,
    }  # fmt: skip
    status, answer = get(f"{url}/v1/completions", json.dumps(body).encode())
    assert status == 200, answer
    ids: list[int] = json.loads(answer)["choices"][0]["token_ids"]
    return ids


def complete_all(url: str, model: str, max_tokens: int) -> list[list[int]]:
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        return list(pool.map(lambda prompt: complete(url, model, prompt, max_tokens), PROMPTS))


@pytest.mark.slow
def test_a_looping_pipeline_over_two_nodes_gives_the_tokens_of_one_process(folder: Path) -> None:
    # The longest prompt is 40 * 768 * 4 bytes and is fetched; decode is small and comes with its message.
    model = write_folder(tiny_model(hidden_size=768), folder / "model")
    bundle = split(model, 3, "parameters", folder / "bundle", "tiny")
    function = NodesFunction(folder, "looping", 3, bundle=(bundle, "tiny"))
    try:
        _, url = function.on("a", "router", "router")
        env = {"KEYSTAGE_DEVICE": "cpu", "KEYSTAGE_DTYPE": "fp32"}
        whole, _ = function.on("a", "worker", "whole", KEYSTAGE_STAGES="0-2", **env)
        wait_for(lambda: ready_stages(url) == {0, 1, 2}, "all stages in one process")
        expected = complete_all(url, "tiny", 40)
        whole.terminate()
        assert whole.wait(WAIT_S) == 0
        parts = [
            function.on(node, "worker", f"w{stage}", KEYSTAGE_STAGES=str(stage), **env)[0]
            for stage, node in enumerate(("a", "b", "a"))
        ]
        wait_for(lambda: ready_stages(url) == {0, 1, 2}, "all stages on two nodes")
        assert complete_all(url, "tiny", 40) == expected
        assert stats(url).replayed_tokens == 0
        # Every hop was between nodes: each has its own ring mapped and no other.
        rings = [mapped_rings(process.pid) for process in parts]
        assert [len(mapped) for mapped in rings] == [1, 1, 1]
        assert len(set.union(*rings)) == 3
    finally:
        function.stop()


def test_neighbours_still_use_the_ring_when_other_nodes_could_reach_them(folder: Path) -> None:
    function = NodesFunction(folder, "looping", 2)
    try:
        _, url = function.on("a", "router", "router")
        function.on("a", "worker", "w0", KEYSTAGE_STAGES="0")
        second, _ = function.on("a", "worker", "w1", KEYSTAGE_STAGES="1")
        wait_for(lambda: ready_stages(url) == {0, 1}, "both stages")
        assert len(complete(url, "em", [1, 2, 3], 20)) == 20
        assert len(mapped_rings(second.pid)) == 2
    finally:
        function.stop()


@pytest.mark.slow
@pytest.mark.parametrize("plain", [False, True], ids=["tls", "plain"])
def test_a_single_pass_pipeline_over_two_nodes_hands_every_byte_on(folder: Path, plain: bool) -> None:
    function = NodesFunction(folder, "single-pass", 3, plain=plain)
    try:
        _, url = function.on("a", "router", "router")
        workers = [
            # The ring holds five inputs: the rest waits for room, as on one node.
            function.on(
                node, "worker", f"w{stage}", KEYSTAGE_STAGES=str(stage), KEYSTAGE_RING_BYTES=str(1 << 21)
            )[0]
            for stage, node in enumerate(("a", "b", "a"))
        ]
        wait_for(lambda: ready_stages(url) == {0, 1, 2}, "all stages")
        items = [os.urandom(size) for size in (1, 70_000, 400_000) for _ in range(8)]
        with ThreadPoolExecutor(12) as pool:
            answers = list(pool.map(lambda item: get(f"{url}/", item), items))
        assert [status for status, _ in answers] == [200] * len(items)
        assert [body for _, body in answers] == items
        assert [len(mapped_rings(process.pid)) for process in workers] == [1, 1, 1]
        for process in workers:  # nothing is left in a ring, so a drain ends at once
            process.terminate()
            assert process.wait(WAIT_S) == 0
    finally:
        function.stop()


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_worker_of_another_node_costs_time_but_no_token(folder: Path, victim: int) -> None:
    function = NodesFunction(folder, "looping", 2)
    try:
        _, url = function.on("a", "router", "router")
        device = {"KEYSTAGE_DEVICE": "emulated:beta=0.005"}
        nodes = ("b", "c")
        workers = [
            function.on(node, "worker", f"w{stage}", KEYSTAGE_STAGES=str(stage), **device)[0]
            for stage, node in enumerate(nodes)
        ]
        wait_for(lambda: ready_stages(url) == {0, 1}, "both stages")
        tokens: list[list[int]] = []
        client = threading.Thread(target=lambda: tokens.append(complete(url, "em", [1, 2, 3], 100)))
        client.start()
        wait_for(lambda: sum(r.held_slots for r in stats(url).replicas), "a held session")
        workers[victim].kill()
        # It comes again under its name, but on another port.
        function.on(nodes[victim], "worker", f"w{victim}", KEYSTAGE_STAGES=str(victim))
        client.join(WAIT_S)
        assert [len(ids) for ids in tokens] == [100]
        assert stats(url).replayed_tokens > 0
        wait_for(lambda: not sum(r.held_slots for r in stats(url).replicas), "no credit held")
        assert len(stats(url).replicas) == 2
    finally:
        function.stop()


def test_a_router_started_again_is_told_of_workers_on_other_nodes(folder: Path) -> None:
    function = NodesFunction(folder, "looping", 1)
    try:
        router, url = function.on("a", "router", "router")
        function.on("b", "worker", "w0", KEYSTAGE_STAGES="0")
        wait_for(lambda: ready_stages(url) == {0}, "the stage")
        router.kill()
        router.wait(WAIT_S)
        _, url = function.on("a", "router", "router", wait=False)
        wait_for(lambda: ready_stages(url) == {0}, "the stage at the new router")
        assert len(complete(url, "em", [1, 2], 5)) == 5
    finally:
        function.stop()


def test_a_worker_that_the_router_cannot_reach_is_refused_by_name(folder: Path) -> None:
    function = NodesFunction(folder, "looping", 1)
    alone = {"KEYSTAGE_ROUTER": f"ipc://{folder}/run/router", "KEYSTAGE_WIRE_HOST": ""}
    try:
        router, url = function.on("a", "router", "router", wait=False, **alone)
        wait_for(lambda: get(f"{url}/_/ready")[0] == 200, "the router")
        function.on("b", "worker", "lonely", KEYSTAGE_STAGES="0", **alone)
        function.on("a", "worker", "near", KEYSTAGE_STAGES="0", **alone)
        wait_for(lambda: [r.replica for r in stats(url).replicas] == ["near"], "the neighbour")
        router.terminate()
        _, said = router.communicate(timeout=WAIT_S)
        assert said.count(b"refused a worker: lonely") == 1  # however often it is heard of
        assert b"KEYSTAGE_WIRE_HOST is not set" in said
    finally:
        function.stop()


@pytest.mark.slow
def test_a_single_pass_worker_killed_in_a_batch_costs_time_but_no_item(folder: Path) -> None:
    function = NodesFunction(folder, "single-pass", 2)
    try:
        _, url = function.on("a", "router", "router")
        device = {"KEYSTAGE_DEVICE": "emulated:beta=0.05", "KEYSTAGE_MAX_BATCH": "4"}
        function.on("b", "worker", "w0", KEYSTAGE_STAGES="0", **device)
        second, _ = function.on("c", "worker", "w1", KEYSTAGE_STAGES="1", **device)
        wait_for(lambda: ready_stages(url) == {0, 1}, "both stages")
        items = [os.urandom(300_000) for _ in range(24)]
        with ThreadPoolExecutor(len(items)) as pool:
            answers = [pool.submit(get, f"{url}/", item) for item in items]
            wait_for(lambda: stats(url).stages[1].in_flight, "items at the second stage")
            second.kill()
            function.on("c", "worker", "w1", KEYSTAGE_STAGES="1")
            assert [answer.result(WAIT_S) for answer in answers] == [(200, item) for item in items]
    finally:
        function.stop()


@pytest.mark.slow
def test_a_worker_with_another_secret_never_joins_and_the_router_says_why(folder: Path) -> None:
    function = NodesFunction(folder, "looping", 1)
    try:
        router, url = function.on("a", "router", "router", wait=False)
        wait_for(lambda: get(f"{url}/_/ready")[0] == 200, "the router")
        other = folder / "other.key"
        create_secret(other)
        function.on("b", "worker", "stranger", KEYSTAGE_STAGES="0", KEYSTAGE_WIRE_KEY_FILE=str(other))
        function.on("b", "worker", "friend", KEYSTAGE_STAGES="0")
        wait_for(lambda: [r.replica for r in stats(url).replicas] == ["friend"], "the friend")
        router.terminate()
        _, said = router.communicate(timeout=WAIT_S)
        assert b"refused at tcp://127.0.0.1" in said
        assert b"KEYSTAGE_WIRE_KEY_FILE is not ours" in said
    finally:
        function.stop()


@pytest.mark.parametrize(
    ("module", "env", "named"),
    [
        ("worker", {"KEYSTAGE_WIRE_KEY_FILE": "/nowhere/key"}, "/nowhere/key cannot be read"),
        ("worker", {"KEYSTAGE_WIRE_HOST": "203.0.113.1"}, "KEYSTAGE_WIRE_HOST"),
        ("router", {"KEYSTAGE_WIRE_KEY_FILE": "/nowhere/key"}, "/nowhere/key cannot be read"),
        ("router", {"KEYSTAGE_ROUTER": "tcp://127.0.0.1"}, "no HOST:PORT"),
    ],
)
def test_a_setting_that_cannot_be_used_is_named_and_ends_the_process(
    folder: Path, module: str, env: dict[str, str], named: str
) -> None:
    function = NodesFunction(folder, "looping", 1)
    try:
        process, _ = function.on("a", module, "p", wait=False, KEYSTAGE_STAGES="0", **env)
        _, said = process.communicate(timeout=WAIT_S)
        assert process.returncode == 2, said
        assert named in said.decode()
        assert "Traceback" not in said.decode()
    finally:
        function.stop()
