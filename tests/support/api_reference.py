"""docs/api-reference.md: the OpenAPI documents of gateway and router as a page for people.

`make reference` writes it (`python -m support.api_reference`, run in `tests/`); a test holds it against the
documents, so that a route or a field that changes changes the page. What an OpenAPI document does not say is
in docs/api.md and docs/gateway.md.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
from support import api_schemas as schemas

from keystage.bundle.api import Pipeline, emulated
from keystage.gateway import openapi as gateway_openapi
from keystage.router.engine import Limits
from keystage.router.openapi import document as router_document

PAGE = Path(__file__).resolve().parents[2] / "docs" / "api-reference.md"
CONTEXT, VOCABULARY, WIDTH, BODY_BYTES = 2048, 49152, 576, 64 << 20
"""Of the pipeline whose bounds the page shows; every pipeline's own document has its own."""
NAME = "my-model"
Document = dict[str, Any]

INTRODUCTION = """# HTTP API reference

For who writes a client. Made from the OpenAPI documents by `make reference`; change the code, not this page.
The exact documents are served: the gateway's at `GET /openapi.json`, a pipeline's own at
`GET /function/NAME/openapi.json`. What they cannot say is in [api.md](api.md) (what each field does, how an
answer ends, refusals) and [gateway.md](gateway.md) (streaming, time-outs, asynchronous calls).

`HEAD` is served wherever `GET` is, and answers without a body. In tables `a.b` is member `b` of object `a`,
and `a[].b` that of each entry of the list `a`. A field without "required" may be left out.

# Gateway

Default address: `http://127.0.0.1:8080`. Where credentials are needed they are HTTP Basic: user and password
are in `.keystage/credentials/` (`keystage up`) or in the Secret `basic-auth` (Kubernetes).
"""

ROUTER = f"""# Pipelines

Through the gateway these paths lie below `/function/NAME`; a router answers them on its own port too.
Calls need no credentials. Bounds are of an example: a pipeline named `{NAME}`, a context of {CONTEXT:,}
tokens, a vocabulary of {VOCABULARY:,}, embeddings of {WIDTH} numbers. What a path takes depends on the kind
of pipeline; one that it does not serve is refused with 400 by name.
"""


def _pipeline(execution: Any, family: str, chat_template: str = "", **config: Any) -> Pipeline:
    return msgspec.structs.replace(
        emulated(NAME, 2, execution="looping" if execution == "looping" else "single-pass"),
        execution=execution,
        family=family,
        config=config,
        chat_template=chat_template,
        context_length=CONTEXT,
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
    )


KINDS: dict[str, Pipeline] = {
    "text generation": _pipeline("looping", "llama", chat_template="{{ messages[0].content }}"),
    "embeddings": _pipeline("single-pass", "bert", architectures=["BertModel"]),
    "fill-mask": _pipeline("single-pass", "bert", architectures=["BertForMaskedLM"]),
    "images": _pipeline("single-pass", "wide_resnet"),
    "speech": _pipeline("looping", "whisper"),
    "emulated": _pipeline("single-pass", "emulated"),
    "stream program": _pipeline("program", "program"),
}
"""One pipeline of each kind that a router tells apart."""


def page() -> str:
    """The whole page."""
    gateway = gateway_openapi.document()
    routers = {kind: router_document(served, _limits(served)) for kind, served in KINDS.items()}
    parts = [INTRODUCTION, *_gateway(gateway), *_components([gateway], "Objects of the gateway")]
    parts += [ROUTER, *_routers(routers), *_components(list(routers.values()), "Objects of pipelines")]
    return "\n".join(part.strip("\n") + "\n" for part in parts)


def write(path: Path = PAGE) -> None:
    """Writes it."""
    text = page()
    path.write_text(text, encoding="utf-8")
    sys.stdout.write(f"{len(text.splitlines())} lines in {path}\n")


def _limits(served: Pipeline) -> Limits:
    return Limits(
        looping=served.execution == "looping",
        context_length=CONTEXT,
        vocab_size=VOCABULARY,
        max_body_bytes=BODY_BYTES,
    )


# ---------------------------------------------------------------- operations


def operations(document: Document) -> Iterator[tuple[str, str, Document]]:
    """(path, method, operation) of every operation but those that answer HEAD."""
    for path, item in document["paths"].items():
        for method, operation in item.items():
            if method != "head":
                yield path, method.upper(), operation


def _gateway(document: Document) -> Iterator[str]:
    """A section an operation; methods of one path that differ in nothing but their name share one."""
    shared: dict[str, tuple[str, list[str], Document]] = {}
    for path, method, operation in operations(document):
        alike = {name: value for name, value in operation.items() if name != "operationId"}
        key = json.dumps([path, alike], sort_keys=True)
        shared.setdefault(key, (path, [], operation))[1].append(method)
    sections = list(shared.values())
    yield "\n".join(_index(sections))
    for path, methods, operation in sections:
        yield f"## {', '.join(methods)} {path}\n"
        yield "\n".join(_described(operation, is_open=operation.get("security") == []))


