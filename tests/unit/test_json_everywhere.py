"""Every command that tells something can tell it as JSON."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from support.openfaas_standin import PASSWORD, StandIn
from typer.testing import CliRunner

from keystage.cli.main import app

SERVES = {"run", "up", "demo", "load-agent", "worker", "router", "gateway", "controller", "keysmanager"}
"""They run until they are ended, or are such a run's job: what they measure is in files."""
HAS_A_FORMAT = {"stack", "program run"}
"""What they print is read by programs already: a stack.yml, an answer's own bytes."""


def _commands(of: typer.Typer, before: str = "") -> Iterator[tuple[str, set[str]]]:
    for command in of.registered_commands:
        assert command.callback is not None
        name = command.name or command.callback.__name__
        flags = {
            flag
            for parameter in inspect.signature(command.callback, eval_str=True).parameters.values()
            for part in getattr(parameter.annotation, "__metadata__", ())
            for flag in (*(getattr(part, "param_decls", None) or ()), getattr(part, "default", None))
            if isinstance(flag, str)
        }
        yield f"{before}{name}", flags
    for group in of.registered_groups:
        assert group.typer_instance is not None
        yield from _commands(group.typer_instance, f"{group.name} ")


def test_all_have_it() -> None:
    commands = dict(_commands(app))
    assert {"status", "top", "explain", "doctor", "trace info", "async dead-letters"} <= set(commands)
    assert set(commands) >= SERVES | HAS_A_FORMAT
    assert {name for name, flags in commands.items() if "--json" not in flags} == SERVES | HAS_A_FORMAT


def _told(*arguments: str) -> Any:
    done = CliRunner().invoke(app, [*arguments, "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_bundles_programs_presets_and_logs_are_told_as_json(tmp_path: Path) -> None:
    made = _told("emulate", "em", "--stages", "3", "--out", str(tmp_path / "em"))
    assert made["bundle"] == str(tmp_path / "em")
    assert len(made["pipeline"]["stages"]) == 3
    assert (
        _told("split", "program:diffusion", "--out", str(tmp_path / "d"))["pipeline"]["name"] == "diffusion"
    )
    assert {"entry", "exit", "modules"} <= set(_told("program", "check", "diffusion")["graph"])
    assert "demo" in _told("simulate", "--list")
    (tmp_path / "decisions.jsonl").touch()
    told = _told("replay-decisions", str(tmp_path / "decisions.jsonl"))
    assert told == {"decisions": 0, "differences": []}


def test_a_stock_gateway_is_told_as_json(tmp_path: Path) -> None:
    gateway = StandIn("openfaas-ce")
    try:
        (tmp_path / "password").write_text(PASSWORD)
        password = str(tmp_path / "password")
        told = _told("check-gateway", "--gateway", gateway.url, "--password-file", password)
    finally:
        gateway.end()
    assert (told["limits"]["most"], told["findings"]) == (5, [])
    assert told["info"]["provider"]["provider"] == "faas-netes-ce"
