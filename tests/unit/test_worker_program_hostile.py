"""What user code of a stream program may do: it ends requests, and neither a worker nor its messages."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.program_cluster import Cluster

from keystage.bundle.program import bundle_program
from keystage.router.admission import AdmissionBounds

HOSTILE = '''
"""Keeps state in one module, ends in another; fails in the way that the request names."""

import json

import torch

from keystage.streams.api import Message, Program, ProgramError, Stream, StreamModule

IN, KEPT, OUT = Stream("in"), Stream("kept"), Stream("out")


class Mute(Exception):
    def __str__(self):
        raise ValueError("no words")


class Keep(StreamModule):
    is_stateful = True

    def compute(self, messages):
        if len(messages) > 2:
            raise torch.OutOfMemoryError("not so many at a time")
        done = []
        for m in messages:
            fault = m.header["fault"]
            self.state.put(m.request, "x", m.data["x"])
            if fault == "exit":
                raise SystemExit(3)
            if fault == "mute":
                raise Mute
            if fault == "surrogate-refused":
                done.append(m.refused("not \\ud800", 404))
            elif fault == "conjugate":
                done.append(m.next({"x": torch.ones(3, dtype=torch.complex64).conj()}))
            elif fault == "twice":
                done.append(m.next({"x": torch.ones(150_000)}))  # 600 kB in a ring of 1 MiB
            elif fault == "meta":
                done.append(m.next({"x": torch.ones(3, device="meta")}))
            else:
                done.append(m.next(m.data))
        return done


    def scatter(self, message):
        return ["kept", "kept"] if message.header["fault"] == "twice" else "kept"


class End(StreamModule):
    def compute(self, messages):
        return [m.next(m.data) for m in messages]

    def visits_left(self, message):
        return 10**40 if message.header["fault"] == "visits" else 1


def parse(body, content_type):
    fault = json.loads(body)["fault"]
    if fault == "surrogate":
        raise ProgramError("not \\ud800", 404)
    if fault == "status":
        raise ProgramError("a status that is none", "404")
    if fault == "long":
        raise ProgramError("x" * 10_000_000, 404)
    if fault == "parse-exit":
        raise SystemExit(3)
    return Message({"fault": fault}, {"x": torch.tensor([1.0])})


def render(message):
    if message.header["fault"] == "render-exit":
        raise SystemExit(3)
    kind = "\\ud800" if message.header["fault"] == "kind" else "text/plain"
    return str(message.data["x"].tolist()).encode(), kind


def program():
    return Program("hostile", {"keep": Keep([IN], [KEPT]), "end": End([KEPT], [OUT])}, IN, OUT, parse, render)
'''


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hostile")
    (folder / "hostile_handler.py").write_text(HOSTILE)
    out = tmp_path_factory.mktemp("bundles") / "b"
    bundled = bundle_program("hostile_handler:program", out, handler=folder)
    (bundled / "handler").write_text(str(folder))
    return bundled


@pytest.fixture
def cluster(bundle: Path) -> Iterator[Cluster]:
    made = Cluster(bundle, handler=(bundle / "handler").read_text(), bounds=AdmissionBounds(max_losses=1))
    made.add(0, 1)
    yield made
    made.close()


def submit(cluster: Cluster, fault: str = "") -> int:
    return cluster.submit(json.dumps({"fault": fault}).encode())


@pytest.mark.parametrize(
    ("fault", "status", "words"),
    [
        ("surrogate", 404, r"not \\ud800"),
        ("surrogate-refused", 404, r"not \\ud800"),
        ("status", 500, "a status that is none"),
        ("long", 404, "xxx"),
        ("parse-exit", 400, "SystemExit"),
        ("exit", 500, "SystemExit"),
        ("mute", 500, "Mute"),
        ("conjugate", 500, "keep"),
        ("meta", 500, "keep"),
        ("twice", 500, "KEYSTAGE_RING_BYTES"),
        ("render-exit", 500, "SystemExit"),
    ],
)
def test_what_user_code_raises_and_returns_ends_its_request_alone(
    cluster: Cluster, fault: str, status: int, words: str
) -> None:
    number, other = submit(cluster, fault), submit(cluster)
    cluster.settle()
    refusal = cluster.refusals[number]
    assert refusal.status == status
    assert words.replace("\\\\", "\\") in str(refusal)
    assert len(str(refusal)) < 10_000
    assert cluster.answers[other] == (b"[1.0]", "text/plain")
    cluster.check_rest()


@pytest.mark.parametrize("fault", ["visits", "kind"])
def test_hints_and_types_that_cannot_travel_do_no_harm(cluster: Cluster, fault: str) -> None:
    number = submit(cluster, fault)
    cluster.settle()
    assert cluster.answers[number][0] == b"[1.0]"
    cluster.check_rest()


def test_a_batch_that_is_too_large_for_the_device_is_computed_one_by_one(cluster: Cluster) -> None:
    numbers = [submit(cluster) for _ in range(6)]
    cluster.settle()
    assert sorted(cluster.answers) == numbers
    cluster.check_rest()


def test_nothing_is_kept_of_a_request_that_left_the_module_long_before_its_end(cluster: Cluster) -> None:
    submit(cluster)
    cluster.settle()
    assert not cluster.workers["w0"].work._router_of
