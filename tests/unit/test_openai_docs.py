"""docs/api.md shows the tables that the code reads by, and every refusal code there is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from keystage.router import engine, openai_errors
from keystage.router.engine import Refusal
from keystage.router.fields import CHAT, COMPLETION, EMBEDDINGS, FILL_MASK, PLAIN, Field

DOCUMENT = (Path(__file__).parents[2] / "docs" / "api.md").read_text()


def section(title: str) -> str:
    return DOCUMENT.split(f"### {title}\n")[1].split("\n#")[0]


@pytest.mark.parametrize(
    ("title", "table"),
    [
        ("Plain call (`POST /`)", PLAIN),
        ("`POST /v1/completions`", COMPLETION),
        ("`POST /v1/chat/completions`", CHAT),
        ("`POST /v1/embeddings`", EMBEDDINGS),
        ("Fill-mask call (`POST /`)", FILL_MASK),
    ],
)
def test_tables_are_the_codes_own(title: str, table: Mapping[str, Field]) -> None:
    rows = [line for line in section(title).splitlines() if line.startswith("| `")]
    assert rows == [f"| `{name}` | {field.verdict} | {field.note} |" for name, field in table.items()]


def test_every_refusal_has_a_row() -> None:
    kinds = [
        kind
        for module in (engine, openai_errors)
        for kind in vars(module).values()
        if isinstance(kind, type) and issubclass(kind, Refusal) and kind is not Refusal
    ]
    assert len(kinds) > 8
    for kind in kinds:
        rows = [line for line in DOCUMENT.splitlines() if line.startswith(f"| {kind.status} |")]
        assert any(f"`{kind.code}`" in row for row in rows), kind
