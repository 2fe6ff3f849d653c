"""What the predictor learns from: chains, held-out rates, recorded runs; and the weights file."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest

from keystage.controller.decisions import Record
from keystage.controller.domain.decision import Decision
from keystage.controller.domain.snapshot import Snapshot
from keystage.controller.domain.state import PolicyState
from keystage.controller.maths.attention import Weights
from keystage.controller.maths.attention_weights import SHIPPED
from keystage.simulator.api import ArrivalSpec, PipelineSpec, StageSpec, World
from keystage.simulator.platform import SimulatedPlatform
from keystage.training import dataset, recorded, weights
from keystage.training.session import TrainOptions


def peak(chain: tuple[dataset.Station, ...]) -> float:
    return max(s.utilisation for s in chain)


def is_held_out(rate: float) -> bool:
    return any(low <= rate < high for low, high in dataset.HELD_OUT)


def test_rates_of_training_and_test_do_not_meet():
    random = np.random.default_rng(1)
    learned = [peak(dataset.draw_chain(random, held_out=False)) for _ in range(300)]
    tested = [peak(dataset.draw_chain(random, held_out=True)) for _ in range(300)]
    assert not any(is_held_out(rate) for rate in learned)
    assert all(is_held_out(rate) for rate in tested)
    assert all(dataset.RANGE[0] <= rate <= dataset.RANGE[1] for rate in learned + tested)


def test_the_world_has_the_utilisation_that_was_drawn():
    station = dataset.Station(0.6, 3, 0.0, most=5, fixed_ratio=0.7)
    spec = dataset.world([station], 1.0, 100).pipelines[0].stages[0]
    full_s = spec.alpha_s * spec.most + spec.beta_s
    assert full_s / spec.most / spec.replicas == pytest.approx(0.6)
    assert spec.beta_s / (spec.alpha_s + spec.beta_s) == pytest.approx(0.7)


def test_examples_repeat_by_seed():
    one, two = dataset.training_example(5, scale=0.02), dataset.training_example(5, scale=0.02)
    other = dataset.training_example(6, scale=0.02)
    assert one.cv == two.cv
    assert one.stations == two.stations
    assert other.cv != one.cv


def test_chains_of_two_lengths_are_no_table():
    chain = dataset.Example((dataset.Station(0.5, 1),) * 2, (1.0, 1.0))
    with pytest.raises(ValueError, match="one chain length"):
        dataset.table([chain, dataset.Example(chain.stations[:1], (1.0,))])


def recorded_log(path, cv: float):
    """A decisions log of a simulated run with nobody steering."""
    stages = (StageSpec(alpha_s=0.02, replicas=1), StageSpec(alpha_s=0.05, scv=0.5, replicas=3))
    arrivals = ArrivalSpec(rate_rps=20.0, cv=cv, count=6000)
    world = World(pipelines=(PipelineSpec(name="p", stages=stages, arrivals=arrivals),))
    platform = SimulatedPlatform(world, 3)
    nothing = Decision(actions=(), state=PolicyState(), reports=())
    with path.open("wb") as file:
        for second in range(1, 280, 20):
            platform.advance(float(second))
            snapshot: Snapshot = platform.observe()
            file.write(msgspec.json.encode(Record(snapshot=snapshot, decision=nothing)) + b"\n")
    return platform.outcome(0.0, "")


def test_recorded_runs_give_the_variation_the_simulator_counted(tmp_path):
    path = tmp_path / "decisions.jsonl"
    outcome = recorded_log(path, 2.0)
    [example] = recorded.read(path)
    counted = [stage.gap_cv for stage in outcome.pipelines[0].stages]
    assert example.cv == pytest.approx(counted, rel=0.1)
    assert [s.servers for s in example.stations] == [1, 3]
    assert example.stations[0].utilisation == pytest.approx(20 * 0.02, rel=0.15)
    assert example.stations[1].service_scv == pytest.approx(0.5, abs=0.15)
    assert math.isnan(example.entry_cv)


def test_a_window_too_short_for_its_variation_is_left_out(tmp_path):
    path = tmp_path / "decisions.jsonl"
    recorded_log(path, 30.0)  # 20 CV^2 = 18,000 arrivals would be needed
    assert recorded.read(path) == []


def test_what_is_not_a_decision_is_named(tmp_path):
    path = tmp_path / "decisions.jsonl"
    path.write_text("{}\n")
    with pytest.raises(ValueError, match="line 1 is not a decision"):
        recorded.read(path)


def test_weights_are_read_as_they_were_written(tmp_path):
    shipped = msgspec.json.decode(SHIPPED, type=Weights)
    weights.save(shipped, tmp_path / "w.json")
    assert msgspec.json.decode((tmp_path / "w.json").read_bytes(), type=Weights) == shipped
    weights.save(shipped, tmp_path / "w.py")
    module: dict[str, bytes] = {}
    exec((tmp_path / "w.py").read_text(), module)
    assert module["SHIPPED"] == SHIPPED
    weights.load(tmp_path / "w.json")


@pytest.mark.parametrize("name", ["w.txt", "nowhere/w.json"])
def test_impossible_outputs_are_refused(tmp_path, name):
    with pytest.raises(ValueError, match=r"json or \.py|no folder"):
        weights.check_path(tmp_path / name)


def test_a_file_without_weights_is_refused(tmp_path):
    (tmp_path / "w.json").write_text('{"format": 1}')
    with pytest.raises(ValueError, match="holds no weights"):
        weights.load(tmp_path / "w.json")


@pytest.mark.parametrize(
    "options",
    [{"seeds": 3}, {"epochs": 0}, {"workers": 0}, {"held_out": 1}, {"scale": 0.0}, {"first_seed": -1}],
    ids=str,
)
def test_nonsense_is_refused(options):
    with pytest.raises(ValueError, match="must be"):
        TrainOptions(**options).check()
