"""Tests by the name `folder/file.py::test`, as documents and tables name them: whether there is one."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
NAMED = re.compile(r"\b((?:unit|property|contract|integration|e2e|upgrade)/\w+\.py)::(\w+)")
"""Group 1 the file below tests/, group 2 the function."""


@functools.cache
def functions_of(file: str) -> frozenset[str]:
    """Names of the test functions of a file below tests/, empty where there is no such file."""
    path = TESTS / file
    if not path.is_file():
        return frozenset()
    tree = ast.parse(path.read_text())
    found = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return frozenset(node.name for node in found if node.name.startswith("test_"))


def missing(text: str) -> list[str]:
    """Tests that a text names and that do not exist."""
    return [f"{file}::{name}" for file, name in NAMED.findall(text) if name not in functions_of(file)]


def named(text: str) -> list[str]:
    """Tests that a text names, in order."""
    return [f"{file}::{name}" for file, name in NAMED.findall(text)]
