"""KV state that leaves one pool of blocks and enters another, in the form that a CPU's sessions have."""

from __future__ import annotations

import random

import pytest
import torch

from keystage.models.base import Row
from keystage.models.cuda_pool import CudaPool
from keystage.models.kv import KvSlots

LAYERS, KV_HEADS, DIM, CONTEXT = 4, 2, 8, 96
CPU = torch.device("cpu")


def pool_of(blocks: int) -> CudaPool:
    return CudaPool(LAYERS, KV_HEADS, DIM, blocks, CONTEXT, CPU, torch.float32)


def filled(pool: CudaPool, slot: int, count: int, seed: int) -> torch.Tensor:
    """Fills a session as the kernels do, one position after another; what `read` should give."""
    state = torch.randn(LAYERS, 2 * KV_HEADS, count, DIM, generator=torch.Generator().manual_seed(seed))
    pool.open(slot, CONTEXT)
    rows = [Row(slot, 0, count)]
    pool.check(rows, 0)
    for position, place in enumerate(pool.places(slot, 0, count).tolist()):
        for layer, (keys, values) in enumerate(pool.layers):
            keys[place] = state[layer, :KV_HEADS, position]
            values[place] = state[layer, KV_HEADS:, position]
    pool.commit(rows, 0)
    return state


@pytest.mark.parametrize("count", [1, 15, 16, 17, 70])
def test_what_one_pool_gives_another_takes_whatever_its_blocks(count: int) -> None:
    draws = random.Random(count)
    here, there = pool_of(20), pool_of(24)
    others = [(slot, filled(here, slot, draws.randint(1, 30), slot)) for slot in (1, 2)]
    here.close(1)
    state = filled(here, 3, count, 99)
    found = here.read(3, 0, slice(0, LAYERS))
    assert found is not None
    assert torch.equal(found, state)
    filled(there, 7, 33, 5)
    there.open(3, CONTEXT)
    assert there.write(3, 0, slice(0, LAYERS), found)
    again = there.read(3, 0, slice(0, LAYERS))
    assert again is not None
    assert torch.equal(again, state)
    there.check([Row(3, count, 1)], 0)
    kept = here.read(2, 0, slice(0, LAYERS))
    assert kept is not None
    assert torch.equal(kept, others[1][1])


def test_state_passes_between_a_pool_and_the_buffers_of_a_cpu() -> None:
    pool = pool_of(8)
    state = filled(pool, 1, 37, 1)
    slots = KvSlots(LAYERS, KV_HEADS, 2, DIM, CPU, torch.float32)
    slots.open(1, 50)
    found = pool.read(1, 0, slice(0, LAYERS))
    assert found is not None
    assert slots.write(1, found)
    back = slots.read(1)
    assert back is not None
    assert torch.equal(back, state)
    pool.open(2, 50)
    assert pool.write(2, 0, slice(0, LAYERS), back)


def test_a_stage_of_several_gives_its_own_layers_and_how_far_they_reach() -> None:
    pool = pool_of(8)
    state = filled(pool, 1, 20, 2)
    pool.commit([Row(1, 20, 3)], 1)  # the second stage of the span was reached by a wave of its own
    second = pool.read(1, 1, slice(2, 4))
    first = pool.read(1, 0, slice(0, 2))
    assert second is not None
    assert first is not None
    assert second.shape[2] == 23
    assert torch.equal(first, state[:2])
    assert torch.equal(second[:, :, :20], state[2:])


def test_a_session_goes_on_from_where_it_was_rewound_to() -> None:
    pool = pool_of(8)
    filled(pool, 1, 40, 3)
    assert pool.rewind(1, 25)
    pool.check([Row(1, 25, 10)], 0)
    short = pool.read(1, 0, slice(0, LAYERS))
    assert short is not None
    assert short.shape[2] == 25
    assert pool.rewind(1, 90)
    assert pool.read(1, 0, slice(0, LAYERS)) is not None
    assert not pool.rewind(2, 1)


def test_what_does_not_fit_is_refused_and_takes_no_blocks() -> None:
    pool = pool_of(3)
    whole = slice(0, LAYERS)
    state = torch.zeros(LAYERS, 2 * KV_HEADS, 20, DIM)
    assert pool.read(1, 0, whole) is None
    assert not pool.write(1, 0, whole, state), "not open"
    pool.open(1, 19)
    assert not pool.write(1, 0, whole, state), "more than it may ever hold"
    pool.open(1, CONTEXT)
    assert not pool.write(1, 0, whole, torch.zeros(LAYERS, 2 * KV_HEADS, 49, DIM)), "too few blocks"
    assert not pool.write(1, 0, whole, state[:3])
    assert not pool.write(1, 0, whole, state[0])
    assert pool.free_and_total == (3, 3)
    assert pool.read(1, 0, whole) is None
    assert pool.write(1, 0, whole, state)
    assert pool.free_and_total == (1, 3)
