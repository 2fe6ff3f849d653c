"""No batch ends later under EFTF than under the spatial split, whatever comes when."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keystage.streams.shared_device import play


@st.composite
def shared_devices(draw):
    spus = draw(st.lists(st.integers(1, 6), min_size=1, max_size=5))
    device_spus = sum(spus) + draw(st.integers(0, 3))
    count = draw(st.integers(1, 25))
    gaps = draw(st.lists(st.integers(0, 40), min_size=count, max_size=count))
    modules = draw(st.lists(st.integers(0, len(spus) - 1), min_size=count, max_size=count))
    whole = draw(st.lists(st.integers(1, 60), min_size=count, max_size=count))
    batches, now_s = [], 0.0
    for gap, module, seconds in zip(gaps, modules, whole, strict=True):
        now_s += gap / 8
        batches.append((module, now_s, seconds / 8))
    return batches, spus, device_spus


@pytest.mark.parametrize("strict", [False, True])
@settings(max_examples=300)
@given(case=shared_devices())
def test_no_batch_ends_later_than_under_the_spatial_split(strict, case):
    batches, spus, device_spus = case
    for course in play(batches, spus, device_spus, strict=strict):
        assert course.end_s <= course.spatial_s + 1e-9 * (1 + course.spatial_s)


@settings(max_examples=200)
@given(case=shared_devices())
def test_the_device_does_all_work_and_never_idles_with_work_waiting(case):
    batches, spus, device_spus = case
    courses = play(batches, spus, device_spus)
    # Busy periods of one server with these arrivals: whatever the order, they are the same.
    free_s = 0.0
    for _, arrived_s, whole_s in batches:
        free_s = max(free_s, arrived_s) + whole_s
    assert max(course.end_s for course in courses) == pytest.approx(free_s)
    for (_, arrived_s, whole_s), course in zip(batches, courses, strict=True):
        assert course.start_s >= arrived_s
        assert course.end_s - course.start_s >= whole_s - 1e-9 * (1 + course.end_s)


@settings(max_examples=200)
@given(case=shared_devices())
def test_batches_of_a_module_run_one_after_another_in_order(case):
    batches, spus, device_spus = case
    courses = play(batches, spus, device_spus)
    for module in range(len(spus)):
        mine = [course for course in courses if course.module == module]
        assert all(later.start_s >= earlier.end_s - 1e-9 for earlier, later in itertools.pairwise(mine))
