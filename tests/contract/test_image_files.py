"""The Dockerfiles hold what each component needs and no more, and their context is whole.

Images are built elsewhere; what a build cannot tell is checked here: that files that are copied exist and
pass `.dockerignore`, that every source folder goes in, that no torch comes with a component that must not
have it, and that the four files say the same where they should.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FILES = {
    "controller/Dockerfile": "control",
    "stage-function/Dockerfile": "stage",
    "stage-function/router.Dockerfile": "router",
    "loadgen/Dockerfile": "loadgen",
}
HEAVY = {"torch", "transformers", "safetensors"}
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())


def _instructions(file: str) -> list[tuple[str, str]]:
    text = re.sub(r"\\\n\s*", "", (ROOT / file).read_text())
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in lines]


def _packages(extras: str) -> set[str]:
    """Names of everything that extras ask for, extras of our own resolved."""
    found: set[str] = set()
    for extra in extras.split(","):
        for requirement in PROJECT["project"]["optional-dependencies"][extra]:
            inner = re.fullmatch(r"keystage\[(.*)\]", requirement)
            if inner is not None:
                found |= _packages(inner[1])
            else:
                found.add(re.split(r"[\[<>=;~! ]", requirement)[0])
    return found


def _extras(file: str) -> str:
    (extras,) = [rest for word, rest in _instructions(file) if word == "ARG" and rest.startswith("EXTRAS=")]
    return extras.removeprefix("EXTRAS=")


@pytest.mark.parametrize("file", FILES)
def test_what_is_copied_exists_and_is_not_ignored(file: str) -> None:
    let_in = {
        line.removeprefix("!")
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    sources = set()
    for word, rest in _instructions(file):
        if word == "COPY" and not rest.startswith("--from"):
            sources |= set(rest.split()[:-1])
    for source in sources:
        assert (ROOT / source).exists()
    assert sources == let_in
    assert {f"{folder}/keystage" for folder in sources} >= set(
        PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    )


@pytest.mark.parametrize("file", FILES)
def test_users_roots_and_labels(file: str) -> None:
    instructions = _instructions(file)
    last_from = max(i for i, (word, _) in enumerate(instructions) if word == "FROM")
    final = instructions[last_from:]
    assert ("USER", "12000:12000") in final
    assert final[-1][0] == "CMD"
    environment = " ".join(rest for word, rest in final if word == "ENV")
    assert "PYTHONDONTWRITEBYTECODE=1" in environment
    assert "HOME=/tmp" in environment
    labels = " ".join(rest for word, rest in final if word == "LABEL")
    for name in ("title", "description", "licenses", "version", "revision"):
        assert f"org.opencontainers.image.{name}=" in labels
    arguments = {rest.split("=")[0] for word, rest in instructions if word == "ARG"}
    assert arguments >= {"PYTHON_VERSION", "BASE", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "EXTRAS"}
    version = PROJECT["project"]["version"]
    assert ("ARG", f"VERSION={version}") in final
    assert any("-c constraints.txt" in rest for word, rest in instructions if word == "RUN")


@pytest.mark.parametrize("file", FILES)
def test_torch_is_in_the_stage_image_alone(file: str) -> None:
    is_stage = FILES[file] == "stage"
    assert bool(_packages(_extras(file)) & HEAVY) == is_stage
    assert any("torch" in rest for _, rest in _instructions(file)) == is_stage


def test_the_version_of_torch_is_the_one_that_is_tested() -> None:
    (version,) = re.findall(r"^TORCH_VERSION := (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert ("ARG", f"TORCH_VERSION={version}") in _instructions("stage-function/Dockerfile")


def test_the_four_files_build_in_the_same_way() -> None:
    """Same steps; what differs are extras, torch, models, labels and what the image runs."""

    def steps(file: str) -> list[tuple[str, str]]:
        kept = []
        for word, rest in _instructions(file):
            if word in ("COPY", "FROM") or (word == "RUN" and "torch" not in rest and "MODELS" not in rest):
                kept.append((word, rest.replace(" --system-site-packages", "")))
        return kept

    first, *others = FILES
    for other in others:
        assert steps(other) == steps(first)
