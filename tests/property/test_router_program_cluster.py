"""Stream programs over router and workers, in any order of events: answers are right, nothing is left.

The one-process run is the truth. Workers die, drain and join at any moment, clients go away, user code
fails; a failure ends the request it belongs to and no other.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.program_cluster import Cluster
from support.program_handlers import write_fork

from keystage.bundle.program import bundle_program
from keystage.streams.handler import open_allowed
from keystage.streams.local import run_local

PATH = "fork_handler:program"


@pytest.fixture(scope="module")
def handler(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_fork(tmp_path_factory.mktemp("handler"))


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory, handler: str) -> Path:
    return bundle_program(PATH, tmp_path_factory.mktemp("bundles") / "b", handler=handler)


@pytest.fixture
def cluster(bundle: Path, handler: str) -> Iterator[Cluster]:
    made = Cluster(bundle, handler=handler)
    yield made
    made.close()


def body(x: float, rounds: int, fault: str = "") -> bytes:
    return json.dumps({"x": [x, -x], "rounds": rounds, "fault": fault}).encode()


def expected(handler: str, bodies: list[bytes]) -> list[tuple[bytes, str]]:
    run = run_local(open_allowed(PATH, {}, handler), bodies)
    return [(answer.body, answer.content_type) for answer in run.answers]


def test_every_composition_gives_what_one_process_gives(cluster: Cluster, handler: str) -> None:
    for stages in ((0, 1), (2,), (3,), (4,), (4,)):
        cluster.add(*stages)
    bodies = [body(i / 3, 1 + i % 7) for i in range(24)]
    numbers = [cluster.submit(b) for b in bodies]
    cluster.settle()
    assert [cluster.answers[n] for n in numbers] == expected(handler, bodies)
    cluster.check_rest()
    sizes = [len(sessions) for stage, sessions in cluster.batches if stage == 4]
    assert max(sizes) > 1  # requests with different numbers of rounds share batches
    assert sum(sizes) == sum(1 + i % 7 for i in range(24))  # each round once, nothing twice


@pytest.mark.parametrize("seed", range(12))
def test_nothing_is_lost_whatever_happens_when(bundle: Path, handler: str, seed: int) -> None:
    draw = random.Random(seed)
    cluster = Cluster(
        bundle, handler=handler, ring_bytes=draw.choice([4096, 1 << 20]), max_batch=draw.choice([1, 3, 8])
    )
    layouts = [(0,), (1,), (2,), (3,), (4,), (0, 1, 2), (3, 4), (0, 1, 2, 3, 4)]
    cluster.add(0, 1, 2, 3, 4)
    bodies: dict[int, bytes] = {}
    gone: set[int] = set()
    faulty: dict[int, str] = {}
    while len(bodies) < 40:
        chance = draw.random()
        if chance < 0.1:
            fault = draw.choice(["", "", "", "compute", "refused", "stream", "lost", "render", "header"])
            text = body(draw.random(), draw.randint(1, 6), fault)
            number = cluster.submit(text)
            bodies[number] = text
            if fault:
                faulty[number] = fault
        elif chance < 0.12 and bodies:
            number = draw.choice(list(bodies))
            if number not in cluster.answers and number not in cluster.refusals:
                gone.add(number)
            cluster.cancel(number)
        elif chance < 0.13:
            cluster.add(*draw.choice(layouts))
        elif chance < 0.14 and len(cluster.workers) > 1:
            name = draw.choice(list(cluster.workers))
            draw.choice([cluster.end, cluster.drain])(name)
        else:
            cluster.step(draw)
    cluster.add(0, 1, 2, 3, 4)
    cluster.settle(draw)
    for number, text in bodies.items():
        if number in gone:
            continue
        if number in faulty:
            assert number in cluster.refusals, faulty[number]
        else:
            assert cluster.answers[number] == expected(handler, [text])[0]
    cluster.check_rest()
    for name, worker in cluster.workers.items():
        assert not worker.is_draining or cluster.is_empty(name)
    cluster.close()
