"""The emulated worlds of bench neustream: exact times of lone requests, who batches, who is refused."""

import dataclasses
import json

import pytest

from keystage.bench import neustream, neustream_costs, neustream_report
from keystage.bench import neustream_diffusion as diffusion
from keystage.bench import neustream_language as language
from keystage.bench.neustream import SHORT
from keystage.bench.neustream_agents import PartialSloAgent, Share
from keystage.bench.neustream_cells import (
    CLOCKWORK,
    OURS,
    PADDED,
    PARTS,
    SETTINGS,
    Run,
    base,
    cells,
    perform,
    quick_cells,
)
from keystage.bench.neustream_diffusion import Effort, Load, Program, Visit
from keystage.bench.neustream_models import DIT_S2, DIT_XL2, OPT_13B, STABLE_DIFFUSION
from keystage.bench.neustream_prefill_first import PrefillFirst
from keystage.bench.neustream_ratios import compare, figures, losses, paper_ratio, printed_share, row
from keystage.bench.neustream_sessions import BLOCK_TOKENS, Session
from keystage.bench.neustream_shares import DEVICE_SPUS, shared
from keystage.bench.neustream_shares import Effort as Given

MODEL = dataclasses.replace(OPT_13B, kv_tokens=40 * BLOCK_TOKENS)
SHARE = Share(decode_s=0.066, decode_slowdown=1.1, horizon_ratio=0.5, mean_output=50.0)


def run_alone(model, steps):
    program = Program(model, Effort(3, 1))
    visit = Visit(0, 0.0, 1e6, steps)
    program.enter(visit, 0.0)
    while not program.ended:
        program.end_next()
    return program.ended[0][1]


@pytest.mark.parametrize("model", [STABLE_DIFFUSION, DIT_XL2, DIT_S2])
def test_a_request_alone_takes_exactly_its_profile(model):
    assert run_alone(model, 7) == pytest.approx(model.alone_s(7), rel=1e-12)


def test_steps_of_requests_at_different_places_share_batches():
    program = Program(DIT_S2, Effort(3, 1))
    for number in range(3):
        program.enter(Visit(number, 0.0, 1e6, 10 + number), 0.0)
    while len(program.ended) < 3:
        program.end_next()
    # All begin with the first one's lone step; then three to a batch till the first is done.
    assert program.step_items == 33
    assert program.step_batches < 16


def test_a_request_that_cannot_be_in_time_is_not_begun():
    program = Program(DIT_S2, Effort(3, 3))
    program.enter(Visit(0, 0.0, 0.9 * DIT_S2.alone_s(50), 50), 0.0)
    assert program.next_end_s() == float("inf")
    assert not program.ended


LOAD = Load(rate_rps=1.25, cv=2.0, scale=3.0, requests=60, seed=3)


def test_the_same_seed_gives_the_same_outcome_and_another_one_another():
    first = diffusion.modules(STABLE_DIFFUSION, LOAD, Effort(8, 1))
    assert first == diffusion.modules(STABLE_DIFFUSION, LOAD, Effort(8, 1))
    assert first != diffusion.modules(STABLE_DIFFUSION, dataclasses.replace(LOAD, seed=4), Effort(8, 1))
    assert first.offered == 57


def test_clockwork_batches_only_equal_steps_and_padding_batches_any():
    ours = diffusion.modules(STABLE_DIFFUSION, LOAD, Effort(8, 1))
    equal = diffusion.clockwork(STABLE_DIFFUSION, dataclasses.replace(LOAD, is_fixed=True), 10, 0.0)
    mixed = diffusion.clockwork(STABLE_DIFFUSION, LOAD, 10, 0.0)
    padded = diffusion.padded(STABLE_DIFFUSION, LOAD, 10, 0.0)
    assert mixed.mean_batch < 1.4 < equal.mean_batch
    assert mixed.good < padded.good <= ours.good <= ours.offered
    assert diffusion.padded(STABLE_DIFFUSION, LOAD, 1, 0.0).mean_batch == 1.0


