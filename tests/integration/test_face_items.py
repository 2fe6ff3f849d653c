"""The faces of single-pass pipelines over HTTP: embeddings, masks, images; bounds and refusals."""

from __future__ import annotations

import base64
import http.client
import io
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from support.face_server import served
from support.item_engine import CONTEXT, VOCABULARY, WIDTH, ItemEngine, limits_for, pipeline_for, vector_of

from keystage.bundle.api import Pipeline
from keystage.router.engine import Failure, QueueFull
from keystage.router.items import AT_ONCE

BERT = pipeline_for("bert", architectures=["BertModel"])
FILLER = pipeline_for("bert", architectures=["BertForMaskedLM"])
NETWORK = pipeline_for("wide_resnet", layers=[1, 1, 1, 1], num_classes=7, image_size=32)


def post(port: int, path: str, body: Any, **headers: str) -> tuple[int, Any]:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        connection.request("POST", path, raw, headers)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


@contextmanager
def face(pipeline: Pipeline = BERT, **options: Any) -> Iterator[tuple[int, ItemEngine]]:
    engine = ItemEngine(limits_for(pipeline), **options)
    with served(engine, pipeline) as port:
        yield port, engine


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with face() as (number, _):
        yield number


@pytest.mark.parametrize(
    ("given", "ids"),
    [
        ("ab", [[97, 98]]),
        ([5, 6.0, 7], [[5, 6, 7]]),
        (["a", "bc"], [[97], [98, 99]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ],
)
@pytest.mark.parametrize("path", ["/", "/v1/embeddings"])
def test_every_form_of_input(port: int, path: str, given: Any, ids: list[list[int]]) -> None:
    tokens = sum(map(len, ids))
    status, answer = post(port, path, {"input": given, "model": "items", "dimensions": WIDTH, "user": "u"})
    assert status == 200
    assert answer == {
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": vector_of(item)}
            for index, item in enumerate(ids)
        ],
        "model": "items",
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }
    status, answer = post(port, path, {"input": given, "encoding_format": "base64"})
    for entry, item in zip(answer["data"], ids, strict=True):
        found = np.frombuffer(base64.b64decode(entry["embedding"]), "<f4")
        assert found.tolist() == vector_of(item)


@pytest.mark.parametrize(
    ("body", "status", "code", "param"),
    [
        ({}, 400, "missing_parameter", "input"),
        ({"input": None}, 400, "missing_parameter", "input"),
        ({"input": ""}, 400, "invalid_value", "input"),
        ({"input": []}, 400, "invalid_type", "input"),
        ({"input": ["a", ""]}, 400, "invalid_value", "input"),
        ({"input": [[1], []]}, 400, "invalid_value", "input"),
        ({"input": ["a", 1]}, 400, "invalid_type", "input"),
        ({"input": [1, True]}, 400, "invalid_type", "input"),
        ({"input": {"a": 1}}, 400, "invalid_type", "input"),
        ({"input": ["a"] * 2049}, 400, "invalid_value", "input"),
        ({"input": [VOCABULARY]}, 400, "invalid_value", "input"),
        ({"input": [[1], [-1]]}, 400, "invalid_value", "input"),
        ({"input": "x" * (CONTEXT + 1)}, 400, "context_length_exceeded", "input"),
        ({"input": "a", "dimensions": WIDTH + 1}, 400, "unsupported_value", "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, 400, "unsupported_value", "encoding_format"),
        ({"input": "a", "model": "other"}, 404, "model_not_found", "model"),
        ({"input": "a", "truncate": "END"}, 400, "unknown_parameter", "truncate"),
        ([], 400, "malformed_body", None),
        (b"\xff", 400, "malformed_body", None),
        (b"x" * 100_001, 413, "body_too_large", None),
    ],
)
def test_what_cannot_be_embedded_is_refused_by_name(
    port: int, body: Any, status: int, code: str, param: str | None
) -> None:
    got, answer = post(port, "/v1/embeddings", body)
    assert (got, answer["error"]["code"], answer["error"]["param"]) == (status, code, param)


def test_a_long_list_is_answered_in_order_and_takes_no_more_than_its_places() -> None:
    with face() as (port, engine):
        items = [[index % VOCABULARY, 1 + index % 7] for index in range(2048)]
        status, answer = post(port, "/v1/embeddings", {"input": items})
        assert status == 200
        assert [entry["embedding"] for entry in answer["data"]] == [vector_of(item) for item in items]
        assert engine.begun == 2048
        assert 1 < engine.most_open <= AT_ONCE


@pytest.mark.parametrize(
    ("refusal", "status"), [(Failure("stage 1 failed"), 500), (QueueFull("full", retry_after_s=3.0), 429)]
)
def test_one_input_that_fails_ends_the_request_and_the_others(refusal: Any, status: int) -> None:
    bad = np.array([13], "<i8").tobytes()
    with face(refuse=lambda payload: refusal if payload == bad else None) as (port, engine):
        engine.hold = True
        got, answer = post(port, "/v1/embeddings", {"input": [[1], [2], [13], [4]]})
        assert (got, answer["error"]["message"]) == (status, str(refusal))
        until_idle(engine)


def until_idle(engine: ItemEngine) -> None:
    end_s = time.monotonic() + 10
    while engine.open and time.monotonic() < end_s:
        time.sleep(0.005)
    assert engine.open == 0


def test_a_client_that_leaves_cancels_its_items() -> None:
    with face() as (port, engine):
        engine.hold = True
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        connection.request("POST", "/v1/embeddings", json.dumps({"input": [[1], [2], [3]]}))
        end_s = time.monotonic() + 10
        while engine.open < 3 and time.monotonic() < end_s:
            time.sleep(0.005)
        assert engine.open == 3
        connection.close()
        until_idle(engine)


@pytest.mark.parametrize("pipeline", [FILLER, NETWORK, pipeline_for("emulated")])
def test_other_pipelines_make_no_embeddings(pipeline: Pipeline) -> None:
    with face(pipeline) as (port, _):
        status, answer = post(port, "/v1/embeddings", {"input": "a"})
        assert (status, answer["error"]["message"]) == (400, "pipeline 'items' makes no embeddings")
        status, answer = post(port, "/v1/completions", {"prompt": "a"})
        assert status == 400
        assert "is single-pass and generates no text" in answer["error"]["message"]


def test_masks_without_a_tokenizer_are_refused() -> None:
    with face(FILLER) as (port, _):
        for body, message in (
            ({"text": "a"}, "pipeline 'items' has no tokenizer with a mask"),
            ({}, "text is missing"),
            ({"text": ""}, "text must be a string that is not empty"),
            ({"text": "a", "top_k": 101}, r"top_k must be within [1, 100], not 101"),
        ):
            status, answer = post(port, "/", body)
            assert status == 400
            assert message in answer["error"]["message"]


def scores(payload: bytes, dtype: str, shape: tuple[int, ...]) -> bytes:
    """Logits of seven classes: the sum of the image decides."""
    assert (dtype, shape) == ("uint8", (3, 32, 32))
    logits = np.zeros(7, "<f4")
    logits[np.frombuffer(payload, "u1").sum(dtype=int) % 7] = np.log(6)
    return logits.tobytes()


@pytest.mark.parametrize(
    ("query", "status", "count"),
    [("", 200, 5), ("?top_k=7", 200, 7), ("?top_k=1", 200, 1), ("?top_k=8", 400, 0), ("?top_k=x", 400, 0),
     ("?top_k=1&top_k=2", 400, 0)],
)  # fmt: skip
def test_classes_come_in_order_with_their_probabilities(query: str, status: int, count: int) -> None:
    body = io.BytesIO()
    np.save(body, np.full((3, 32, 32), 2, np.uint8))
    with face(NETWORK, answer=scores) as (port, _):
        got, answer = post(port, f"/{query}", body.getvalue())
        assert got == status
        if status == 200:
            assert len(answer["classes"]) == count
            likeliest = answer["classes"][0]
            assert likeliest["class"] == 2 * 3 * 32 * 32 % 7
            assert abs(likeliest["score"] - 0.5) < 1e-6
        else:
            assert answer["error"]["param"] == "top_k"


def test_an_answer_of_another_size_than_promised_is_a_failure_not_an_answer() -> None:
    for pipeline in (BERT, NETWORK):
        with face(pipeline, answer=lambda *_: b"1234") as (port, _):
            body: Any = {"input": "a"}
            if pipeline is NETWORK:
                stream = io.BytesIO()
                np.save(stream, np.zeros((3, 32, 32), np.uint8))
                body = stream.getvalue()
            status, answer = post(port, "/", body)
            assert (status, answer["error"]["code"]) == (500, "stage_failed")


def test_with_a_key_items_run_once_and_failures_of_the_pipeline_stay() -> None:
    with face() as (port, engine):
        body = {"input": ["a", "bc"]}
        key = {"Idempotency-Key": "k"}
        first = post(port, "/v1/embeddings", body, **key)
        assert first[0] == 200
        assert post(port, "/v1/embeddings", body, **key) == first
        assert engine.begun == 2  # inputs
        status, answer = post(port, "/", body, **key)
        assert (status, answer["error"]["code"]) == (422, "idempotency_key_reused")
        assert post(port, "/v1/embeddings", {"input": 5}, **{"Idempotency-Key": "m"})[0] == 400
        assert post(port, "/v1/embeddings", body, **{"Idempotency-Key": "m"}) == first
