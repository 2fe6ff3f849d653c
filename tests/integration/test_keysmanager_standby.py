"""A standby on the CPU becomes a replica: same code path as on a GPU, but for graph and pinned ring."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from keystage.bench.load import output_of
from keystage.bench.load_bundles import write_bundle
from keystage.bench.load_world import LoadWorld, Replica
from keystage.bundle.store import load


@pytest.fixture(scope="module")
def world() -> Iterator[LoadWorld]:
    with LoadWorld("cpu", "float32", 1) as made:
        write_bundle(made.folder / "one", "one", 0.02, "float32", 1)
        yield made


def stopped(replica: Replica) -> Replica:
    try:
        replica.timeline()
    finally:
        replica.end()
    return replica


@pytest.mark.slow
def test_a_standby_becomes_any_stage_of_its_class_and_of_no_other(world: LoadWorld) -> None:
    one, other = world.folder / "one", world.folder / "other"
    pipeline = load(one)
    write_bundle(other, "other", 0.02, "float32", 2)
    larger = world.folder / "larger"
    write_bundle(larger, "larger", 0.05, "float32", 3)
    fresh = world.fresh(other)
    try:
        fresh.timeline()
        expected = output_of(fresh, pipeline)
    finally:
        fresh.end()
    world.keep_standbys(one, 1)

    (idle,) = world.status().standbys
    assert stopped(world.forked(larger)).via != "standby"
    became = world.forked(other)
    try:
        line = became.timeline()
        assert (became.via, became.pid) == ("standby", idle.pid)
        assert 0 < line.mapped_s <= line.forward_s <= line.ready_s
        assert output_of(became, pipeline) == expected
        assert became.copied()[2] == "memory"
    finally:
        became.end()
        world.keep_standbys(one, 0)


def test_an_idle_standby_ends_with_its_owner(world: LoadWorld) -> None:
    bundle = world.folder / "one"
    world.keep_standbys(bundle, 1)
    (idle,) = world.status().standbys
    world.keep_standbys(bundle, 0)
    _, status = os.waitpid(idle.pid, 0)  # handed to this process, which is the subreaper
    assert os.waitstatus_to_exitcode(status) == 0


@pytest.mark.slow
def test_a_filled_standby_hangs_on_its_own_owner_alone(world: LoadWorld) -> None:
    bundle = world.folder / "one"
    pipeline = load(bundle)
    first_read, first_write = os.pipe()
    world.keep_standbys(bundle, 1, lifeline_fd=first_read)
    became = world.forked(bundle)
    try:
        became.timeline()
        assert became.via == "standby"
        world.keep_standbys(bundle, 0)
        os.close(first_read)
        os.close(first_write)  # whoever wanted standbys is gone
        answers = {output_of(became, pipeline) for _ in range(20)}
        assert len(answers) == 1
    finally:
        became.end()
