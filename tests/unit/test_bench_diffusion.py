"""Bench diffusion's rival: what a batch takes, who is in it, who is refused, what is tuned; its program."""

from __future__ import annotations

import dataclasses
import random

import pytest

from keystage.bench import diffusion
from keystage.bench.diffusion_live import HANDLER, Outcome
from keystage.bench.diffusion_rival import (
    LEASTS,
    Rule,
    Waiting,
    WholeProfile,
    WholeQueue,
    emulated,
    tuned,
    whole_profile,
)
from keystage.bench.diffusion_whole import together
from keystage.bench.frame import BenchError
from keystage.streams.handler import open_allowed
from keystage.streams.interpolate import table
from keystage.streams.local import run_local
from keystage.streams.programs.diffusion import request

# A step of b requests takes 0.1 + 0.01 b s, what is beside the steps 0.5 s.
PROFILE = WholeProfile(table([1, 2, 4], [0.11, 0.12, 0.14]), table([1, 4], [0.5, 0.5]))


def queue(rule, *requests, most=4):
    found = WholeQueue(PROFILE, rule, most)
    for number, (due_s, steps) in enumerate(requests):
        found.add(Waiting(due_s, number, steps))
    return found


def numbers(requests):
    return [one.number for one in requests]


@pytest.mark.parametrize(
    ("steps", "seconds"),
    [
        ([10], 0.5 + 10 * 0.11),
        ([10, 10], 0.5 + 10 * 0.12),
        # Four for five steps, three for five more, one for the last ten.
        ([20, 5, 10, 10], 0.5 + 5 * 0.14 + 5 * 0.13 + 10 * 0.11),
    ],
)
def test_who_has_done_its_steps_costs_no_more(steps, seconds):
    assert PROFILE.seconds(steps) == pytest.approx(seconds)


def test_a_profile_is_found_again_from_batches_of_two_numbers_of_steps():
    measured = {b: (PROFILE.seconds([25] * b), PROFILE.seconds([125] * b)) for b in (1, 2, 4)}
    found = whole_profile(measured, 25, 125)
    for steps in ([100], [100, 125, 110], [7] * 4):
        assert found.seconds(steps) == pytest.approx(PROFILE.seconds(steps))


def test_a_larger_batch_that_was_quicker_by_chance_still_gives_its_own_time():
    found = whole_profile({1: (3.0, 11.0), 2: (2.9, 10.9), 4: (4.0, 14.0)}, 20, 100)
    assert found.seconds([100, 100]) == pytest.approx(11.0)
    assert found.seconds([100] * 4) == pytest.approx(14.0)


def test_only_equal_steps_share_a_batch_or_any():
    requests = [(9.0, 10), (9.1, 12), (9.2, 10), (9.3, 11)]
    assert numbers(queue(Rule("equal"), *requests).next_batch(0.0)[0]) == [0, 2]
    assert numbers(queue(Rule("padded"), *requests).next_batch(0.0)[0]) == [0, 1, 2, 3]
    assert numbers(queue(Rule("padded"), *requests, most=3).next_batch(0.0)[0]) == [0, 1, 2]


def test_earliest_deadline_first_whatever_came_first():
    assert numbers(queue(Rule("padded"), (9.0, 10), (5.0, 10), most=1).next_batch(0.0)[0]) == [1]


def test_a_batch_ends_by_its_first_deadline_and_takes_the_next_that_fits():
    # The first needs 1.6 s alone, 1.7 s with another of its steps, and has 1.75 s.
    waiting = queue(Rule("padded"), (1.75, 10), (9.0, 30), (9.1, 10), (9.2, 10))
    batch, given_up = waiting.next_batch(0.0)
    assert (numbers(batch), given_up) == ([0, 2], [])
    assert len(waiting) == 2


def test_what_cannot_be_in_time_even_alone_is_refused_and_costs_no_device():
    waiting = queue(Rule("padded"), (1.59, 10), (1.61, 10))
    assert numbers(waiting.take_hopeless(0.0)) == [0]
    assert numbers(waiting.take_hopeless(0.005)) == []
    batch, given_up = waiting.next_batch(0.02)
    assert (batch, numbers(given_up)) == ([], [1])
    assert not len(waiting)


