"""What docs/api.md says a router refuses is what it refuses: no code without a place that raises it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from keystage.router import engine
from keystage.router.engine import Failure, InvalidRequest, QueueFull, Refusal, TooLate

ROUTER = Path(engine.__file__).parent
API = Path(__file__).parents[2] / "docs" / "api.md"


def _kinds(of: type[Refusal]) -> set[type[Refusal]]:
    return {kind for below in of.__subclasses__() for kind in (below, *_kinds(below))}


@pytest.mark.parametrize("kind", sorted(_kinds(Refusal), key=lambda kind: kind.__name__))
def test_each_kind_of_refusal_is_made_somewhere(kind: type[Refusal]) -> None:
    made = re.compile(rf"\b{kind.__name__}\(|\braise {kind.__name__}\b")
    defined = f"class {kind.__name__}("
    sources = (file.read_text().replace(defined, "") for file in ROUTER.glob("*.py"))
    assert any(made.search(source) for source in sources)


@pytest.mark.parametrize("kind", [InvalidRequest, QueueFull, TooLate, Failure])
def test_each_code_is_documented_with_its_status(kind: type[Refusal]) -> None:
    assert re.search(rf"^\| {kind.status} \| `{kind.code}` \|", API.read_text(), re.MULTILINE)
