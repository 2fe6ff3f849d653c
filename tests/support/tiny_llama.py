"""Tiny Llama models with random parameters: a folder to split, and transformers to compare with."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from keystage.bundle import store
from keystage.models.base import LoadedStage, Row
from keystage.models.loading import load_stage

BASE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def tiny_model(**changes: Any) -> Any:
    """A random `LlamaForCausalLM` in fp32; the same one for the same arguments."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    # Wider than the usual 0.02: attention then differs clearly from position to position.
    config = LlamaConfig(**{**BASE, "initializer_range": 0.2, **changes})
    model = LlamaForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith(("norm.weight", "bias")):
            torch.nn.init.normal_(parameter, 1.0 if name.endswith("norm.weight") else 0.0, 0.2)
    return model


def write_folder(model: Any, folder: Path, shards: int = 1) -> Path:
    """Saves a model as a Hugging Face style folder, without a tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(model.config.to_dict(), default=str))
    tensors = {name: tensor.detach().contiguous() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    weight_map: dict[str, str] = {}
    names = sorted(tensors)
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        mine = names[shard::shards]
        save_file({name: tensors[name] for name in mine}, folder / file)
        weight_map.update(dict.fromkeys(mine, file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


class Chain:
    """The stages of a bundle, run one after another."""

    def __init__(self, bundle: Path, device: str = "cpu", dtype: str | None = None) -> None:
        self.pipeline = store.load(bundle)
        self.stages: list[LoadedStage] = [
            load_stage(bundle, self.pipeline, stage.index, device, dtype) for stage in self.pipeline.stages
        ]

    def open(self, slot: int, capacity: int) -> None:
        """Opens a slot at every stage."""
        for stage in self.stages:
            stage.open(slot, capacity)

    def forward(self, ids: Sequence[int], rows: Sequence[Row], want: Sequence[int]) -> torch.Tensor:
        """Logits of the wanted rows."""
        x = torch.tensor(ids, dtype=torch.int64)
        for stage in self.stages:
            x = stage.forward(x, rows, want)
        return x

    def generate(self, prompts: Sequence[Sequence[int]], tokens: int, slot: int = 0) -> list[list[int]]:
        """Greedy ids of all prompts, prefilled in one wave and decoded in one batch."""
        slots = range(slot, slot + len(prompts))
        for number, prompt in zip(slots, prompts, strict=True):
            self.open(number, len(prompt) + tokens)
        rows = [Row(number, 0, len(prompt)) for number, prompt in zip(slots, prompts, strict=True)]
        found: list[list[int]] = [[] for _ in prompts]
        ids = list(itertools.chain.from_iterable(prompts))
        for _ in range(tokens):
            newest = self.forward(ids, rows, range(len(rows))).argmax(-1).tolist()
            for row, token in enumerate(newest):
                found[row].append(token)
            ids = newest
            rows = [Row(row.slot, row.start + row.count, 1) for row in rows]
        return found