def test_a_margin_makes_its_batches_smaller_and_refuses_earlier():
    requests = [(1.75, 10), (9.0, 10)]
    assert len(queue(Rule("padded"), *requests).next_batch(0.0)[0]) == 2
    assert len(queue(Rule("padded", margin_ratio=0.05), *requests).next_batch(0.0)[0]) == 1
    assert numbers(queue(Rule("padded", margin_ratio=0.1), *requests).take_hopeless(0.0)) == [0]


def test_a_least_size_gives_up_the_first_for_those_behind():
    requests = [(1.65, 10), (9.0, 10), (9.1, 10), (9.2, 10)]
    assert numbers(queue(Rule("padded", 1), *requests).next_batch(0.0)[0]) == [0]
    batch, given_up = queue(Rule("padded", 3), *requests).next_batch(0.0)
    assert (numbers(batch), numbers(given_up)) == ([1, 2, 3], [0])


def test_a_least_size_that_does_not_wait_is_no_reason_to_refuse():
    assert numbers(queue(Rule("padded", 3), (1.65, 10)).next_batch(0.0)[0]) == [0]


def test_the_densest_batch_lets_the_first_wait():
    requests = [(1.65, 10), (9.0, 10), (9.1, 10), (9.2, 10)]
    waiting = queue(Rule("padded", 0), *requests)
    batch, given_up = waiting.next_batch(0.0)
    assert (numbers(batch), given_up) == ([1, 2, 3], [])
    assert numbers(waiting.next_batch(0.0)[0]) == [0]


def test_idle_devices_share_what_waits():
    requests = [(9.0 + n / 10, 10) for n in range(4)]
    waiting = queue(Rule("padded"), *requests)
    assert numbers(waiting.next_batch(0.0, idle=2)[0]) == [0, 1]
    assert numbers(waiting.next_batch(0.0, idle=1)[0]) == [2, 3]
    assert numbers(queue(Rule("padded", 4), *requests).next_batch(0.0, idle=2)[0]) == [0, 1]


def test_emulated_devices_serve_side_by_side_and_one_after_another():
    # 1.6 s each: two devices are in time with two of the three that come together.
    three = [(0.0, 1.8, 10), (0.0, 1.8, 11), (0.0, 1.8, 10)]
    assert emulated(PROFILE, Rule("equal"), 1, 2, three) == (2, 2)
    assert emulated(PROFILE, Rule("equal"), 4, 3, three) == (3, 3)
    assert emulated(PROFILE, Rule("equal"), 4, 1, three) == (2, 1)
    assert emulated(PROFILE, Rule("equal"), 1, 1, [(0.0, 1.7, 10), (1.6, 1.7, 10), (9.0, 1.7, 10)]) == (3, 3)


def heavy(seed):
    draw = random.Random(seed)
    times_s = sorted(draw.uniform(0, 30) for _ in range(120))
    return [
        (at_s, 2.2 * PROFILE.seconds([steps]), steps) for at_s in times_s for steps in [draw.choice([8, 9])]
    ]


@pytest.mark.parametrize("grouping", ["equal", "padded"])
def test_the_tuned_rule_is_the_best_of_all_that_are_tried(grouping):
    schedules = [heavy(seed) for seed in range(3)]
    chosen = tuned(PROFILE, grouping, 4, 1, schedules, 0.01)

    def good(rule):
        return sum(emulated(PROFILE, rule, 4, 1, schedule)[0] for schedule in schedules)

    assert (chosen.grouping, chosen.margin_ratio) == (grouping, 0.01)
    assert good(chosen) == max(good(Rule(grouping, least, 0.01)) for least in LEASTS if least <= 4)
    assert good(chosen) > good(Rule(grouping, 1, 0.01))


def test_a_batch_of_whole_requests_gives_each_its_own_picture():
    options = {"image": "npy"}
    bodies = [request(f"picture {number}", steps, number) for number, steps in enumerate((4, 2, 3, 4))]
    alone = run_local(open_allowed("keystage.streams.programs.diffusion:program", options), bodies)
    whole = open_allowed(
        "diffusion_programs:whole",
        {"inner": "keystage.streams.programs.diffusion:program", "inner_options": options},
        HANDLER,
    )
    run = run_local(whole, [together(bodies), together(bodies[1:2])])
    assert run.answers[0].body == b"".join(answer.body for answer in alone.answers)
    assert run.answers[1].body == alone.answers[1].body


