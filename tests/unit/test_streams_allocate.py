"""Algorithm 2 with its errata, placement, co-location: small cases worked out by hand."""

import pytest

from keystage.batching.profile import LatencyProfile
from keystage.streams.allocate import allocate
from keystage.streams.colocate import colocate
from keystage.streams.placement import Device, Edge, Module, PlacementError, least_spus, place

GIB = 2**30


def gpu(name="gpu0", spus=8, gib=24, kind="a"):
    return Device(name, kind, spus, gib * GIB)


def module(name, alpha_s, beta_s, slo_s, *, executions=1.0, gib=1, kinds=("a",), parts=(1,), most=64):
    profile = LatencyProfile(alpha_s, beta_s, most)
    spread = {(k, n): LatencyProfile(alpha_s / n, beta_s / n, most) for k in kinds for n in parts if n > 1}
    return Module(name, slo_s, executions, gib * GIB, {(k, 1): profile for k in kinds if 1 in parts} | spread)


def as_the_paper_writes_it(modules, device, step):
    """Algorithm 2 to the letter: N counts down by Delta, the first allotment is not taken from it."""
    spus = [max(1, -(-m.bytes * device.spus // device.bytes)) for m in modules]
    left = device.spus
    while left >= step:
        goodputs = []
        for given, m in zip(spus, modules, strict=True):
            slowed = m.profiles["a", 1]
            factor = device.spus / given
            limit = LatencyProfile(slowed.alpha_s * factor, slowed.beta_s * factor).largest_batch(m.slo_s)
            goodputs.append(limit / (m.slo_s * m.executions))
        spus[goodputs.index(min(goodputs))] += step
        left -= step
    return spus


def test_the_first_allotment_is_taken_from_n_which_the_paper_forgets():
    modules = [module("text", 0.01, 0.02, 0.4), module("loop", 0.01, 0.02, 0.2, gib=6)]
    theirs = as_the_paper_writes_it(modules, gpu(), 1)
    ours = allocate(modules, [gpu()])
    assert sum(theirs) == 11  # 3 for memory and 8 more, of 8
    assert ours.first == (1, 2)
    assert sum(ours.spus) == 8
    assert ours.left == 0
    assert ours.reason == "all SPUs are given, 0 are left of steps of 1"


def test_the_least_module_gets_the_spus():
    # The loop runs 40 times a request: it is the bottleneck, and gets all but the text encoder's one.
    modules = [module("text", 0.005, 0.01, 0.9), module("loop", 0.001, 0.01, 0.1, executions=40, most=99)]
    found = allocate(modules, [gpu()])
    assert found.spus == (1, 7)
    assert found.placed[1].limit == 77
    assert found.goodput_rps == found.placed[1].goodput_rps


def test_spus_that_raise_nobody_stay_free_and_that_is_said():
    # Both reach their largest batch with 2 of 8 SPUs each.
    modules = [module(name, 0.001, 0.01, 0.1, most=4) for name in ("one", "two")]
    found = allocate(modules, [gpu()])
    assert found.spus == (2, 2)
    assert found.left == 4
    assert "no module gains by what is left, 4 SPUs: the least is 'one' with 40 requests" in found.reason


def test_when_the_least_cannot_be_raised_the_next_one_is():
    # The first can never run within its SLO; the paper would pour all SPUs into it.
    modules = [module("slow", 0.2, 0.2, 0.1), module("fast", 0.001, 0.01, 0.1, most=99)]
    assert as_the_paper_writes_it(modules, gpu(), 1)[1] == 1
    found = allocate(modules, [gpu()])
    assert found.placed[0].goodput_rps == 0
    assert found.spus == (1, 7)


def test_steps_of_delta():
    modules = [module("one", 0.001, 0.01, 0.1), module("two", 0.001, 0.01, 0.1)]
    found = allocate(modules, [gpu()], step=3)
    assert found.spus == (4, 4)
    assert allocate(modules, [gpu(spus=9)], step=3).left == 1


def test_where_one_step_does_not_raise_it_several_are_taken():
    # With fewer than 6 of 8 SPUs not even one item is in time.
    found = allocate([module("loop", 0.05, 0.025, 0.1)], [gpu()], step=1)
    assert found.spus == (6,)
    assert found.left == 2


def test_a_module_too_large_for_any_device_is_refused_by_name_need_and_room():
    with pytest.raises(PlacementError) as refused:
        allocate([module("small", 1, 1, 9), module("unet", 1, 1, 9, gib=30)], [gpu()])
    assert refused.value.modules == (1,)
    assert str(refused.value) == (
        "module 'unet' needs 1 SPUs holding 30 GiB; free are 7 of 8 SPUs of 3 GiB on gpu0; "
        "measured on [('a', 1)]"
    )


def test_modules_that_fit_one_by_one_but_not_together_are_refused():
    with pytest.raises(PlacementError, match="needs 5 SPUs holding 13 GiB; free are 3 of 8 SPUs"):
        allocate([module("one", 1, 1, 9, gib=13), module("two", 1, 1, 9, gib=13)], [gpu()])


@pytest.mark.parametrize(("modules", "step"), [([], 1), ([module("one", 1, 1, 1)], 0)])
def test_nothing_to_divide_is_refused(modules, step):
    with pytest.raises(ValueError, match="at least"):
        allocate(modules, [gpu()], step=step)


def test_best_fit_takes_the_device_with_the_least_room_largest_module_first():
    modules = [module(name, 0.001, 0.01, 1.0) for name in ("a", "b", "c", "d")]
    placed = place(modules, [2, 5, 4, 3], [gpu("g0"), gpu("g1")])
    # 5 to g0; 4 does not fit its 3, to g1; 3 to g0 (3 free rather than 4); 2 to g1.
    assert [one.pieces for one in placed] == [((1, 2),), ((0, 5),), ((1, 4),), ((0, 3),)]


def test_what_no_device_takes_is_spread_over_the_fewest():
    wide = module("wide", 0.01, 0.02, 0.2, parts=(1, 2))
    narrow = module("narrow", 0.01, 0.02, 0.2)
    placed = place([wide, narrow], [11, 4], [gpu("g0"), gpu("g1"), gpu("g2")])
    assert placed[0].pieces == ((0, 5), (1, 6))
    # The device with the least room that takes it is none of these two.
    assert placed[1].pieces == ((2, 4),)


def test_copies_or_parts_whichever_allows_the_larger_batch():
    # Parallel parts halve the time here: 2 parts on 16 SPUs serve 18 in 0.1 s, 2 copies 2 x 8.
    parts = module("parts", 0.01, 0.02, 0.1, parts=(1, 2))
    (placed,) = place([parts], [16], [gpu("g0"), gpu("g1")])
    assert (placed.copies, placed.parts, placed.limit) == (1, 2, 18)
    # With no gain from parts the copies win.
    flat = Module("flat", 0.1, 1.0, GIB, {("a", n): LatencyProfile(0.01, 0.02) for n in (1, 2)})
    (placed,) = place([flat], [16], [gpu("g0"), gpu("g1")])
    assert (placed.copies, placed.parts, placed.limit) == (2, 1, 16)
    assert placed.goodput_rps == pytest.approx(160)


def test_each_copy_holds_the_whole_module_and_each_part_its_part():
    devices = [gpu("g0"), gpu("g1")]
    large = module("large", 0.01, 0.02, 0.2, gib=40, parts=(1, 2))
    (placed,) = place([large], [14], devices)
    assert (placed.copies, placed.parts) == (1, 2)
    with pytest.raises(PlacementError, match="holding 40 GiB"):
        place([large], [12], devices)
    assert least_spus(large, devices) == [14]
    assert allocate([large], devices).first == (14,)


def test_the_slowest_piece_binds_a_model_parallel_copy():
    wide = module("wide", 0.01, 0.02, 0.1, parts=(2,))
    odd, even = (place([wide], [spus], [gpu("g0"), gpu("g1")])[0].limit for spus in (11, 10))
    assert odd == even == 10


def test_types_of_devices_differ_in_spus_memory_and_profile():
    fast = LatencyProfile(0.001, 0.01)
    slow = LatencyProfile(0.004, 0.04)
    both = Module("both", 0.1, 1.0, 4 * GIB, {("a", 1): slow, ("h", 1): fast})
    devices = [Device("old", "a", 4, 16 * GIB), Device("new", "h", 16, 80 * GIB)]
    found = allocate([both], devices)
    # One SPU of either type holds it; the new device lets it grow to its whole.
    assert found.first == (1,)
    assert found.placed[0].pieces == ((1, 16),)
    assert found.left == 4


def test_a_type_without_room_sends_the_module_to_the_next_with_more_spus():
    # 10 GiB: 2 SPUs of the new type, 3 of the old; the new one is full.
    profile = LatencyProfile(0.001, 0.01)
    devices = [Device("old", "a", 4, 16 * GIB), Device("new", "h", 4, 32 * GIB)]
    full = Module("full", 0.1, 1.0, 26 * GIB, {("h", 1): profile})
    other = Module("other", 0.1, 1.0, 10 * GIB, {("a", 1): profile, ("h", 1): profile})
    found = allocate([full, other], devices)
    assert found.first == (4, 3)
    assert found.placed[1].pieces[0][0] == 0


def test_a_costly_stream_brings_its_modules_together():
    # Apart, an item's way (20 ms) leaves room for few; two devices of 4 SPUs.
    devices = [gpu("g0", 4), gpu("g1", 4)]
    modules = [module("prefill", 0.01, 0.01, 0.1), module("decode", 0.005, 0.01, 0.1)]
    edge = Edge(0, 1, item_s=0.02)
    found = colocate(modules, devices, [edge])
    assert found.pairs == ((0, 1),)
    assert found.allocation.placed[0].devices == found.allocation.placed[1].devices
    assert found.allocation.goodput_rps > found.apart.goodput_rps
    assert found.tried == 1


def test_a_cheap_stream_does_not():
    devices = [gpu("g0", 4), gpu("g1", 4)]
    modules = [module("text", 0.01, 0.01, 0.1), module("loop", 0.01, 0.01, 0.1)]
    found = colocate(modules, devices, [Edge(0, 1, item_s=0.0), Edge(1, 1, item_s=0.01)])
    assert found.tried == 1  # the loop of a module on itself is no pair
    assert found.pairs == ()
    assert found.allocation == found.apart


def test_a_stream_crossed_once_a_request_weighs_little_on_a_module_that_runs_often():
    # 50 ms an item, but once in 100 executions.
    modules = [module("prefill", 0.01, 0.01, 0.1), module("decode", 0.005, 0.01, 0.1, executions=100)]
    placed = place(modules, [4, 4], [gpu("g0", 4), gpu("g1", 4)], [Edge(0, 1, item_s=0.05)])
    free = place(modules, [4, 4], [gpu("g0", 4), gpu("g1", 4)])
    assert (placed[1].limit, free[1].limit) == (16, 18)


def test_a_pair_that_fits_nowhere_together_stays_apart():
    modules = [module("one", 0.01, 0.01, 0.1, gib=20), module("two", 0.01, 0.01, 0.1, gib=20)]
    found = colocate(modules, [gpu("g0"), gpu("g1")], [Edge(0, 1, item_s=0.05)])
    assert found.pairs == ()
