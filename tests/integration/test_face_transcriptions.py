"""`/v1/audio/transcriptions` over real HTTP, with an engine that answers what the test says."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from support.face_server import byte_level_tokenizer, served
from support.tiny_whisper import sound, wav

from keystage.bundle.api import emulated
from keystage.router import transcriptions
from keystage.router.engine import Generation, Limits
from keystage.router.face_probe import HashEngine
from keystage.router.text import HfText
from keystage.router.transcriptions_model import speech_model

FRAMES, POSITIONS = 50, 40
LIMITS = Limits(looping=True, context_length=FRAMES + POSITIONS, vocab_size=500, max_body_bytes=300_000)
SPECIALS = ["endoftext", "startoftranscript", "en", "de", "transcribe", "startofprev", "notimestamps"]
BOUNDARY = "a-boundary"
PATH = "/v1/audio/transcriptions"


def _codec() -> HfText:
    tokenizer = byte_level_tokenizer(["the capital of france is paris and the river is the seine"] * 4, [])
    tokenizer.add_special_tokens([f"<|{name}|>" for name in SPECIALS])
    return HfText(tokenizer.to_str().encode())


CODEC = _codec()
ID = {name: CODEC.encode(f"<|{name}|>")[0] for name in SPECIALS}
PIPELINE = msgspec.structs.replace(
    emulated("heard", 2, execution="looping"),
    family="whisper",
    config={
        "max_source_positions": FRAMES,
        "max_target_positions": POSITIONS,
        "generation": {"is_multilingual": True},
    },
    tokenizer="tokenizer.json",
    vocab_size=500,
    eos=[ID["endoftext"]],
)


class Heard:
    """What the engine was asked, and what it says: `texts` in turn."""

    def __init__(self) -> None:
        self.asked: list[Generation] = []
        self.texts: list[str] = []
        self.language = ID["de"]

    def answer(self, request: Generation) -> Sequence[int]:
        self.asked.append(request)
        if request.max_tokens == 1:
            return [self.language]
        return [*CODEC.encode(self.texts.pop(0)), ID["notimestamps"] + 3, ID["endoftext"]]


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture
def port(heard: Heard) -> Iterator[int]:
    with served(HashEngine(LIMITS, answer=heard.answer), PIPELINE, CODEC) as found:
        yield found


def form(file: bytes | None, /, **fields: str) -> bytes:
    lines = []
    for name, value in fields.items():
        lines.append(f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}'.encode())
    if file is not None:
        head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n'
        lines.append(head.encode() + file)
    return b"\r\n".join(lines) + f"\r\n--{BOUNDARY}--\r\n".encode()


def post(port: int, body: bytes, path: str = PATH, **headers: str) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        sent = {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}", **headers}
        connection.request("POST", path, body, sent)
        answer = connection.getresponse()
        raw = answer.read()
        is_json = answer.getheader("content-type") == "application/json"
        return answer.status, json.loads(raw) if is_json else raw.decode()
    finally:
        connection.close()


def test_windows_one_after_another_and_the_language_heard_once(port: int, heard: Heard) -> None:
    samples = sound(1, 2.5)
    heard.texts = [" the capital", " of france ", " is paris"]
    status, said = post(port, form(wav(samples), response_format="verbose_json", model="heard"))
    assert status == 200
    assert {key: said[key] for key in ("task", "language", "text", "duration")} == {
        "task": "transcribe", "language": "german", "text": "the capital of france is paris", "duration": 2.5,
    }  # fmt: skip
    assert [(s["id"], s["seek"], s["start"], s["end"]) for s in said["segments"]] == [
        (0, 0, 0.0, 1.0), (1, 100, 1.0, 2.0), (2, 200, 2.0, 2.5),
    ]  # fmt: skip
    assert [segment["text"] for segment in said["segments"]] == [" the capital", " of france ", " is paris"]
    assert said["usage"] == {"type": "duration", "seconds": 3}
    asks, *windows = heard.asked
    assert (list(asks.prompt), asks.whole, asks.input) == (
        [0] * FRAMES + [ID["startoftranscript"]], FRAMES + 1, samples[:16_000].tobytes(),
    )  # fmt: skip
    steered = [ID[name] for name in ("startoftranscript", "de", "transcribe", "notimestamps")]
    for window, first in zip(windows, (0, 16_000, 32_000), strict=True):
        assert list(window.prompt) == [0] * FRAMES + steered
        assert (window.whole, window.max_tokens, window.temperature) == (FRAMES + 4, POSITIONS // 2, 0.0)
        assert window.input == samples[first : first + 16_000].tobytes()
        assert list(window.eos) == [ID["endoftext"]]


def test_prompt_language_temperature_and_text(port: int, heard: Heard) -> None:
    heard.texts = ["yes"]
    before = " ".join(["paris"] * 40) + " <|en|>"
    status, said = post(
        port, form(wav(sound(1)), language="en", prompt=before, temperature="0.5", response_format="text")
    )
    assert (status, said) == (200, "yes\n")
    (window,) = heard.asked
    steered = [ID[name] for name in ("startoftranscript", "en", "transcribe", "notimestamps")]
    front, kept = list(window.prompt[:FRAMES]), list(window.prompt[FRAMES + 1 : -4])
    assert front == [0] * FRAMES
    assert (window.prompt[FRAMES], list(window.prompt[-4:])) == (ID["startofprev"], steered)
    text = [token for token in CODEC.encode(f" {before}") if token < ID["endoftext"]]
    assert kept == text[-(POSITIONS // 2 - 1) :]
    assert window.temperature == 0.5
    assert window.max_tokens == POSITIONS - (1 + len(kept) + 4)


def test_a_language_that_is_none_is_taken_for_english(port: int, heard: Heard) -> None:
    heard.texts, heard.language = ["ok"], 5
    assert post(port, form(wav(sound(1)), response_format="verbose_json"))[1]["language"] == "english"


def test_the_plain_call_takes_the_file_alone(port: int, heard: Heard) -> None:
    heard.texts = ["ok"]
    status, said = post(port, wav(sound(1)), "/", **{"Content-Type": "audio/wav"})
    assert (status, said) == (200, {"text": "ok", "usage": {"type": "duration", "seconds": 1}})


@pytest.mark.parametrize(
    ("body", "status", "code", "param", "message"),
    [
        (form(None, model="heard"), 400, "missing_parameter", "file", "file is missing"),
        (form(b"ID3", model="heard"), 415, "unsupported_media_type", "file", "which is no WAV"),
        (form(wav(sound(1)), model="other"), 404, "model_not_found", "model", "'other' is not served"),
        (form(wav(sound(1)), response_format="srt"), 400, "unsupported_value", "response_format", "'srt'"),
        (form(wav(sound(1)), temperature="2"), 400, "invalid_value", "temperature", "from 0 to 1, not '2'"),
        (form(wav(sound(1)), temperature="nan"), 400, "invalid_value", "temperature", "not 'nan'"),
        (form(wav(sound(1)), language="xx"), 400, "invalid_value", "language", "'xx': not among"),
        (form(wav(sound(1)), language="fr"), 400, "invalid_value", "language", "'fr': not among"),
        (form(wav(sound(1)), stream="true"), 400, "unsupported_parameter", "stream", "is not supported"),
        (form(wav(sound(1)), voice="low"), 400, "unknown_parameter", "voice", "voice is no field"),
        (form(wav(sound(1)), file="text"), 400, "invalid_value", "file", "file is given twice"),
        (form(wav(sound(1)), prompt="x" * 70_000), 400, "invalid_value", "prompt", "at most 65536 are taken"),
        (b"\n" * 200_000, 400, "malformed_body", None, "does not begin with its boundary"),
        (b"", 400, "malformed_body", None, "does not begin with its boundary"),
        (form(wav(sound(1)))[:-40], 400, "malformed_body", None, "is no form"),
        (bytes(300_001), 413, "body_too_large", None, "300001 bytes"),
    ],
)  # fmt: skip
def test_refusals(port: int, body: bytes, status: int, code: str, param: str | None, message: str) -> None:
    found, said = post(port, body)
    assert (found, said["error"]["code"], said["error"]["param"]) == (status, code, param)
    assert message in said["error"]["message"]


def test_a_body_that_is_no_form_and_a_deadline(port: int, heard: Heard) -> None:
    status, said = post(port, b"{}", **{"Content-Type": "application/json"})
    assert (status, said["error"]["code"]) == (400, "malformed_body")
    assert "must be multipart/form-data, not application/json" in said["error"]["message"]
    status, said = post(port, b"x", **{"Content-Type": "multipart/form-data"})
    assert (status, said["error"]["code"]) == (400, "malformed_body")
    heard.texts = ["a", "b", "c"]
    status, said = post(port, form(wav(sound(1, 2.5))), **{"X-Keystage-Deadline-S": "0.000001"})
    assert (status, said["error"]["code"]) == (504, "deadline_exceeded")


def test_sound_that_is_too_long_is_refused(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transcriptions, "SECONDS_MOST", 1.5)
    status, said = post(port, form(wav(np.zeros(32_000, np.float32))))
    assert (status, said["error"]["param"]) == (400, "file")
    assert "lasts 2.0 s" in said["error"]["message"]


def test_a_pipeline_of_text_takes_no_sound() -> None:
    with served(HashEngine(LIMITS), emulated("tiny", 2, execution="looping")) as port:
        status, said = post(port, form(wav(sound(1))))
    assert (status, said["error"]["message"]) == (400, "pipeline 'tiny' takes no sound")


def test_a_model_that_knows_english_only() -> None:
    english = msgspec.structs.replace(PIPELINE, config={**PIPELINE.config, "generation": {}})
    model = speech_model(english, CODEC)
    assert model is not None
    assert not model.is_multilingual
    assert model.prompt("en", [])[FRAMES:] == [ID["startoftranscript"], ID["notimestamps"]]
    with served(HashEngine(LIMITS), english, CODEC) as port:
        status, said = post(port, form(wav(sound(1)), language="de"))
    assert (status, said["error"]["code"]) == (400, "unsupported_value")
    assert "knows English ('en') only" in said["error"]["message"]
