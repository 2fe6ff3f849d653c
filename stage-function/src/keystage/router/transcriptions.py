"""`POST /v1/audio/transcriptions`: sound in, text out, as OpenAI's API has it.

Before it: `router.face` has routed the request. It reads the form, converts the sound window by window
(30 s for Whisper; what is longer is cut there, even inside a word), generates each window's text as one
session of the looping pipeline, one after another, and joins the texts. The conversion runs in a thread.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import random
import time
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, cast

import msgspec

from keystage.router.api_keys import caller_of
from keystage.router.engine import NOBODY, Caller, Engine, Generation, InvalidRequest, TooLate
from keystage.router.face_http import (
    JSON,
    TEXT,
    Receive,
    Scope,
    Send,
    deadline_s,
    header,
    read_body,
    send_whole,
    watched,
)
from keystage.router.openai_errors import FieldRefused, UnknownModel
from keystage.router.text import TextCodec
from keystage.router.transcriptions_form import read_form
from keystage.router.transcriptions_languages import LANGUAGES
from keystage.router.transcriptions_model import RATE, SpeechModel
from keystage.router.transcriptions_wav import Sound, read_wav

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

PATH = "/v1/audio/transcriptions"
SECONDS_MOST = 3600.0
"""Longest sound of one request: 120 windows of 30 s, one after another."""
FORMATS = ("json", "text", "verbose_json")
FIELDS = ("file", "model", "language", "prompt", "response_format", "temperature")
_REFUSED = ("stream", "timestamp_granularities[]", "include[]", "chunking_strategy", "known_speaker_names[]")


@dataclasses.dataclass(frozen=True, slots=True)
class _Call:
    """One validated request; `language` is None when it is to be heard."""

    sound: Sound
    language: str | None
    before: list[int]
    form: str
    temperature: float
    caller: Caller = NOBODY


@dataclasses.dataclass(frozen=True, slots=True)
class _Segment:
    """What was said in one window."""

    start_s: float
    end_s: float
    text: str
    tokens: list[int]


class Transcriptions:
    """Serves the path for one pipeline.

    Args:
        engine: generates.
        model: what the pipeline is as a speech model, None: it is none, and every request is refused.
        text: its tokenizer.
        name: the pipeline's name.
    """

    def __init__(self, engine: Engine, model: SpeechModel | None, text: TextCodec, name: str) -> None:
        self._engine = engine
        self._model = model
        self._text = text
        self._name = name

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a form.

        Raises:
            Refusal: names the field, the bound and the actual value.
        """
        body = await read_body(scope, receive, self._engine.limits.max_body_bytes)
        if self._model is None:
            raise InvalidRequest(f"pipeline {self._name!r} takes no sound")
        content_type = (header(scope, b"content-type") or b"").decode("latin-1")
        await self._answer(self._model, *await read_form(content_type, body), scope, receive, send)

    async def call(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a plain function call, whose body is the file.

        Raises:
            Refusal: as for `serve`.
        """
        assert self._model is not None
        file = await read_body(scope, receive, self._engine.limits.max_body_bytes)
        await self._answer(self._model, {}, file, scope, receive, send)

    async def _answer(
        self,
        model: SpeechModel,
        fields: Mapping[str, str],
        file: bytes | bytearray | None,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        call = dataclasses.replace(self._read(model, fields, file), caller=caller_of(scope))
        with watched(receive):
            segments, language = await self._transcribe(model, call, deadline_s(scope))
        await send_whole(send, *_rendered(call, segments, language))

    def _read(self, model: SpeechModel, fields: Mapping[str, str], file: bytes | bytearray | None) -> _Call:
        for name in fields:
            if name in _REFUSED:
                raise FieldRefused("unsupported_parameter", f"{name} is not supported", param=name)
            if name not in FIELDS:
                raise FieldRefused("unknown_parameter", f"{name[:100]} is no field", param=name[:100])
        if "model" in fields and fields["model"] != self._name:
            raise UnknownModel(
                f"model {fields['model'][:200]!r} is not served here; this is {self._name!r}", param="model"
            )
        if file is None:
            raise FieldRefused("missing_parameter", "file is missing", param="file")
        form = fields.get("response_format", "json")
        if form not in FORMATS:
            message = f"response_format {form[:50]!r}: {', '.join(FORMATS)} are served"
            raise FieldRefused("unsupported_value", message, param="response_format")
        sound = read_wav(file)
        if sound.seconds > SECONDS_MOST:
            message = f"file lasts {sound.seconds:.1f} s, at most {SECONDS_MOST:.0f} s are taken"
            raise FieldRefused("invalid_value", message, param="file")
        said = fields.get("prompt", "").strip()
        ids = self._text.encode(f" {said}") if said else []
        language = fields.get("language")
        return _Call(
            sound=sound,
            language=model.check_language(language) if language else None,
            before=[token for token in ids if token < model.text_below],
            form=form,
            temperature=_temperature(fields.get("temperature", "0")),
        )

    async def _transcribe(
        self, model: SpeechModel, call: _Call, within_s: float | None
    ) -> tuple[list[_Segment], str]:
        end_s = None if within_s is None else time.monotonic() + within_s
        language = call.language or (None if model.is_multilingual else "en")
        samples = math.ceil(call.sound.blocks * RATE / call.sound.rate)
        segments: list[_Segment] = []
        for first in range(0, samples, model.window_samples):
            last = min(first + model.window_samples, samples)
            heard = (await asyncio.to_thread(call.sound.resampled, first, last, RATE)).tobytes()
            if language is None:
                asked = model.asks_language()
                wanted = 1, heard, 0.0, _left_s(end_s), call.caller
                (token,) = await self._generate(model, asked, *wanted) or [0]
                language = model.language_of(token) or "en"
            prompt = model.prompt(language, call.before)
            most = model.most_tokens(prompt)
            wanted = most, heard, call.temperature, _left_s(end_s), call.caller
            ids = await self._generate(model, prompt, *wanted)
            text = model.text(self._text, ids)
            segments.append(_Segment(first / RATE, last / RATE, text, ids))
        return segments, language or "en"

    async def _generate(
        self,
        model: SpeechModel,
        prompt: Sequence[int],
        most: int,
        heard: bytes,
        temperature: float,
        within_s: float | None,
        caller: Caller,
    ) -> list[int]:
        request = Generation(
            prompt=prompt,
            max_tokens=most,
            temperature=temperature,
            top_p=1.0,
            seed=random.getrandbits(64),
            eos=model.eos,
            deadline_s=within_s,
            input=heard,
            whole=len(prompt),
            tenant=caller.tenant,
            priority=caller.priority,
        )
        found: list[int] = []
        # The port promises `aclose`; its type says AsyncIterator so that engines may be classes.
        tokens = cast("AsyncGenerator[list[int], None]", self._engine.generate(request))
        async with aclosing(tokens):
            async for new in tokens:
                found.extend(new)
        return found


def _temperature(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        message = f"temperature must be a number from 0 to 1, not {text[:50]!r}"
        raise FieldRefused("invalid_value", message, param="temperature")
    return value


def _left_s(end_s: float | None) -> float | None:
    if end_s is None:
        return None
    left_s = end_s - time.monotonic()
    if left_s <= 0:
        raise TooLate("the deadline passed between two windows of the sound")
    return left_s


def _rendered(call: _Call, segments: Sequence[_Segment], language: str) -> tuple[bytes, bytes]:
    """Body and content type of the answer."""
    text = " ".join(said for said in (segment.text.strip() for segment in segments) if said)
    if call.form == "text":
        return f"{text}\n".encode(), TEXT
    answer: dict[str, object] = {"text": text}
    if call.form == "verbose_json":
        answer = {
            "task": "transcribe",
            "language": LANGUAGES[language],
            "duration": call.sound.seconds,
            "text": text,
        }
        answer["segments"] = [
            {
                "id": number,
                "seek": round(segment.start_s * 100),
                "start": segment.start_s,
                "end": segment.end_s,
                "text": segment.text,
                "tokens": segment.tokens,
                "temperature": call.temperature,
            }
            for number, segment in enumerate(segments)
        ]
    answer["usage"] = {"type": "duration", "seconds": math.ceil(call.sound.seconds)}
    return msgspec.json.encode(answer), JSON
