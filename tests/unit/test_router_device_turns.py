"""Modules of one worker take turns: by waiting, or by earliest finish time first (NeuStream 5)."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keystage.bundle.api import BUNDLE_VERSION, Pipeline, StageSpec
from keystage.bundle.errors import BundleError
from keystage.router.admission import AdmissionBounds
from keystage.router.batch_settings import BatchSettings
from keystage.router.config import RouterConfig
from keystage.router.device_turns import DeviceTurns, Offer
from keystage.router.fleet import Fleet
from keystage.router.program import ProgramCore
from keystage.streams.eftf import EftfQueue
from keystage.streams.graph import Graph, ModuleSpec, StreamSpec
from keystage.wire import api

NEEDED = {"pipeline": "p", "bundle": "b", "router": "ipc:///tmp/r"}
IN, MID, OUT = (StreamSpec(name, "tensors") for name in ("in", "mid", "out"))
GRAPH = Graph(IN, OUT, (ModuleSpec("first", (IN,), (MID,)), ModuleSpec("second", (MID,), (OUT,))))


def pipeline(graph: Graph | None = GRAPH) -> Pipeline:
    stages = [StageSpec(k, f"stage-{k:02d}.safetensors", (k, k + 1), 0, 0, [], "id", 0) for k in range(2)]
    return Pipeline(
        version=BUNDLE_VERSION, name="p", family="program" if graph else "llama",
        execution="program" if graph else "looping", dtype="float32", config={}, stages=stages, edges=[],
        context_length=0, vocab_size=0, hidden_size=0, eos=[], source="", graph=graph,
    )  # fmt: skip


def test_without_shares_who_has_waited_longest_goes_first() -> None:
    turns = DeviceTurns({})
    offers = [Offer(0, 2.0, 0.1), Offer(1, 1.0, 9.0)]
    assert [offer.stage for offer in turns.order("w", (0, 1), offers)] == [1, 0]


def test_shares_decide_as_the_spatial_split_would() -> None:
    """Of 4 units 3 are module 0's: its batches of 1 s end at 4/3, 8/3, 4; that of module 1 at 4."""
    turns = DeviceTurns({0: 3, 1: 1})
    taken = []
    for _ in range(4):
        best = turns.order("w", (0, 1), [Offer(0, 0.0, 1.0), Offer(1, 0.0, 1.0)])[0]
        turns.taken("w", (0, 1), best)
        taken.append(best.stage)
    assert taken == [0, 0, 0, 1]
    # What another worker has run is its own; a worker that comes again begins anew.
    turns.forget("w")
    assert turns.order("w", (0, 1), [Offer(1, 0.0, 1.0), Offer(0, 0.0, 1.0)])[0].stage == 0


@given(
    st.lists(st.integers(1, 9), min_size=2, max_size=4),
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 20)), min_size=1, max_size=30),
)
def test_where_batches_run_one_by_one_it_is_the_order_of_the_queue(
    shares: list[int], work: list[tuple[int, int]]
) -> None:
    """All batches are there at the start: then `EftfQueue`, popped while nothing runs, says the same."""
    queue: EftfQueue[int] = EftfQueue(shares, sum(shares))
    waiting: dict[int, list[float]] = {}
    for module, tenths in work:
        module %= len(shares)
        queue.push(module, len(waiting), 0.0, tenths / 10)
        waiting.setdefault(module, []).append(tenths / 10)
    turns, hosted = DeviceTurns(dict(enumerate(shares))), tuple(range(len(shares)))
    while turn := queue.pop():
        queue.ended(turn)
        offers = [Offer(module, 0.0, batches[0]) for module, batches in waiting.items() if batches]
        best = turns.order("w", hosted, offers)[0]
        finish = turns._finish("w", hosted, best)
        assert finish == pytest.approx(turn.finish_s)
        mine = next(offer for offer in offers if offer.stage == turn.module)
        assert turns._finish("w", hosted, mine) == pytest.approx(finish)  # equal ones may change places
        turns.taken("w", hosted, mine)
        waiting[turn.module].pop(0)
    assert not any(waiting.values())


def test_a_router_follows_the_shares() -> None:
    """A worker with both modules, first has 1 of 10 units: what second has to do is done before newcomers."""

    def stages(**given: int) -> list[int]:
        core = ProgramCore(
            Fleet(2, "p"), AdmissionBounds(), 1, pipeline(), BatchSettings(spus=tuple(given.items()))
        )
        hello = api.Hello(api.WIRE_VERSION, "p", (0, 1), "w", "id", "cpu", 1, 0, 1, "w", 1, "node", False)
        assert core.fleet.hello("w", hello, 0.0) is None
        core.fleet.credit("w", api.Credit("w", 1, 0))
        core.fleet.ready("w", 0.0)
        core.worker_ready("w", 0.0)
        for _ in range(4):
            core.submit(b"x", "application/json", None, 0.0)
        ran = []
        for step in itertools.count(1):
            runs = [message for _, message in core.take()[0] if isinstance(message, api.Run)]
            if not runs:
                return ran
            (run,) = runs
            ran.append(run.stage)
            outputs = [[api.StreamMessage("out", body=b"y") if run.stage else api.StreamMessage("mid", b"m")]]
            core.fleet.credit("w", api.Credit("w", 1, step))
            core.ran("w", api.Ran("w", run.stage, run.turns, outputs, [None], 1, 0.0, 1.0), float(step))
        return ran

    assert stages() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert stages(first=1, second=9) != stages()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("first", "'first' is not"),
        ("first=0", "1 to 1000000, first has 0"),
        ("first=-1", "'first=-1' is not"),
        ("first=1,first=2", "'first' comes twice"),
        ("first=99999999", "is not"),
    ],
)
def test_shares_that_are_none_are_refused(text: str, why: str) -> None:
    with pytest.raises(ValueError, match="spus") as refused:
        RouterConfig(**NEEDED, spus=text)
    assert why in str(refused.value)


def test_shares_of_other_modules_are_refused() -> None:
    for text, why in (("first=1", "gives 'second' no share"), ("first=1,second=2,x=1", "names 'x'")):
        with pytest.raises(BundleError, match=why):
            RouterConfig(**NEEDED, spus=text).batch_settings_of(pipeline())
    with pytest.raises(BundleError, match="KEYSTAGE_SPUS is for stream programs; p is looping"):
        RouterConfig(**NEEDED, spus="first=1").batch_settings_of(pipeline(None))
    found = RouterConfig(**NEEDED, spus="second=2, first=1").batch_settings_of(pipeline())
    assert found.shares(["first", "second"]) == {0: 1, 1: 2}
