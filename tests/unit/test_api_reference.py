"""docs/api-reference.md is what the OpenAPI documents say, all of it, in words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from support.api_reference import KINDS, PAGE, operations, page
from support.api_schemas import kind, rows, shapes

from keystage.gateway import openapi as gateway_openapi
from keystage.gateway.routes import ROUTES
from keystage.router.engine import Limits
from keystage.router.openapi import document
from keystage.router.tasks import Task, task_of

LIMITS = Limits(looping=True, context_length=64, vocab_size=256, max_body_bytes=1000)
WORDLESS = {"title", "description", "default", "contentMediaType", "contentEncoding", "x-itemSchema"}


def documents() -> list[dict[str, Any]]:
    return [gateway_openapi.document(), *(document(served, LIMITS) for served in KINDS.values())]


def test_the_page_is_current() -> None:
    assert PAGE.read_text() == page(), "run `make reference`"


def test_every_kind_of_pipeline_is_there() -> None:
    assert {task_of(served) for served in KINDS.values()} == {None, *Task}
    assert any(served.family == "whisper" for served in KINDS.values())


def test_every_route_and_status_of_the_gateway_is_on_the_page() -> None:
    text = page()
    for route in ROUTES:
        assert f"| `{route.path}` |" in text
        for answer in route.answers:
            assert f"| {answer.status} | {answer.what}" in text


def test_every_path_that_a_pipeline_serves_is_on_the_page() -> None:
    text = page()
    for served in KINDS.values():
        for path, method, operation in operations(document(served, LIMITS)):
            if not operation["summary"].startswith("Refused"):
                assert f"## {method} {path}\n" in text


def test_objects_are_told_once_each_since_links_go_by_name() -> None:
    gateway, *routers = documents()
    own = set(gateway["components"]["schemas"])
    others = {name for doc in routers for name in doc["components"]["schemas"]}
    assert {name.lower() for name in own} & {name.lower() for name in others} == set()
    headings = [line for line in page().splitlines() if line.startswith("### ")]
    assert len(headings) == len(set(headings))


def schemas(value: Any) -> Iterator[dict[str, Any]]:
    """Every schema in the properties, items and alternatives of a document."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if name == "properties":
                yield from inner.values()
            elif name == "items" and isinstance(inner, dict):
                yield inner
            elif name == "anyOf":
                yield from (one for one in inner if "required" not in one or "type" in one)
        for inner in value.values():
            yield from schemas(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from schemas(inner)


@pytest.mark.parametrize("number", range(len(KINDS) + 1))
def test_no_type_is_lost_on_the_way_to_words(number: int) -> None:
    told = ((one, kind(one)) for one in schemas(documents()[number]))
    assert [one for one, words in told if words.startswith("any") and set(one) - WORDLESS] == []


def test_members_of_members_and_of_lists_have_rows_of_their_own() -> None:
    inner = {"type": "object", "properties": {"b": {"type": "string", "maxLength": 3}}, "required": ["b"]}
    schema = {
        "type": "object",
        "properties": {"a": {"type": "array", "items": inner}, "c": {"anyOf": [{"type": "null"}, inner]}},
        "required": ["a"],
    }
    assert list(rows(schema)) == [
        ("`a`", "list", "required"),
        ("`a[].b`", "string (length 3 at most)", "required"),
        ("`c`", "null or object", ""),
        ("`c.b`", "string (length 3 at most)", "required"),
    ]


def test_an_event_is_told_by_what_its_data_holds() -> None:
    chunk = {"type": "object", "properties": {"text": {"type": "string"}}}
    error = {"type": "object", "properties": {"error": {"type": "object"}}}
    data = {"type": "string", "contentSchema": {"anyOf": [chunk, error]}}
    event = {"type": "object", "properties": {"data": {"anyOf": [{"const": "[DONE]"}, data]}}}
    assert shapes(event) == [chunk]
    assert kind({"const": "[DONE]"}) == '`"[DONE]"`'