def _index(sections: Iterable[tuple[str, list[str], Document]]) -> Iterator[str]:
    yield "| path | methods | what it does | credentials |"
    yield "|---|---|---|---|"
    for path, methods, operation in sections:
        needed = "no" if operation.get("security") == [] else "yes"
        yield f"| `{path}` | {', '.join(methods)} | {operation['summary']} | {needed} |"
    yield ""


def _routers(documents: Mapping[str, Document]) -> Iterator[str]:
    """A section an operation, in it one part for the kinds of pipeline that answer it alike."""
    found: dict[str, dict[str, list[str]]] = {}
    for kind, document in documents.items():
        for path, method, operation in operations(document):
            if not operation["summary"].startswith("Refused"):
                text = "\n".join(_described(operation, is_open=None))
                found.setdefault(f"{method} {path}", {}).setdefault(text, []).append(kind)
    for title, alike in found.items():
        yield f"## {title}\n"
        for text, kinds in alike.items():
            if len(kinds) < len(documents):
                yield f"### {title} of pipelines for {', '.join(kinds)}\n"
            yield text


def _described(operation: Document, *, is_open: bool | None) -> Iterator[str]:
    needs = {True: " No credentials.", False: " Needs credentials.", None: ""}[is_open]
    yield f"{operation['summary']}.{needs}\n"
    if operation.get("parameters"):
        yield from _table(
            ("parameter", "in", "type", "what"),
            (
                (
                    f"`{one['name']}`",
                    one["in"],
                    schemas.kind(one["schema"]),
                    _needed(one.get("description", ""), one.get("required", False)),
                )
                for one in operation["parameters"]
            ),
        )
    for media, content in operation.get("requestBody", {}).get("content", {}).items():
        yield from _body(f"Body, {_media(media)}", content)
    answers = dict(sorted(operation["responses"].items()))  # `default` comes last
    yield from _table(
        ("status", "when", "body"),
        ((status, _when(answer), _bodies(answer)) for status, answer in answers.items()),
    )
    for status, answer in answers.items():
        for media, content in answer.get("content", {}).items():
            if status == "200" and schemas.is_inline(content.get("schema", {})):
                yield from _body(f"Answer, {_media(media)}", content)


def _needed(text: str, is_required: bool) -> str:
    return "; ".join(filter(None, ("required" if is_required else "", text)))


def _when(answer: Document) -> str:
    headers = ", ".join(f"`{name}`" for name in answer.get("headers", {}))
    return answer["description"] + (f"; with {headers}" if headers else "")


def _bodies(answer: Document) -> str:
    """What the answers' table says of a body: its type, its error codes, or where it is described."""
    words = []
    for media, content in answer.get("content", {}).items():
        schema = content.get("x-itemSchema") or content.get("schema", {})
        codes = schemas.codes(schema)
        if codes:
            words.append("error object, code " + ", ".join(f"`{code}`" for code in codes))
        elif schemas.is_inline(schema):
            words.append(f"{_media(media)}, below")
        else:
            each = "lines of " if "x-itemSchema" in content else ""
            shown = schemas.kind(schema)
            words.append(_media(media) if shown in ("any", "string") else f"{_media(media)}: {each}{shown}")
    return "; ".join(words) or "none stated"


def _body(title: str, content: Document) -> Iterator[str]:
    schema = content.get("schema", {})
    if not schemas.is_inline(schema):
        yield f"{title}: {schemas.kind(schema)}\n"
        return
    shapes = schemas.shapes(schema)
    for number, shape in enumerate(shapes):
        yield f"{title}{', or' if number else ''}:\n"
        yield from _table(("field", "type", "what"), schemas.rows(shape))


# ---------------------------------------------------------------- objects


def _components(documents: Iterable[Document], title: str) -> Iterator[str]:
    yield f"## {title}\n"
    seen: set[str] = set()
    for document in documents:
        for name, schema in document["components"]["schemas"].items():
            if name in seen:
                continue
            seen.add(name)
            yield f"### {name}\n"
            about = schema.get("description", "").strip().split("\n\n")[0].replace("\n", " ")
            if about:
                yield f"{about}\n"
            if schema.get("properties"):
                yield "\n".join(_table(("field", "type", "what"), schemas.rows(schema)))
            else:
                yield f"{schemas.kind(schema)}\n"


def _media(name: str) -> str:
    return "anything" if name == "*/*" else f"`{name}`"


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"
    yield ""


if __name__ == "__main__":
    write()
