"""Allocation against brute force on one device; on several: memory holds and SPUs are conserved."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from keystage.batching.profile import LatencyProfile
from keystage.streams.allocate import allocate
from keystage.streams.colocate import colocate
from keystage.streams.interpolate import on_spus, table
from keystage.streams.placement import Device, Edge, Module, PlacementError

GIB = 2**30


def profiles():
    return st.builds(
        LatencyProfile, st.integers(1, 40).map(lambda v: v / 1000), st.integers(1, 60).map(lambda v: v / 1000)
    )


def modules(kinds=("a",), parts=(1,), most_gib=8):
    return st.builds(
        lambda slo, executions, gib, profile, gains: Module(
            "m",
            slo,
            executions,
            gib * GIB,
            {(k, n): LatencyProfile(profile.alpha_s / g, profile.beta_s / g) for (k, n), g in gains.items()},
        ),
        st.integers(20, 900).map(lambda v: v / 1000),
        st.sampled_from([1.0, 1.5, 4.0, 40.0]),
        st.integers(0, most_gib),
        profiles(),
        st.fixed_dictionaries({(k, n): st.sampled_from([1.0, 1.6, 2.0]) for k in kinds for n in parts}),
    )


def goodput(module, spus, device):
    if spus > device.spus:
        return 0.0
    limit = on_spus(module.profiles["a", 1], spus, 1, device.spus).largest_batch(module.slo_s)
    return limit / (module.slo_s * module.executions)


@settings(max_examples=200)
@given(st.lists(modules(), min_size=1, max_size=3), st.integers(3, 10), st.integers(1, 3))
def test_on_one_device_the_least_goodput_is_the_best_there_is_within_delta(program, spus, step):
    device = Device("gpu0", "a", spus, 24 * GIB)
    least = [max(1, -(-m.bytes * spus // device.bytes)) for m in program]
    try:
        found = allocate(program, [device], step=step)
    except PlacementError:
        assert sum(least) > spus
        return
    assert list(found.first) == least
    ways = [range(first, spus + 1, step) for first in least]
    best = max(
        min(goodput(m, given, device) for m, given in zip(program, chosen, strict=True))
        for chosen in itertools.product(*ways)
        if sum(chosen) <= spus
    )
    assert found.goodput_rps == best
    assert sum(found.spus) + found.left == spus


@settings(max_examples=150)
@given(
    st.lists(modules(kinds=("a", "h"), parts=(1, 2), most_gib=30), min_size=1, max_size=4),
    st.lists(st.sampled_from(["a", "h"]), min_size=1, max_size=4),
    st.integers(1, 3),
    st.booleans(),
)
def test_on_several_devices_memory_holds_and_spus_are_conserved(program, kinds, step, has_edges):
    types = {"a": (4, 24), "h": (6, 48)}
    devices = [Device(f"g{i}", kind, types[kind][0], types[kind][1] * GIB) for i, kind in enumerate(kinds)]
    edges = [Edge(i, i + 1, 0.01) for i in range(len(program) - 1)] if has_edges else []
    try:
        found = colocate(program, devices, edges, step=step).allocation
    except PlacementError:
        return  # what is refused, and how, the unit tests say
    used = [0] * len(devices)
    held = [0.0] * len(devices)
    for module, spus_of, placed in zip(program, found.spus, found.placed, strict=True):
        assert sum(spus for _, spus in placed.pieces) == spus_of
        assert placed.copies * placed.parts == len(placed.pieces)
        assert len({devices[d].kind for d in placed.devices}) == 1
        shares = [spus for _, spus in placed.pieces]
        assert max(shares) - min(shares) <= 1
        for index, spus in placed.pieces:
            used[index] += spus
            held[index] += module.bytes / placed.parts
            assert spus * devices[index].bytes / devices[index].spus >= module.bytes / placed.parts - 1
    for device, spus, memory in zip(devices, used, held, strict=True):
        assert spus <= device.spus
        assert memory <= device.bytes + len(program)
    assert sum(used) + found.left == sum(device.spus for device in devices)
    assert all((given - first) % step == 0 for given, first in zip(found.spus, found.first, strict=True))


@given(
    times=st.lists(st.floats(0.01, 10.0), min_size=1, max_size=8),
    steps=st.lists(st.integers(1, 5), min_size=8, max_size=8),
    within_s=st.floats(0.0, 12.0),
)
def test_the_largest_batch_of_a_table_is_the_largest(times, steps, within_s):
    batches = [sum(steps[: place + 1]) for place in range(len(times))]
    profile = table(batches, times)
    sizes = range(1, profile.most + 1)
    found = profile.largest_batch(within_s)
    assert found == max((b for b in sizes if profile.latency_s(b) <= within_s), default=0)
    assert all(profile.latency_s(b) <= profile.latency_s(b + 1) + 1e-12 for b in range(1, profile.most))
