"""Both OpenAPI documents are the code's own: every route, every field, every refusal, and nothing else."""

from __future__ import annotations

import http
import json
from pathlib import Path
from typing import Any

import jsonschema_rs
import msgspec
import pytest
from prometheus_client.exposition import choose_encoder
from schemathesis.specs.openapi.definitions import OPENAPI_31_VALIDATOR
from support.item_engine import limits_for, pipeline_for

from keystage.bundle.api import Pipeline, emulated
from keystage.gateway import openapi as gateway_openapi
from keystage.gateway.auth import Credentials
from keystage.gateway.metrics import Metrics
from keystage.gateway.rest import Management, make_app
from keystage.gateway.routes import INVOCATION, MANAGEMENT, ROUTES
from keystage.router.engine import Limits
from keystage.router.face import Face
from keystage.router.face_probe import HashEngine
from keystage.router.fields import CHAT, COMPLETION, EMBEDDINGS, FILL_MASK, PLAIN
from keystage.router.openapi import document
from keystage.router.text import ByteText
from keystage.router.transcriptions import FIELDS as FORM
from keystage.router.transcriptions import PATH as TRANSCRIPTIONS

LIMITS = Limits(looping=True, context_length=64, vocab_size=256, max_body_bytes=1000)
PIPELINE = msgspec.structs.replace(
    emulated("tiny", 2, execution="looping", context_length=64), chat_template="{{ messages[0].content }}"
)
SPEECH = msgspec.structs.replace(emulated("heard", 2, execution="looping"), family="whisper")
ITEMS = {
    "embeddings": pipeline_for("bert", "embeddings", architectures=["BertModel"]),
    "masks": pipeline_for("bert", "masks", architectures=["BertForMaskedLM"]),
    "images": pipeline_for("wide_resnet", "images", layers=[1, 1, 1, 1], num_classes=7, image_size=32),
}
SINGLE = (Limits(looping=False, context_length=0, vocab_size=256, max_body_bytes=1000), "single-pass")
API = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
Operation = dict[str, Any]


def operations(doc: dict[str, Any]) -> dict[str, set[str]]:
    return {path: {method.upper() for method in item} for path, item in doc["paths"].items()}


def face(limits: Limits, pipeline: Pipeline) -> Face:
    return Face(HashEngine(limits), pipeline, ByteText(), lambda: b"{}", lambda: True, lambda: True)


def documents() -> dict[str, dict[str, Any]]:
    single = emulated("pass", 2, execution="single-pass")
    return {
        "gateway": gateway_openapi.document(),
        "router": document(PIPELINE, LIMITS),
        "router without template": document(emulated("tiny", 2, execution="looping"), LIMITS),
        "single-pass router": document(single, SINGLE[0]),
        "speech router": document(SPEECH, LIMITS),
        **{f"{name} router": document(served, limits_for(served)) for name, served in ITEMS.items()},
    }


@pytest.mark.parametrize("name", documents())
def test_document_is_openapi_3_1_and_its_schemas_are_schemas(name: str) -> None:
    doc = json.loads(json.dumps(documents()[name]))
    assert doc["openapi"] == "3.1.0"
    OPENAPI_31_VALIDATOR.validate(doc)
    for schema in doc["components"]["schemas"].values():
        jsonschema_rs.meta.validate({"$schema": "https://json-schema.org/draft/2020-12/schema", **schema})
    ids = [op["operationId"] for item in doc["paths"].values() for op in item.values()]
    assert len(ids) == len(set(ids))
    references = {text.split('"')[0] for text in json.dumps(doc).split("#/components/schemas/")[1:]}
    assert references == set(doc["components"]["schemas"]) - unreferenced(doc)


def unreferenced(doc: dict[str, Any]) -> set[str]:
    """Components that a document may hold without using them."""
    both, text = {"TokenId", "PromptText"}, {"PromptText"}
    titled = {"pass": both, "heard": text, "embeddings": text, "masks": text, "images": both}
    return titled.get(doc["info"]["title"].split()[-1], set()) & set(doc["components"]["schemas"])


@pytest.mark.parametrize(
    ("limits", "pipeline"),
    [(LIMITS, PIPELINE), (SINGLE[0], emulated("pass", 2, execution="single-pass")), (LIMITS, SPEECH)]
    + [(limits_for(served), served) for served in ITEMS.values()],
)
def test_router_serves_what_it_documents_and_documents_what_it_serves(
    limits: Limits, pipeline: Pipeline
) -> None:
    assert operations(document(pipeline, limits)) == face(limits, pipeline).served


class NoBackend:
    """Never asked: routes alone are looked at."""