def test_what_clockwork_serves_is_what_the_published_logs_say_within_noise():
    cell = base("sd")
    score = perform(Run(cell, CLOCKWORK, (10.0, 0.0), 500, 0))
    assert printed_share(cell) == 252 / 500
    assert score.good / score.offered == pytest.approx(252 / 500, abs=0.1)


def finish(agent, sessions):
    """Runs an agent alone, module after module; returns the time and the order of ends."""
    now_s, ended = 0.0, []
    for session in sessions:
        agent.enter(session, now_s)
    while len(ended) < len(sessions):
        offers = [offer for m in range(agent.modules) if (offer := agent.offer(m, now_s)) is not None]
        now_s += offers[0].whole_s
        ended += agent.done(offers[0], now_s)
    return now_s, ended


def due(session, scale=100.0):
    session.due_first_s, session.due_last_s, session.token_scale = 1e3, 1e6, scale
    return session


@pytest.mark.parametrize(
    "make", [lambda: PrefillFirst(MODEL, 64, 2048), lambda: PartialSloAgent(MODEL, SHARE)]
)
def test_a_session_alone_takes_exactly_its_profile(make):
    session = due(Session(0, 0.0, 100, 50))
    now_s, _ = finish(make(), [session])
    first_s, later_s = MODEL.alone_s(100, 50)
    assert session.first_s == pytest.approx(first_s)
    assert now_s == session.ended_s == pytest.approx(first_s + later_s)
    assert session.is_good
    assert session.is_prompt


def test_prefill_first_puts_the_youngest_back_when_the_pool_is_full():
    agent = PrefillFirst(MODEL, 64, 2048)
    sessions = [due(Session(number, 0.0, 150, 120)) for number in range(3)]
    _, ended = finish(agent, sessions)
    assert agent.preempted > 0
    assert ended[0].number == 0
    assert all(session.made == 120 for session in sessions)


def test_ours_begins_no_more_than_the_pool_is_expected_to_hold():
    agent = PartialSloAgent(MODEL, dataclasses.replace(SHARE, mean_output=120.0, decode_s=1.0))
    for number in range(3):
        agent.enter(due(Session(number, 0.0, 150, 120)), 0.0)
    offer = agent.offer(0, 0.0)
    assert [session.number for session in offer.sessions] == [0, 1]
    assert agent.offer(0, 0.0) is None


def test_ours_puts_back_too_when_answers_are_longer_than_expected():
    agent = PartialSloAgent(MODEL, dataclasses.replace(SHARE, mean_output=20.0, decode_s=1.0))
    sessions = [due(Session(number, 0.0, 150, 120)) for number in range(3)]
    finish(agent, sessions)
    assert agent.preempted > 0
    assert all(session.made == 120 for session in sessions)


def test_ours_refuses_a_session_that_would_be_late_at_the_present_speed():
    agent = PartialSloAgent(MODEL, SHARE)
    late = due(Session(0, 0.0, 100, 50), scale=1.0)
    late.due_first_s = 0.5 * MODEL.prefill_time_s([100])
    agent.enter(late, 0.0)
    assert agent.offer(0, 0.0) is None
    assert agent.given_up() == [late]
    assert agent.given_up() == []


CHAT = language.Lengths(127, 0.5, (20, 40), 0.5)


def test_algorithm_2_divides_the_device_and_leaves_both_modules_a_goodput():
    load = language.Load(2.0, 1.0, 3.0, 1.5, 40, 0)
    found = shared([(OPT_13B, CHAT)], load, Given(0.3, 1.0))
    prefill, decode = found.spus[0]
    assert prefill + decode + found.allocation.left == DEVICE_SPUS
    assert prefill < decode
    assert found.allocation.goodput_rps > 0
    assert found.shares[0].decode_slowdown == DEVICE_SPUS / decode


