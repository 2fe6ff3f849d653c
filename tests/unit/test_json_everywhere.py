"""Every command that tells something can tell it as JSON, and the documentation names the others."""

from __future__ import annotations

import re
from pathlib import Path

from support.commands import JSON, commands

SERVES = {"run", "up", "demo", "load-agent", "worker", "router", "gateway", "controller", "keysmanager"}
"""They run until they are ended, or are such a run's job: what they measure is in files."""
ACTS = {"upgrade"}
"""What it does it says as it goes; how it ended is its exit code."""
HAS_A_FORMAT = {"stack", "program run"}
"""What they print is read by programs already: a stack.yml, an answer's own bytes."""
TERMINAL = Path(__file__).parents[2] / "docs" / "terminal.md"


def test_all_have_it() -> None:
    found = dict(commands())
    assert {"status", "top", "explain", "doctor", "trace info", "async dead-letters"} <= set(found)
    assert {name for name, flags in found.items() if JSON not in flags} == SERVES | HAS_A_FORMAT | ACTS


def test_those_without_it_are_documented_with_the_reason() -> None:
    (section,) = re.findall(r"^## JSON\n(.*?)^## ", TERMINAL.read_text(), re.MULTILINE | re.DOTALL)
    rows = re.findall(r"^\| (`.+`) \| (.+) \|$", section, re.MULTILINE)
    documented = {name: why for names, why in rows for name in re.findall(r"`([^`]+)`", names)}
    assert set(documented) == SERVES | HAS_A_FORMAT | ACTS
    assert all(documented.values())