def test_gateway_serves_what_it_documents_and_documents_what_it_serves() -> None:
    documented = operations(gateway_openapi.document())
    app = make_app(Management(NoBackend(), Metrics(), 1.0), Credentials("a", "b"))  # type: ignore[arg-type]
    served: dict[str, set[str]] = {}
    for route in app.routes:
        path, endpoint = route.path, route.app  # type: ignore[attr-defined]
        served[path] = set(endpoint.methods) - {"OPTIONS"}
    passed_on = {path: item for path, item in documented.items() if path not in served}
    assert {path: documented[path] for path in served} == served
    assert set(passed_on) == {route.path for route in ROUTES} - {route.path for route in MANAGEMENT}
    assert {route.method for route in INVOCATION} == documented["/function/{name}"]


def test_every_route_but_the_open_ones_documents_401_and_asks_for_credentials() -> None:
    doc = gateway_openapi.document()
    for route in ROUTES:
        operation = doc["paths"][route.path][route.method.lower()]
        assert ("401" in operation["responses"]) is not route.is_open
        assert operation.get("security", doc["security"]) == ([] if route.is_open else [{"basic": []}])
    is_open = {route.path for route in MANAGEMENT if route.is_open}
    assert is_open == {"/healthz", "/metrics", "/openapi.json"}


@pytest.mark.parametrize("name", ["gateway", "router"])
@pytest.mark.parametrize("accept", ["", "application/openmetrics-text;version=1.0.0", "text/html"])
def test_metrics_come_in_the_formats_that_the_document_names(name: str, accept: str) -> None:
    answer = documents()[name]["paths"]["/metrics"]["get"]["responses"]["200"]
    told = Metrics().render([], accept)[1] if name == "gateway" else choose_encoder(accept)[1]
    kinds = {kind.partition(";")[0] for kind in answer["content"]}
    assert kinds == {"text/plain", "application/openmetrics-text"}
    assert told.partition(";")[0] in kinds


@pytest.mark.parametrize(
    ("pipeline", "path", "table"),
    [
        (PIPELINE, "/", PLAIN),
        (PIPELINE, "/v1/completions", COMPLETION),
        (PIPELINE, "/v1/chat/completions", CHAT),
        (ITEMS["embeddings"], "/v1/embeddings", EMBEDDINGS),
        (ITEMS["embeddings"], "/", EMBEDDINGS),
        (ITEMS["masks"], "/", FILL_MASK),
    ],
)
def test_request_schema_has_every_field_of_its_table_and_no_other(
    pipeline: Pipeline, path: str, table: dict[str, Any]
) -> None:
    limits = LIMITS if pipeline is PIPELINE else limits_for(pipeline)
    content = document(pipeline, limits)["paths"][path]["post"]["requestBody"]["content"]
    schema = content["application/json"]["schema"]
    assert list(schema["properties"]) == list(table)
    assert schema["additionalProperties"] is False
    first = next(name for name in ("messages", "prompt", "input", "text") if name in table)
    assert schema["required"] == [first]


def test_the_form_of_a_transcription_is_told_as_it_is_read() -> None:
    content = document(SPEECH, LIMITS)["paths"][TRANSCRIPTIONS]["post"]["requestBody"]["content"]
    assert tuple(content["multipart/form-data"]["schema"]["properties"]) == FORM
    table = API.split(f"### `POST {TRANSCRIPTIONS}`")[1].split("\nOther fields")[0]
    told = [line.split("|")[1].strip(" `") for line in table.splitlines() if line.startswith("| `")]
    assert tuple(told) == FORM


def test_every_refusal_of_the_docs_stands_in_the_document_with_its_codes_and_vice_versa() -> None:
    rows = [line.split("|") for line in API.split("## Refusals")[1].splitlines() if line.startswith("| ")][1:]
    told = {(row[1].strip(), code.strip(" `")) for row in rows for code in row[2].split(",")}
    documented: set[tuple[str, str]] = set()
    # Only a pipeline that reads files refuses their kind.
    items = [item for served in (PIPELINE, SPEECH) for item in document(served, LIMITS)["paths"].values()]
    for item in items:
        for operation in item.values():
            for status, response in operation["responses"].items():
                schema = response.get("content", {}).get("application/json", {}).get("schema", {})
                error = schema.get("properties", {}).get("error", {}).get("properties")
                if error:
                    documented |= {(status, code) for code in error["code"]["enum"]}
    # A wrong method is of no operation.
    assert documented | {("405", "method_not_allowed")} == told


def test_statuses_are_http_s_and_described() -> None:
    for doc in documents().values():
        for item in doc["paths"].values():
            for operation in item.values():
                for status, response in operation["responses"].items():
                    assert status == "default" or http.HTTPStatus(int(status))
                    assert response["description"]
