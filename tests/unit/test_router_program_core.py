"""The core of a stream program without workers' processes: who is given up, and what an estimate may do."""

from __future__ import annotations

import pytest

from keystage.batching.choice import BatchingChoice
from keystage.bundle.api import BUNDLE_VERSION, Pipeline, StageProfile, StageSpec
from keystage.router.admission import AdmissionBounds
from keystage.router.batch_settings import BatchSettings
from keystage.router.fleet import Fleet
from keystage.router.program import ProgramCore
from keystage.router.sessions import Refuse
from keystage.streams.graph import Graph, ModuleSpec, StreamSpec
from keystage.wire import api

IN, AGAIN, OUT = (StreamSpec(name, "tensors") for name in ("in", "again", "out"))
LOOP = ModuleSpec("loop", (IN, AGAIN), (AGAIN, OUT))
PARTIAL, DEFERRED = BatchingChoice("partial-slo"), BatchingChoice("deferred")


def core_of(profile: StageProfile | None, settings: BatchSettings) -> ProgramCore:
    stage = StageSpec(0, "stage-00.safetensors", (0, 1), 0, 0, [], "id", 0, profile)
    pipeline = Pipeline(
        version=BUNDLE_VERSION, name="p", family="program", execution="program", dtype="float32", config={},
        stages=[stage], edges=[], context_length=0, vocab_size=0, hidden_size=0, eos=[], source="",
        graph=Graph(IN, OUT, (LOOP,)),
    )  # fmt: skip
    return ProgramCore(Fleet(1, "p"), AdmissionBounds(), 1, pipeline, settings)


def add(core: ProgramCore, name: str, now_s: float) -> None:
    hello = api.Hello(api.WIRE_VERSION, "p", (0,), name, "id", "cpu", 16, 0, 8, name, 1, "node", False)
    assert core.fleet.hello(name, hello, now_s) is None
    core.fleet.credit(name, api.Credit(name, 16, 0))
    core.fleet.ready(name, now_s)
    core.worker_ready(name, now_s)


def runs(core: ProgramCore) -> list[tuple[str, api.Run]]:
    return [(to, message) for to, message in core.take()[0] if isinstance(message, api.Run)]


def ran(core: ProgramCore, name: str, run: api.Run, now_s: float, *visits: int) -> None:
    """All turns of a batch go round again, or (0) are answered."""
    outputs = [
        [api.StreamMessage("again", b"m", visits=left) if left else api.StreamMessage("out", body=b"done")]
        for left in visits
    ]
    core.ran(name, api.Ran(name, 0, run.turns, outputs, [None] * len(visits), len(visits), 0.0, 0.0), now_s)


def test_what_one_worker_gave_up_and_another_took_runs() -> None:
    core = core_of(StageProfile("cpu", 1.0, 9.0), BatchSettings(PARTIAL))
    # After a first batch of 12 s: two rounds in 21 s, ten in 112 s and ten in 400 s.
    numbers = [core.submit(b"", "", deadline_s, 0.0) for deadline_s in (33.0, 124.0, 412.0)]
    add(core, "a", 0.0)
    ((_, first),) = runs(core)
    assert first.sessions == numbers
    add(core, "b", 0.0)
    ran(core, "a", first, 12.0, 2, 10, 10)
    # The second has no round to spare for the first, the third has.
    assert [(to, run.sessions) for to, run in runs(core)] == [("a", numbers[1:2]), ("b", numbers[:1])]
    core.tick(12.1)
    assert core.held[0] == 3


@pytest.mark.parametrize("choice", [PARTIAL, DEFERRED])
def test_a_slow_first_batch_does_not_have_all_others_refused_for_ever(choice: BatchingChoice) -> None:
    core = core_of(None, BatchSettings(choice, "refuse"))
    add(core, "a", 0.0)
    core.submit(b"", "", 10.0, 0.0)
    ((_, run),) = runs(core)
    ran(core, "a", run, 3.0, 0)  # the device woke up
    answered = 0
    for step in range(1, 20):
        now_s = 3.0 + step
        core.submit(b"", "", 0.5, now_s)
        core.on_timer(now_s + 0.48)  # deferred
        for _, run in runs(core):
            ran(core, "a", run, now_s + 0.49, 0)
            answered += 1
        core.tick(now_s + 0.6)
    assert answered == 19


def test_who_is_refused_early_hears_of_the_deadline_that_counts() -> None:
    core = core_of(StageProfile("cpu", 1.0, 9.0), BatchSettings(PARTIAL, "refuse", 0.5))
    add(core, "a", 0.0)
    core.submit(b"", "", 60.0, 0.0)  # computes
    core.submit(b"", "", None, 0.0)
    ((_, run),) = runs(core)
    ran(core, "a", run, 10.0, 0)
    (refused,) = [outcome for outcome in core.take()[1] if isinstance(outcome, Refuse)]
    assert "within 0.5 s" in str(refused.refusal)
    assert "600" not in str(refused.refusal)


@pytest.mark.parametrize("profile", [StageProfile("cpu", 0.0, 0.0), StageProfile("cpu", -1.0, 2.0)])
def test_a_damaged_profile_is_none(profile: StageProfile) -> None:
    core = core_of(profile, BatchSettings(PARTIAL))
    add(core, "a", 0.0)
    core.submit(b"", "", 10.0, 0.0)
    assert len(runs(core)) == 1
