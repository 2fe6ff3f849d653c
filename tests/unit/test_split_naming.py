"""Stored names that a model's class has otherwise: prefixes that are missing or extra, BERT's early norms."""

from __future__ import annotations

import pytest

from keystage.bundle.naming import alignment

GPT2 = {"transformer.wte.weight", "transformer.h.0.attn.c_attn.weight", "transformer.h.1.attn.c_attn.weight"}
BERT = {
    "embeddings.word_embeddings.weight",
    "embeddings.LayerNorm.weight",
    "encoder.layer.0.output.dense.bias",
}


@pytest.mark.parametrize(
    ("stored", "wanted", "renamed"),
    [
        # As it should be: nothing changes, and what nobody reads keeps its name.
        ([*GPT2, "lm_head.weight"], GPT2, {}),
        # Written by the bare model.
        (
            ["wte.weight", "h.0.attn.c_attn.weight", "h.1.attn.c_attn.weight", "h.0.attn.bias"],
            GPT2,
            {name: name.removeprefix("transformer.") for name in GPT2},
        ),
        # Written by the model with a head, read by the bare one.
        (
            [f"bert.{name}" for name in BERT] + ["cls.predictions.bias"],
            BERT,
            {name: f"bert.{name}" for name in BERT},
        ),
        # Early names of norms, with and without a prefix; `beta` of anything else stays.
        (
            [
                "embeddings.word_embeddings.weight",
                "embeddings.LayerNorm.gamma",
                "encoder.layer.0.output.dense.bias",
            ],
            BERT,
            {"embeddings.LayerNorm.weight": "embeddings.LayerNorm.gamma"},
        ),
        (
            ["bert.embeddings.LayerNorm.gamma", "bert.embeddings.word_embeddings.weight", "other.beta"],
            BERT,
            {
                "embeddings.LayerNorm.weight": "bert.embeddings.LayerNorm.gamma",
                "embeddings.word_embeddings.weight": "bert.embeddings.word_embeddings.weight",
            },
        ),
        # Nothing fits: a missing parameter stays missing.
        (["a.b", "c"], {"x.y"}, {}),
        ([], {"x.y"}, {}),
    ],
)
def test_names(stored: list[str], wanted: set[str], renamed: dict[str, str]) -> None:
    found = alignment(stored, wanted)
    assert sorted(found.values()) == sorted(stored)
    assert {name: old for name, old in found.items() if name != old} == renamed


def test_a_name_that_is_stored_is_not_taken_by_another() -> None:
    found = alignment(["bert.x.weight", "x.weight", "bert.y.weight"], {"x.weight", "y.weight"})
    assert found["x.weight"] == "x.weight"
    assert found["y.weight"] == "bert.y.weight"
    assert found["bert.x.weight"] == "bert.x.weight"


def test_a_dropped_prefix_goes_from_what_nobody_reads_too() -> None:
    found = alignment(["bert.x.weight", "bert.pooler.bias", "cls.bias"], {"x.weight"})
    assert found == {"x.weight": "bert.x.weight", "pooler.bias": "bert.pooler.bias", "cls.bias": "cls.bias"}
