"""Requests for pipelines that embed, hear or see: addresses, bodies that parse, sizes, what answers tell."""

from __future__ import annotations

import email
import io
import json
import wave
from email.message import Message

import numpy as np
import pytest

from keystage.loadgen import clips
from keystage.loadgen.lengths import Length
from keystage.loadgen.options import LoadOptions
from keystage.loadgen.plan import drawn_sizes, plan
from keystage.loadgen.target import KINDS, Target, TargetKind

BASE = "http://127.0.0.1:8080/function/p"
SIZE = Length(20, 5)


@pytest.mark.parametrize(
    ("kind", "path", "content_type", "streams"),
    [
        ("openai", "/v1/completions", "application/json", True),
        ("embeddings", "/v1/embeddings", "application/json", False),
        ("transcriptions", "/v1/audio/transcriptions", "multipart/form-data", False),
        ("images", "/", "application/x-npy", False),
        ("masks", "/", "application/json", False),
        ("function", "/", "application/json", False),
        ("raw", "/", "application/octet-stream", False),
    ],
)
def test_where_each_kind_goes(kind: TargetKind, path: str, content_type: str, streams: bool) -> None:
    target = Target(kind, BASE)
    assert target.url == BASE + path
    assert target.headers["Content-Type"].partition(";")[0] == content_type
    assert target.is_streaming is streams
    assert target.has_lengths is (kind in ("openai", "embeddings", "function", "masks"))


@pytest.mark.parametrize("kind", KINDS)
def test_bodies_are_decided_by_seed_and_index(kind: TargetKind) -> None:
    given = tuple(b"%d" % number for number in range(10_000)) if kind == "bodies" else ()
    target = Target(kind, BASE, bodies=given)
    bodies = [target.body(SIZE, 3, index) for index in range(4)]
    assert len(set(bodies)) == 4
    assert bodies == [target.body(SIZE, 3, index) for index in range(4)]
    assert bodies[0] != target.body(SIZE, 4, 0)


def _parts(target: Target, body: bytes) -> dict[str, Message]:
    head = f"Content-Type: {target.headers['Content-Type']}\r\n\r\n".encode()
    message = email.message_from_bytes(head + body)
    assert message.is_multipart()
    return {str(part.get_param("name", header="content-disposition")): part for part in message.walk()}


@pytest.mark.parametrize("model", [None, "whisper"])
def test_a_recording_is_a_form_with_a_wav_file(model: str | None) -> None:
    target = Target("transcriptions", BASE, model)
    durations = set()
    for index in range(clips.VARIETY + 1):
        parts = _parts(target, target.body(SIZE, 1, index))
        file = parts["file"]
        assert file.get_filename() == "clip.wav"
        assert ("model" in parts) is (model is not None)
        assert parts["response_format"].get_payload() == "verbose_json"
        with wave.open(io.BytesIO(file.get_payload(decode=True))) as sound:
            assert (sound.getnchannels(), sound.getsampwidth(), sound.getframerate()) == (1, 2, 16_000)
            samples = np.frombuffer(sound.readframes(sound.getnframes()), "<i2")
        durations.add(len(samples) / 16_000)
        assert 1000 < np.abs(samples).max() <= 32767
    assert clips.CLIP_S[0] - 0.2 <= min(durations) < max(durations) <= clips.CLIP_S[1] + 0.2


def test_a_text_with_a_missing_word() -> None:
    words = json.loads(Target("masks", BASE, mask="<mask>").body(SIZE, 1, 0))["text"].split()
    assert (len(words), words.count("<mask>"), words[10]) == (20, 1, "<mask>")
    assert json.loads(Target("masks", BASE).body(Length(1, 1), 1, 0))["text"] == "[MASK]"


def test_a_picture_is_a_numpy_file() -> None:
    pixels = np.load(io.BytesIO(Target("images", BASE).body(SIZE, 1, 0)), allow_pickle=False)
    assert (pixels.dtype, pixels.shape) == (np.dtype("uint8"), (3, 224, 224))
    assert pixels.std() > 20


def test_clips_take_turns_so_that_memory_holds_few() -> None:
    for kind in ("images", "transcriptions"):
        target = Target(kind, BASE)
        assert target.body(SIZE, 1, clips.VARIETY) is target.body(SIZE, 1, 0)


@pytest.mark.parametrize("kind", ["openai", "embeddings", "function"])
def test_without_a_tokenizer_a_token_is_a_byte(kind: TargetKind) -> None:
    key = "input" if kind == "embeddings" else "prompt"
    words = json.loads(Target(kind, BASE).body(SIZE, 1, 0))[key]
    assert len(words.split()) == 20
    text = json.loads(Target(kind, BASE, byte_tokens=True).body(SIZE, 1, 0))[key]
    assert len(text.encode()) == 20
    assert words.startswith(text)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("images", "pictures of 224 x 224 pixels"),
        ("transcriptions", "recordings of 2 to 12 s"),
        ("raw", "bodies of 4096 bytes"),
        ("embeddings", "token lengths of the Azure"),
    ],
)
def test_a_plan_says_what_it_sends(kind: TargetKind, words: str) -> None:
    options = LoadOptions(url=BASE, target=kind, rate_rps=4.0, duration_s=5.0, seed=1, context_tokens=64)
    target = Target(kind, BASE)
    made = plan(options, target)
    assert words in made.source
    assert len(made.bodies) == len(made.times_s) == len(made.lengths)
    sizes = drawn_sizes(options, target, 3, 1)
    assert all(size.prompt_tokens + size.output_tokens <= 64 for size in sizes)
    assert (sizes == [Length(1, 1)] * 3) is not target.has_lengths