def test_emulated_whole_requests_make_all_their_steps():
    times = {"step_s": [1e-4], "decoder_s": [1e-4]}
    whole = open_allowed("diffusion_programs:whole", times, HANDLER)
    run = run_local(whole, [together([b'{"steps": 3}', b'{"steps": 1}'])])
    assert run.answers[0].body == b'{"steps":3}{"steps":1}'


@pytest.mark.parametrize(
    ("body", "reason"),
    [(b"{}", "is expected"), (b'{"requests": []}', "at least one request"), (b"[", "is expected")],
)
def test_a_body_that_is_no_batch_is_refused(body, reason):
    whole = open_allowed("diffusion_programs:whole", {"step_s": [1e-4], "decoder_s": [1e-4]}, HANDLER)
    answer = run_local(whole, [body]).answers[0]
    assert answer.http_status == 400
    assert reason in answer.refusal


def outcome(good, **others):
    given = {"late": 0, "refused": 20 - good, "expired": 0, "failed": 0, **others}
    return Outcome(20, good, seconds=10.0, batch=2.0, lag_s=0.001, **given)


def test_ratios_are_over_the_better_grouping_and_the_papers_over_equal_steps():
    chosen = diffusion.setting(quick=True, full=False, device="cpu")
    cells = [diffusion.Cell(1.0, 3.0, 8.0, 0), diffusion.Cell(4.0, 3.0, 8.0, 0)]
    outcomes = {
        "module": [outcome(20), outcome(10)],
        "equal": [outcome(4), outcome(5)],
        "padded": [outcome(16), outcome(4, late=2, expired=1, refused=13)],
    }
    rival = diffusion.Rival(PROFILE, 0.01, [Rule("equal", 0), Rule("padded", 4)] * 2)
    found = diffusion.result(chosen, cells, (0.1, 0.5), outcomes, rival)
    assert [row["ratio"] for row in found.rows] == [1.25, 2.0]
    assert found.rows[1]["padded lost"] == "13 / 1 / 2"
    assert found.rows[0]["rules"] == "equal, densest; padded, least 4"
    assert found.figures["best_ratio"].median == 5.0
    assert found.figures["best_ratio_to_padded"].median == 2.0
    assert found.figures["least_ratio"].median == 1.25
    assert not found.disturbance


def test_a_rule_is_tuned_on_arrivals_of_other_seeds():
    chosen = diffusion.setting(quick=True, full=False, device="cpu")
    cell = diffusion.Cell(4.0, 3.0, 8.0, 0)
    served = diffusion.arrivals(chosen, cell, (0.02, 0.0))
    schedules = diffusion.tuning_schedules(chosen, cell, (0.02, 0.0))
    assert len(schedules) == len(diffusion.TUNING_SEEDS)
    for schedule in schedules:
        times_s, bounds_s, steps = map(list, zip(*schedule, strict=True))
        assert times_s != served.times_s
        assert times_s[-1] == pytest.approx(served.times_s[-1])
        assert steps != served.steps
        assert bounds_s == pytest.approx([3.0 * 0.02 * count for count in steps])


def test_both_systems_get_the_same_devices_and_only_the_router_batches_ours():
    ours, whole = diffusion.systems(diffusion.setting(quick=True, full=False, device="cpu"))
    assert [system.most_batch for system in ours] == [diffusion.MOST_BATCH] * 2
    assert (whole.most_batch, whole.batching) == (1, "eager")
    assert all(dict(system.options) == dict(whole.options) for system in ours)
    ours, whole = diffusion.systems(diffusion.setting(quick=True, full=False, device="cuda"))
    assert whole.options == {"inner": ours[0].path, "inner_options": ours[0].options}


@pytest.mark.parametrize(
    ("device", "reason"),
    [
        ("gpu", "must be cpu"),
        ("cuda:", "must be cpu"),
        ("cuda:x", "must be cpu"),
        ("cudax", "must be cpu"),
        ("cuda:99", "this machine shows"),
    ],
)
def test_a_device_that_is_not_there_is_refused_at_once(device, reason):
    with pytest.raises(BenchError, match=reason):
        diffusion.run(quick=True, device=device)


def test_outcomes_are_told_apart():
    better = outcome(5)
    assert diffusion.best([outcome(4), better, dataclasses.replace(better, batch=3.0)]) is better
