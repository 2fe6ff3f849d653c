"""How many standbys key stages get: one at a time, while the GPU has room, the least important go first."""

from __future__ import annotations

import pytest

from keystage.keysmanager.api import Gpu
from keystage.keysmanager.standby_plan import Class, decided, gpu_of

GIB = 1 << 30


def gpu(free_gib: float, index: int = 0) -> Gpu:
    return Gpu(
        index=index, uuid=f"GPU-{index}abc", name="g", total_bytes=100 * GIB, free_bytes=int(free_gib * GIB)
    )


def wanted(shape: str, count: int = 1, index: int = 0) -> Class:
    return Class(shape, count, index, 5 * GIB)


def test_they_come_one_at_a_time_the_most_important_first() -> None:
    classes, now = [wanted("a", 2), wanted("b")], dict[str, int]()
    steps = []
    for _ in range(4):
        now = decided(classes, now, [gpu(80)], is_short=False, is_settled=True)
        steps.append((now["a"], now["b"]))
    assert steps == [(1, 0), (2, 0), (2, 1), (2, 1)]


def test_none_comes_while_another_is_on_its_way() -> None:
    now = decided([wanted("a", 2)], {"a": 1}, [gpu(80)], is_short=False, is_settled=False)
    assert now == {"a": 1}


@pytest.mark.parametrize(("free_gib", "count"), [(15.1, 2), (14.9, 1), (5.1, 1), (4.9, 0)])
def test_between_the_bounds_nothing_changes(free_gib: float, count: int) -> None:
    now = decided([wanted("a", 2)], {"a": 1}, [gpu(free_gib)], is_short=False, is_settled=True)
    assert now == {"a": count}


def test_the_least_important_go_first_on_the_gpu_that_is_full() -> None:
    classes = [wanted("a"), wanted("b"), wanted("other", 1, 1)]
    now = {"a": 1, "b": 1, "other": 1}
    gpus = [gpu(3), gpu(80, 1)]
    now = decided(classes, now, gpus, is_short=False, is_settled=True)
    assert now == {"a": 1, "b": 0, "other": 1}
    now = decided(classes, now, gpus, is_short=False, is_settled=True)
    assert now == {"a": 0, "b": 0, "other": 1}


def test_short_host_memory_ends_them_and_lets_none_come() -> None:
    now = decided([wanted("a"), wanted("b")], {"a": 1, "b": 1}, [gpu(80)], is_short=True, is_settled=True)
    assert now == {"a": 1, "b": 0}
    now = decided([wanted("a")], {}, [gpu(80)], is_short=True, is_settled=True)
    assert now == {"a": 0}


def test_a_class_off_the_list_goes_at_once_and_one_that_wants_fewer_is_cut() -> None:
    now = decided([wanted("a", 1)], {"a": 3, "gone": 2}, [gpu(80)], is_short=False, is_settled=True)
    assert now == {"a": 1, "gone": 0}


def test_a_gpu_that_nvml_does_not_see_gets_none_and_keeps_none() -> None:
    assert decided([wanted("a")], {}, [], is_short=False, is_settled=True) == {"a": 0}
    assert decided([wanted("a", 1, -1)], {"a": 1}, [gpu(80)], is_short=False, is_settled=True) == {"a": 0}


@pytest.mark.parametrize(
    ("device", "visible", "index"),
    [
        ("cuda", "", 0), ("cuda:1", "", 1), ("cuda:2", "", -1), ("cuda:0", "1", 1), ("cuda:1", "1", -1),
        ("cuda:1", "0, GPU-1a", 1), ("cuda:0", "MIG-x", -1), ("cpu", "", -1), ("cuda:x", "", -1),
    ],
)  # fmt: skip
def test_which_gpu_a_replica_means(device: str, visible: str, index: int) -> None:
    assert gpu_of(device, visible, [gpu(1), gpu(1, 1)]) == index
