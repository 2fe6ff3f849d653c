"""Tiny BERT models with random parameters: a folder to split, and transformers to compare with."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from keystage.bundle import store
from keystage.models.loading import load_single_pass
from keystage.models.single_pass import SinglePassStage

BASE: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "max_position_embeddings": 64,
    "type_vocab_size": 2,
}


def tiny_bert(*, fills_masks: bool = False, **changes: Any) -> Any:
    """A random `BertModel` or `BertForMaskedLM` in fp32; the same one for the same arguments."""
    from transformers import BertConfig, BertForMaskedLM, BertModel

    torch.manual_seed(1)
    config = BertConfig(**{**BASE, "initializer_range": 0.2, **changes})
    config.architectures = ["BertForMaskedLM" if fills_masks else "BertModel"]
    model = (BertForMaskedLM if fills_masks else BertModel)(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith(("LayerNorm.weight", "bias")):
            torch.nn.init.normal_(parameter, 1.0 if name.endswith("weight") else 0.0, 0.2)
    return model


def write_folder(model: Any, folder: Path) -> Path:
    """Saves a model as a Hugging Face style folder, without a tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(model.config.to_dict(), default=str))
    tensors = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    if model.config.architectures == ["BertForMaskedLM"] and model.config.tie_word_embeddings:
        tensors.pop("cls.predictions.decoder.weight", None)
    save_file(tensors, folder / "model.safetensors")
    return folder


class Chain:
    """The stages of a single-pass bundle, run one after another."""

    def __init__(self, bundle: Path, device: str = "cpu", dtype: str | None = None) -> None:
        self.pipeline = store.load(bundle)
        self.stages: list[SinglePassStage] = [
            load_single_pass(bundle, self.pipeline, stage.index, device, dtype)
            for stage in self.pipeline.stages
        ]

    def __call__(self, items: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """What the last stage answers."""
        passed = list(items)
        for stage in self.stages:
            passed = stage.forward(passed)
        return passed


def word_tokenizer(folder: Path) -> None:
    """Writes a tokenizer of words `w0`, `w1`, ... (ids from 5) that frames a text as BERT's does.

    Like those of real models it asks for padding and truncation, which nobody wants here.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary = {name: index for index, name in enumerate([*special, *(f"w{i}" for i in range(126))])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.add_special_tokens(special)
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=32)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"unk": "[UNK]", "pad": "[PAD]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
    config = {f"{key}_token": value for key, value in names.items()}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
