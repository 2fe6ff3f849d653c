"""The official `openai` client against the face: its types, its streams, its exception classes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import msgspec
import openai
import pytest
from support.face_server import byte_level_tokenizer, served

from keystage.bundle.api import Pipeline, emulated
from keystage.router.engine import Failure, Generation, Limits, QueueFull, Refusal
from keystage.router.face_probe import HashEngine
from keystage.router.text import HfText

CONTEXT = 512
SPECIAL = ["<|im_end|>", "<|im_start|>"]
CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content']"
    " + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
ANSWER = "Paris — Zürich, 東京 🙂: all of them are cities, and no one of them is a river."


TOKENIZER = byte_level_tokenizer(["all of them are cities and no one is a river"] * 5, SPECIAL)
PIPELINE: Pipeline = msgspec.structs.replace(
    emulated("tiny", 2, execution="looping"),
    eos=[TOKENIZER.token_to_id("<|im_end|>")],
    vocab_size=TOKENIZER.get_vocab_size(),
    context_length=CONTEXT,
    chat_template=CHATML,
)
LIMITS = Limits(True, CONTEXT, PIPELINE.vocab_size, 1 << 20)


def answer(request: Generation) -> Sequence[int]:
    return [*TOKENIZER.encode(ANSWER).ids, *request.eos]


@contextlib.contextmanager
def client_of(refuse: Callable[[int], Refusal | None] = lambda _position: None) -> Iterator[openai.OpenAI]:
    engine = HashEngine(LIMITS, answer=answer, refuse=refuse)
    text = HfText(TOKENIZER.to_str().encode())
    with served(engine, PIPELINE, text) as port:
        base = f"http://127.0.0.1:{port}/v1"
        with openai.OpenAI(base_url=base, api_key="none", max_retries=0, timeout=20) as client:
            yield client


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with client_of() as client:
        yield client


MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Which cities?"}]


def test_chat_stream(client: openai.OpenAI) -> None:
    with client.chat.completions.create(
        model="tiny", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    ) as stream:
        chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert len(chunks) >= 8
    assert len({chunk.id for chunk in chunks}) == 1
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == ANSWER
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    usage = chunks[-1].usage
    prompt = (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhich cities?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert usage.prompt_tokens == len(TOKENIZER.encode(prompt).ids)
    assert usage.completion_tokens == len(TOKENIZER.encode(ANSWER).ids) + 1
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_chat_whole(client: openai.OpenAI) -> None:
    made = client.chat.completions.create(model="tiny", messages=MESSAGES, max_completion_tokens=200)
    assert (made.object, made.model) == ("chat.completion", "tiny")
    assert made.choices[0].message.content == ANSWER
    assert made.choices[0].message.role == "assistant"
    assert made.choices[0].finish_reason == "stop"


def test_stop_string_across_tokens(client: openai.OpenAI) -> None:
    stop = "東京 🙂"
    whole = client.chat.completions.create(model="tiny", messages=MESSAGES, stop=stop)
    with client.chat.completions.create(model="tiny", messages=MESSAGES, stop=[stop], stream=True) as stream:
        parts = [chunk.choices[0].delta.content or "" for chunk in stream]
    assert whole.choices[0].message.content == "".join(parts) == ANSWER.split(stop)[0]
    assert whole.choices[0].finish_reason == "stop"


def test_completion(client: openai.OpenAI) -> None:
    made = client.completions.create(model="tiny", prompt="Which cities?", max_tokens=4)
    first = TOKENIZER.decode(TOKENIZER.encode(ANSWER).ids[:4])
    assert (made.object, made.choices[0].text, made.choices[0].finish_reason) == (
        "text_completion",
        first,
        "length",
    )
    with client.completions.create(model="tiny", prompt=[5, 6, 7], max_tokens=99, stream=True) as stream:
        chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks) == ANSWER
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_own_fields_go_as_extra_body(client: openai.OpenAI) -> None:
    made = client.chat.completions.create(
        model="tiny", messages=MESSAGES, extra_body={"return_token_ids": True, "ignore_eos": True}
    )
    assert made.choices[0].model_extra["token_ids"] == TOKENIZER.encode(ANSWER).ids


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "keystage"
    with pytest.raises(openai.NotFoundError, match="other"):
        client.models.retrieve("other")


def test_refused_fields_raise_bad_request(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="tiny", messages=MESSAGES, n=3)
    assert (caught.value.param, caught.value.code) == ("n", "unsupported_value")
    with pytest.raises(openai.BadRequestError, match="context length of 512") as caught:
        client.completions.create(model="tiny", prompt="a", max_tokens=600)
    assert (caught.value.param, caught.value.code) == ("max_tokens", "context_length_exceeded")
    with pytest.raises(openai.NotFoundError, match="gpt-4"):
        client.completions.create(model="gpt-4", prompt="a")


def test_refusals_of_the_core() -> None:
    refusal = QueueFull("queue holds 64 of 64", retry_after_s=1)
    with client_of(lambda _position: refusal) as client, pytest.raises(openai.RateLimitError) as caught:
        client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
    assert caught.value.response.headers["retry-after"] == "1"
    assert str(refusal) in caught.value.message


def test_failure_within_a_stream() -> None:
    failure = Failure("stage 1 failed: out of memory")
    seen: list[str] = []
    with client_of(lambda position: failure if position == 5 else None) as client:
        stream = client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
        with stream, pytest.raises(openai.APIError, match="out of memory"):
            seen.extend(chunk.choices[0].delta.content for chunk in stream)
    assert ANSWER.startswith("".join(seen))
    assert len(seen) > 3
