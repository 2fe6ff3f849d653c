"""`uniform` and `parameters` are DeepSpeed's: known values, and its own functions where it is installed."""

from __future__ import annotations

import importlib.util
import itertools
import random
import sys
import types

import pytest

from keystage.bundle import deepspeed_partition, partition
from keystage.bundle.plan import parameter_weights, roles
from keystage.bundle.random_shapes import shape_config
from keystage.models.families import family_of

# What deepspeed 0.19.8 gives (`deepspeed.runtime.utils.partition_balanced`).
SMOLLM2 = [31851648, *[3540096] * 28, 31852224]
LLAMA_7B = [333455360, *[202383360] * 30, 333459456]
BALANCED: list[tuple[list[int], int, list[int]]] = [
    ([1, 1, 1, 5, 1, 1, 1, 5], 3, [0, 3, 6, 8]),
    ([1, 2, 1], 3, [0, 1, 2, 3]),
    ([1, 2, 1], 2, [0, 2, 3]),
    ([1, 1, 1, 1], 4, [0, 1, 2, 3, 4]),
    ([1, 1, 1, 1, 1], 4, [0, 2, 3, 4, 5]),
    ([1, 1, 1, 1, 0, 1], 4, [0, 2, 3, 5, 6]),
    ([1, 2, 6, 3, 4, 6, 1], 3, [0, 3, 5, 7]),
    ([0, 0, 0, 0], 2, [0, 3, 4]),
    ([10, 1, 1, 1, 1, 10], 3, [0, 1, 5, 6]),
    ([1, 1, 1, 1, 1, 1, 1, 20], 4, [0, 3, 5, 7, 8]),
    ([20, 1, 1, 1, 1, 1, 1, 1], 4, [0, 1, 4, 6, 8]),
    ([7], 1, [0, 1]),
    ([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9], 5, [0, 5, 8, 11, 13, 15]),
    (SMOLLM2, 4, [0, 4, 15, 26, 30]),
    (LLAMA_7B, 8, [0, 4, 8, 12, 16, 20, 24, 28, 32]),
]
# The same of `partition_uniform`, by numbers of layers and stages.
UNIFORM: list[tuple[int, int, list[int]]] = [
    (1, 1, [0, 1]),
    (5, 5, [0, 1, 2, 3, 4, 5]),
    (7, 3, [0, 3, 5, 7]),
    (11, 4, [0, 3, 6, 9, 11]),
    (30, 4, [0, 8, 16, 23, 30]),
    (32, 8, [0, 4, 8, 12, 16, 20, 24, 28, 32]),
]


@pytest.mark.parametrize(("weights", "parts", "bounds"), BALANCED)
def test_known_values_of_partition_balanced(weights: list[int], parts: int, bounds: list[int]) -> None:
    assert partition.least_spread(weights, parts) == bounds


@pytest.mark.parametrize(("items", "parts", "bounds"), UNIFORM)
def test_known_values_of_partition_uniform(items: int, parts: int, bounds: list[int]) -> None:
    assert partition.uniform(items, parts) == bounds


def test_it_differs_from_the_exact_partition_where_a_light_part_counts() -> None:
    # The heaviest part decides how fast a pipeline is; DeepSpeed looks at the distance to the lightest one.
    weights = [1, 2, 6, 3, 4, 6, 1]

    def sums(bounds: list[int]) -> list[int]:
        return [sum(weights[start:end]) for start, end in itertools.pairwise(bounds)]

    theirs, exact = (sums(cut(weights, 3)) for cut in (partition.least_spread, partition.balanced))
    assert max(exact) <= max(theirs)
    assert max(theirs) - min(theirs) <= max(exact) - min(exact)


def _random_cases(count: int) -> list[tuple[list[int], int]]:
    source = random.Random(1)
    cases = []
    for _ in range(count):
        items = source.randint(1, 14)
        heaviest = source.choice([1, 3, 20, 10**9])
        cases.append(([source.randint(0, heaviest) for _ in range(items)], source.randint(1, items)))
    return cases


def test_no_part_is_empty_and_every_layer_is_in_one() -> None:
    for weights, parts in _random_cases(300):
        bounds = partition.least_spread(weights, parts)
        assert len(bounds) == parts + 1
        partition.check_bounds(bounds, len(weights))


@pytest.mark.extra
def test_deepspeed_itself_gives_the_same() -> None:
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed (pip install keystage[deepspeed])")
    for weights, parts in _random_cases(400):
        bounds, chosen_by = deepspeed_partition.bounds_of("parameters", weights, parts)
        assert chosen_by.startswith("deepspeed ")
        assert bounds == partition.least_spread(weights, parts), (weights, parts)
        bounds, chosen_by = deepspeed_partition.bounds_of("uniform", weights, parts)
        assert chosen_by.startswith("deepspeed ")
        assert bounds == partition.uniform(len(weights), parts)


@pytest.mark.parametrize("shape", ["llama-7b", "opt-13b", "gpt2", "bert-large", "whisper-large"])
@pytest.mark.parametrize("stages", [2, 4, 8])
def test_real_shapes_come_out_as_the_weights_say(shape: str, stages: int) -> None:
    config = shape_config(shape)
    family = family_of(config)
    found, _ = roles(family, config, stages, "parameters", "float32")
    weights = parameter_weights(family, config)
    expected = partition.least_spread(weights, stages)
    assert [role.first_layer for role in found] == expected[:-1]
    assert (found[0].is_first, found[-1].is_last) == (True, True)
    assert not any(role.is_first for role in found[1:])


class _Older(types.ModuleType):
    """An early DeepSpeed, whose parts may be empty."""

    @staticmethod
    def partition_balanced(weights: list[float], num_parts: int) -> list[int]:
        return [0, 0, *[len(weights)] * (num_parts - 1)]

    @staticmethod
    def partition_uniform(num_items: int, num_parts: int) -> list[int]:
        return partition.uniform(num_items, num_parts)


def test_an_empty_part_of_an_older_deepspeed_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deepspeed_partition, "_deepspeed", lambda: _Older("older"))
    bounds, chosen_by = deepspeed_partition.bounds_of("parameters", [5, 1, 1, 1], 2)
    assert (bounds, chosen_by) == ([0, 1, 4], "keystage")


def test_a_deepspeed_that_cannot_be_imported_is_done_without(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("broken")
    (folder / "deepspeed").mkdir()
    (folder / "deepspeed" / "__init__.py").write_text("raise RuntimeError('no CUDA_HOME')")
    monkeypatch.syspath_prepend(str(folder))
    for name in [name for name in sys.modules if name.partition(".")[0] == "deepspeed"]:
        monkeypatch.delitem(sys.modules, name)
    assert deepspeed_partition.bounds_of("uniform", [1, 1, 1], 2) == ([0, 2, 3], "keystage")
