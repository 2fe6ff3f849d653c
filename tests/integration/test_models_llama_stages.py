"""Stages run one after another equal the unsplit model in transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_llama import Chain, tiny_model, write_folder

from keystage.bundle.split import split
from keystage.models.base import Row, StageError
from keystage.models.loading import warm_up

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "grouped": {},
    "tied": {"tie_word_embeddings": True},
    "one-kv-head": {"num_key_value_heads": 1},
    "ungrouped": {"num_key_value_heads": 6},
    "head-dim": {"head_dim": 16},
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "llama3": {"rope_scaling": LLAMA3},
    "biases": {"attention_bias": True, "mlp_bias": True},
}


def logits_of(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model(torch.tensor([ids])).logits[0]
    return found


def ids_of(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(97, (length,), generator=generator).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize("variant", VARIANTS)
def test_chunked_prefill_mixed_with_decode_equals_the_whole_model(
    variant: str, stages: int, tmp_path: Path
) -> None:
    model = tiny_model(**VARIANTS[variant])
    folder = write_folder(model, tmp_path / "model")
    chain = Chain(split(folder, stages, "parameters", tmp_path / "bundle", "tiny"))
    first, second, third = ids_of(60, 1), ids_of(50, 2), ids_of(9, 3)
    chain.open(7, 100)
    chain.open(3, 64)
    chain.open(5, 9)
    # Each wave: (slot, ids, start, count); slots enter late, and rows change their order.
    waves = [
        [(7, first, 0, 20)],
        [(7, first, 20, 1), (3, second, 0, 17)],
        [(3, second, 17, 30), (7, first, 21, 38), (5, third, 0, 1)],
        [(5, third, 1, 1), (3, second, 47, 3), (7, first, 59, 1)],
        [(5, third, 2, 7)],
    ]
    expected = {7: logits_of(model, first), 3: logits_of(model, second), 5: logits_of(model, third)}
    for wave in waves:
        ids = [token for _, tokens, start, count in wave for token in tokens[start : start + count]]
        rows = [Row(slot, start, count) for slot, _, start, count in wave]
        found = chain.forward(ids, rows, range(len(rows)))
        assert found.dtype is torch.float32
        wanted = torch.stack([expected[slot][start + count - 1] for slot, _, start, count in wave])
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Chain:
    place = tmp_path_factory.mktemp("tiny")
    folder = write_folder(tiny_model(), place / "model")
    return Chain(split(folder, 2, "uniform", place / "bundle", "tiny"))


def test_only_wanted_rows_get_logits(chain: Chain) -> None:
    for slot in (1, 2, 3):
        chain.open(slot, 8)
    rows = [Row(1, 0, 3), Row(2, 0, 2), Row(3, 0, 1)]
    ids = ids_of(6, 4)
    every = chain.forward(ids, rows, [0, 1, 2])
    some = chain.forward(ids, rows, [2, 0])
    torch.testing.assert_close(some, every[[2, 0]])
    assert chain.forward(ids, rows, []).shape == (0, 97)
    assert chain.forward([], [], []).shape == (0, 97)


def test_a_row_from_zero_resets_its_slot(chain: Chain) -> None:
    ids = ids_of(12, 5)
    chain.open(1, 12)
    fresh = chain.forward(ids, [Row(1, 0, 12)], [0])
    chain.forward(ids[::-1], [Row(1, 0, 12)], [0])
    torch.testing.assert_close(chain.forward(ids, [Row(1, 0, 12)], [0]), fresh)


def test_warm_up_leaves_sessions_alone(chain: Chain) -> None:
    ids = ids_of(6, 6)
    chain.open(1, 6)
    whole = chain.forward(ids, [Row(1, 0, 6)], [0])
    chain.forward(ids[:4], [Row(1, 0, 4)], [0])
    for stage in chain.stages:
        warm_up(stage)
    torch.testing.assert_close(chain.forward(ids[4:], [Row(1, 4, 2)], [0]), whole, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("ids", "rows", "message"),
    [
        ([1], [Row(9, 0, 1)], "slot 9 is not open"),
        ([1, 1], [Row(1, 0, 1), Row(1, 1, 1)], "twice"),
        ([1], [Row(1, 3, 1)], "starts at position 3, the slot holds 2"),
        ([1] * 7, [Row(1, 2, 7)], "9 tokens do not fit a capacity of 8"),
        ([], [Row(1, 0, 0)], "at least 1 token, got 0"),
        ([1, 1], [Row(1, 0, 1)], r"shape \(2,\), \(1,\) expected"),
        ([97], [Row(1, 0, 1)], "97, the vocabulary is 0 to 96"),
        ([-1], [Row(1, 0, 1)], "-1 to -1, the vocabulary is 0 to 96"),
    ],
)
def test_impossible_rows_are_refused_and_change_nothing(
    chain: Chain, ids: list[int], rows: list[Row], message: str
) -> None:
    chain.open(1, 8)
    chain.forward([4, 5], [Row(1, 0, 2)], [0])
    with pytest.raises(StageError, match=message):
        chain.forward(ids, rows, [0])
    chain.forward([6], [Row(1, 2, 1)], [0])


def test_capacity_beyond_the_context_is_refused(chain: Chain) -> None:
    with pytest.raises(StageError, match="1 to 128 tokens, got 129"):
        chain.open(1, 129)
    with pytest.raises(StageError, match="1 to 128 tokens, got 0"):
        chain.open(1, 0)


def test_a_closed_slot_is_gone(chain: Chain) -> None:
    stage = chain.stages[0]
    stage.open(4, 8)
    stage.close(4)
    stage.close(4)
    with pytest.raises(StageError, match="slot 4 is not open"):
        stage.forward(torch.tensor([1]), [Row(4, 0, 1)], [])


def test_kv_bytes_per_token(chain: Chain) -> None:
    # 3 and 2 layers, keys and values, 2 heads of 8 elements of 4 bytes.
    assert [stage.kv_token_bytes for stage in chain.stages] == [3 * 2 * 2 * 8 * 4, 2 * 2 * 2 * 8 * 4]


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_half_precision_stays_near_fp32(dtype: str, tmp_path: Path) -> None:
    model = tiny_model()
    folder = write_folder(model, tmp_path / "model")
    half = Chain(split(folder, 2, "uniform", tmp_path / "half", "tiny", dtype))
    assert half.stages[0].dtype is {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    ids = ids_of(20, 8)
    half.open(0, 20)
    half.forward(ids[:11], [Row(0, 0, 11)], [])
    found = half.forward(ids[11:], [Row(0, 11, 9)], [0])[0]
    expected = logits_of(model, ids)[-1]
    assert torch.nn.functional.cosine_similarity(found, expected, 0) > 0.99
