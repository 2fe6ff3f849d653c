"""Tiny Whisper models with random parameters, inputs for them, and transformers to compare with."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from keystage.bundle import store
from keystage.models.base import LoadedStage, Row
from keystage.models.loading import load_stage

FRAMES = 50
"""One second of sound."""
START, END = 3, 2
BASE: dict[str, Any] = {
    "vocab_size": 97,
    "d_model": 48,
    "encoder_layers": 3,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 6,
    "encoder_ffn_dim": 80,
    "decoder_ffn_dim": 72,
    "num_mel_bins": 20,
    "max_source_positions": FRAMES,
    "max_target_positions": 40,
    "decoder_start_token_id": START,
    "eos_token_id": END,
    "bos_token_id": END,
    "pad_token_id": END,
    "suppress_tokens": [],
    "begin_suppress_tokens": [],
    "init_std": 0.4,
}


def tiny_model(**changes: Any) -> Any:
    """A random `WhisperForConditionalGeneration` in fp32; the same one for the same arguments."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    torch.manual_seed(1)
    model = WhisperForConditionalGeneration(WhisperConfig(**{**BASE, **changes})).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith("bias"):
            torch.nn.init.normal_(parameter, 1.0 if name.endswith("norm.weight") else 0.0, 0.2)
    # Strong positions, or a random model says one word for ever.
    torch.nn.init.normal_(model.model.decoder.embed_positions.weight, 0.0, 1.6)
    return model


def write_folder(model: Any, folder: Path, generation: dict[str, Any] | None = None) -> Path:
    """Saves a model as a Hugging Face style folder, without a tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {**model.config.to_dict(), "architectures": ["WhisperForConditionalGeneration"]}
    (folder / "config.json").write_text(json.dumps(config, default=str))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    tensors = {name: tensor.detach().contiguous() for name, tensor in model.state_dict().items()}
    del tensors["proj_out.weight"]
    save_file(tensors, folder / "model.safetensors")
    return folder


def sound(seed: int, seconds: float = 1.0) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Samples at 16 kHz: a chord that changes with the seed, in some noise."""
    random = np.random.default_rng(seed)
    at_s = np.arange(int(seconds * 16_000)) / 16_000
    tones = sum(np.sin(2 * np.pi * hertz * at_s) for hertz in random.uniform(100, 4000, 3))
    return (0.2 * tones + 0.02 * random.standard_normal(at_s.size)).astype(np.float32)


def wav(samples: np.ndarray[Any, Any], rate: int = 16_000) -> bytes:
    """A WAV file of 32 bit floats, which holds the samples exactly."""
    data = samples.astype("<f4").tobytes()
    head = struct.pack("<IHHIIHH", 16, 3, 1, rate, 4 * rate, 4, 32)
    body = b"WAVEfmt " + head + b"data" + struct.pack("<I", len(data)) + data
    return b"RIFF" + struct.pack("<I", len(body)) + body


def greedy(model: Any, samples: np.ndarray[Any, Any], prompt: Sequence[int], tokens: int) -> list[int]:
    """What transformers' model says of a sound, token by token, up to the end token."""
    features, ids = spectrum(model, samples), list(prompt)
    with torch.inference_mode():
        for _ in range(tokens):
            logits = model(input_features=features, decoder_input_ids=torch.tensor([ids])).logits[0, -1]
            ids.append(int(logits.argmax()))
            if ids[-1] == END:
                break
    return ids[len(prompt) :]


def spectrum(model: Any, samples: np.ndarray[Any, Any]) -> torch.Tensor:
    """What transformers makes of an input, [1, mels, 2 * frames]."""
    from transformers import WhisperFeatureExtractor

    seconds = model.config.max_source_positions / 50
    extractor = WhisperFeatureExtractor(model.config.num_mel_bins, chunk_length=1)
    extractor.n_samples = int(16_000 * seconds)
    found = extractor(samples, sampling_rate=16_000, return_tensors="pt", max_length=extractor.n_samples)
    features: torch.Tensor = found.input_features
    return features


class Chain:
    """The stages of a bundle, run one after another."""

    def __init__(self, bundle: Path, dtype: str | None = None) -> None:
        self.pipeline = store.load(bundle)
        self.stages: list[LoadedStage] = [
            load_stage(bundle, self.pipeline, stage.index, "cpu", dtype) for stage in self.pipeline.stages
        ]
        self.frames = self.stages[0].shape.prefix

    def open(self, slot: int, tokens: int, samples: np.ndarray[Any, Any] | None = None) -> None:
        """Opens a slot at every stage, with its input at the first."""
        for stage in self.stages:
            stage.open(slot, self.frames + tokens)
        if samples is not None:
            self.stages[0].take_input(slot, samples.tobytes())  # type: ignore[attr-defined]

    def forward(self, ids: Sequence[int], rows: Sequence[Row], want: Sequence[int]) -> torch.Tensor:
        """Logits of the wanted rows."""
        x = torch.tensor(ids, dtype=torch.int64)
        for stage in self.stages:
            x = stage.forward(x, rows, want)
        return x

    def opening(self, slot: int, prompt: Sequence[int]) -> tuple[list[int], Row]:
        """Ids and row that open a session."""
        return [0] * self.frames + list(prompt), Row(slot, 0, self.frames + len(prompt))

    def generate(self, samples: np.ndarray[Any, Any], prompt: Sequence[int], tokens: int) -> list[int]:
        """Greedy ids of one session."""
        self.open(0, len(prompt) + tokens, samples)
        ids, row = self.opening(0, prompt)
        found: list[int] = []
        for _ in range(tokens):
            ids = [int(self.forward(ids, [row], [0])[0].argmax())]
            found += ids
            row = Row(0, row.start + row.count, 1)
        return found
