"""The guide pages in docs/ speak of what exists: links, settings, defaults, metrics, commands, and messages.

Contents of api.md, streams.md and environment.md have tests of their own; docs/api-reference.md is generated.
"""

from __future__ import annotations

import ast
import functools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import typer.main

from keystage.cli.main import app
from keystage.controller.policy.settings import PolicySettings
from keystage.wire.metrics import METRICS

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
GUIDES = ("README", "quickstart", "concepts", "operating", "tuning", "troubleshooting")
PAGES = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]
PLACE = "\0"
"""Stands for what a message is filled with."""
LEAST_CHARACTERS = 4


def guide(name: str) -> str:
    return (DOCS / f"{name}.md").read_text()


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


@functools.cache
def anchors(page: Path) -> frozenset[str]:
    """What GitHub makes of the headings of a page."""
    found: list[str] = []
    for title in re.findall(r"^#+ +(.*)$", without_code(page.read_text()), flags=re.MULTILINE):
        words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title).lower()
        anchor = re.sub(r"[^\w\- ]", "", words).strip().replace(" ", "-")
        count = sum(re.sub(r"-\d+$", "", one) == anchor for one in found)
        found.append(f"{anchor}-{count}" if anchor in found else anchor)
    return frozenset(found)


def links(page: Path) -> list[str]:
    text = re.sub(r"`[^`\n]*`", "", without_code(page.read_text()))
    return re.findall(r"\]\(([^)\s]+)\)", text)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for link in links(page):
        path, _, anchor = link.partition("#")
        if "://" in link:
            continue
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            broken.append(link)
    assert not broken


def test_the_index_names_every_page_and_the_readme_the_index() -> None:
    named = {link.partition("#")[0] for link in links(DOCS / "README.md")}
    assert {page.name for page in DOCS.glob("*.md")} - {"README.md"} - named == set()
    assert "docs/README.md" in links(ROOT / "README.md")


@pytest.mark.parametrize("name", GUIDES)
def test_a_page_says_for_whom_it_is(name: str) -> None:
    assert re.match(r"# [^\n]+\n\nFor (who|everybody)\b", guide(name))


# ---------------------------------------------------------------- settings


def cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip().removeprefix("|").removesuffix("|").split("|")]


def documented() -> dict[str, set[str]]:
    """Defaults by variable, as docs/environment.md has them: a variable may be read by several parts."""
    found: dict[str, set[str]] = {}
    for line in guide("environment").splitlines():
        if line.startswith("| `KEYSTAGE"):
            first, default = cells(line)[:2]
            names = re.findall(r"`(KEYSTAGE_[A-Z0-9_]+)`", first)
            values = default.split(", ") if len(names) > 1 else [default]
            for name, value in zip(names, values, strict=False):
                found.setdefault(name, set()).add(value)
    return found


@pytest.mark.parametrize("name", GUIDES)
def test_settings_are_in_the_list_of_settings(name: str) -> None:
    known = set(re.findall(r"KEYSTAGE_[A-Z0-9_]+", guide("environment")))
    assert set(re.findall(r"KEYSTAGE_[A-Z0-9_]*[A-Z0-9]", guide(name))) - known == set()


def test_defaults_of_settings_are_those_of_the_list() -> None:
    defaults = documented()
    lines = [line for line in guide("tuning").splitlines() if line.startswith("| `KEYSTAGE")]
    rows = [(name.strip("`"), told) for name, told, *_ in map(cells, lines)]
    assert len(rows) > 40
    assert [(name, told) for name, told in rows if told not in defaults[name]] == []


def test_defaults_of_policy_settings_are_the_codes_own() -> None:
    table = guide("tuning").split("| policy setting |")[1].split("\n\n")[0]
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \|", table, flags=re.MULTILINE)
    own = msgspec.structs.asdict(PolicySettings())
    assert len(rows) > 8
    for name, told in rows:
        value = own[name]
        assert told == (f"`{value}`" if isinstance(value, str) else f"{value:g}"), name


@pytest.mark.parametrize("name", GUIDES)
def test_metrics_exist(name: str) -> None:
    told = set(re.findall(r"`((?:keystage|gateway)_[a-z_]+)`", guide(name)))
    counters = {f"{metric}_total" for metric, spec in METRICS.items() if spec.kind == "counter"}
    others = {metric for metric, spec in METRICS.items() if spec.kind != "counter"}
    text = (ROOT / "controller/src/keystage/gateway/metrics.py").read_text()
    assert [n for n in told if n not in counters | others and n.removesuffix("_total") not in text] == []


def test_operating_names_every_alert_of_the_chart_and_no_other() -> None:
    rules = (ROOT / "charts/keystage/rules/keystage.yaml").read_text()
    alerts = set(re.findall(r"^ +- alert: (\w+)$", rules, flags=re.MULTILINE))
    assert len(alerts) > 10
    table = guide("operating").split("## Alarms")[1].split("\n## ")[0]
    assert set(re.findall(r"`(Keystage[A-Z]\w+)`", table)) == alerts


# ---------------------------------------------------------------- commands


def commands(text: str) -> Iterator[list[str]]:
    """Words of every `keystage` command in the console blocks of a page."""
    for block in re.findall(r"^```console\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            typed = re.match(r"\$ (?:[A-Z_]+=\S+ )*(?:\.venv/bin/)?keystage (.*)", line)
            if typed:
                words = shlex.split(typed[1], comments=True)
                ends = [words.index(end) for end in ("|", ">", "&&", "&") if end in words]
                yield words[: min(ends)] if ends else words


@pytest.mark.parametrize(
    "name", ["quickstart", "operating", "tuning", "troubleshooting", "terminal", "traces", "slow-request"]
)
def test_commands_and_their_options_exist(name: str) -> None:
    root = typer.main.get_command(app)
    for words in commands(guide(name)):
        command, rest = root, words
        while hasattr(command, "commands") and rest and not rest[0].startswith("-"):  # a group
            assert rest[0] in command.commands, words
            command, rest = command.commands[rest[0]], rest[1:]
        known = {option for param in command.params for option in (*param.opts, *param.secondary_opts)}
        given = {word.partition("=")[0] for word in rest if word.startswith("--")}
        assert given <= known | {"--help"}, words


def test_there_are_commands_to_look_at() -> None:
    assert sum(1 for name in GUIDES for _ in commands(guide(name))) > 10


# ---------------------------------------------------------------- messages


@functools.cache
def messages() -> str:
    """All texts of the product, with `PLACE` where they are filled, one a line; and the Makefile's."""
    found = [(ROOT / "Makefile").read_text()]
    for file in sorted(ROOT.glob("*/src/keystage/**/*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = (part.value if isinstance(part, ast.Constant) else PLACE for part in node.values)
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(re.sub(r"%[-+ #0]*\d*(?:\.\d+)?[sdrfgx]", PLACE, node.value))
    return "\n".join(found)


def test_messages_of_troubleshooting_are_the_products_own() -> None:
    blocks = re.findall(r"^```text\n(.*?)^```", guide("troubleshooting"), flags=re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    assert len(lines) > 60
    known = messages()
    strange = {
        line: piece.strip()
        for line in lines
        for piece in line.split("...")
        if len(piece.strip()) >= LEAST_CHARACTERS and piece.strip() not in known
    }
    assert strange == {}