@pytest.mark.parametrize("part", PARTS)
def test_every_system_runs_every_part(part):
    cell = base(part)
    for system, options in SETTINGS[part].items():
        score = perform(Run(cell, system, options[0], 30, 1))
        assert 0 <= score.strict <= score.good <= score.offered
        assert len(score.each) == (3 if part in {"own", "shared"} else 1)
        assert score.batch >= 1
    tuned = {len(options) for options in SETTINGS[part].values() if len(options) > 1}
    assert len(tuned) == 1  # equal effort


def test_every_cell_is_there_once_and_the_looks_are_among_them():
    for part in PARTS:
        short = cells(part, full=False)
        assert len(set(short)) == len(short)
        assert set(short) <= set(cells(part, full=True))
        assert base(part) in short
        if part != "shared":
            assert set(quick_cells(part)) <= set(short)


def test_bursty_cells_get_more_requests():
    assert SHORT.of(base("opt")) == SHORT.requests
    bursty = dataclasses.replace(base("opt"), cv=4.0)
    assert SHORT.of(bursty) * SHORT.seeds == SHORT.per_cv2 * 16


def test_ratios_rows_figures_and_the_page(tmp_path):
    tight = dataclasses.replace(base("sd"), scale=1.2)
    scores = [
        perform(Run(cell, system, SETTINGS["sd"][system][-1], 40, seed))
        for cell in (tight, dataclasses.replace(base("sd"), is_fixed=True))
        for system in (OURS, CLOCKWORK, PADDED)
        for seed in (0, 1)
    ]
    first, second = compare(scores)
    assert first.cell == tight
    assert paper_ratio(first.cell) == "up to 3.13"
    assert paper_ratio(second.cell) == ""
    assert printed_share(tight) == 130 / 500
    ratio, low, high = first.ratio(CLOCKWORK)
    assert low <= ratio <= high
    assert first.samples(CLOCKWORK) == [
        max(1, a.good) / max(1, b.good) for a, b in zip(first.ours, first.theirs[CLOCKWORK], strict=True)
    ]
    found = figures([first, second])
    assert found["sd_slo12_ratio"].target == "the paper's up to 3.13"
    assert {"sd_most_ratio", "sd_least_ratio"} <= found.keys()
    assert all("of" in line for line in losses([first, second]))
    rows = [row(one) for one in (first, second)]
    made = {
        "machine": {"cpu_model": "a CPU", "cores": 2, "system": "a system"},
        "figures": {name: figure.median for name, figure in found.items()},
        "spread": {
            name: {"quartiles": figure.quartiles, "rounds": len(figure.samples)}
            for name, figure in found.items()
        },
        "notes": ["a note"],
    }
    page = neustream_report.write(tmp_path, made, {"Stable Diffusion": rows})
    text = page.read_text()
    assert "| Stable Diffusion, equal steps | 1.25 | 2 | 3 |" in text
    assert "- a note" in text
    assert json.loads((tmp_path / "neustream.json").read_text())["figures"]["sd_slo12_ratio"] > 0


def test_what_is_said_of_costs_batches_and_agreement():
    cell = dataclasses.replace(base("s2"), rate_rps=4.0)
    scores = [
        perform(Run(one, system, SETTINGS["s2"][system][-1], 30, 1))
        for one in (cell, dataclasses.replace(base("s2"), is_fixed=True))
        for system in SETTINGS["s2"]
    ]
    compared = compare(scores)
    batches = neustream.batch_figures(compared)
    assert batches["s2_batch_ratio"].median > 1
    assert batches["s2_equal_batch_ratio"].median > 1
    assert "mean over 1 loads" in neustream.agreement(compared)[0]
    assert neustream.agreement(compare([s for s in scores if s.run.cell.is_fixed])) == []
    costs = neustream.cost_figures(neustream_costs.measure(1))
    assert all(figure.median > 0 for figure in costs.values())
    assert costs["step_decision_ratio"].target == "the paper's 0.0102"
