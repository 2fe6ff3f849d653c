"""Every command with `--json` as it is typed: one JSON object on standard output, and nothing else there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.commands import JSON, commands
from support.load_reports import queued, saved, times
from support.openfaas_standin import PASSWORD as STOCK_PASSWORD
from support.openfaas_standin import StandIn
from support.report_gateway import PASSWORD, ReportGateway
from support.servers import RedisServer

KEYSTAGE = (sys.executable, "-m", "keystage.cli.main")
WAIT_S = 240.0
TRACE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,374,44
2023-11-16 18:17:04.0319600,396,109
"""
ELSEWHERE = {"profile": "test_models_profile.py"}
"""Commands whose run needs a model: their own tests read the object."""


def _run(*command: str) -> tuple[int, str]:
    done = subprocess.run(
        (*KEYSTAGE, *command, JSON),
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        env={name: value for name, value in os.environ.items() if not name.startswith("KEYSTAGE_")},
        check=False,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout


def _told(*command: str, code: int = 0) -> dict[str, Any]:
    """The object; anything before or after it on standard output would be no JSON."""
    found, out = _run(*command)
    assert found == code, out
    told = json.loads(out)
    assert isinstance(told, dict)
    return told


def _stock(folder: Path, *command: str) -> dict[str, Any]:
    gateway = StandIn("openfaas-ce")
    try:
        (folder / "password").write_text(STOCK_PASSWORD)
        return _told(*command, "--gateway", gateway.url, "--password-file", str(folder / "password"))
    finally:
        gateway.end()


def _reported(folder: Path, *command: str, code: int = 0) -> dict[str, Any]:
    gateway = ReportGateway()
    try:
        (folder / "password").write_text(PASSWORD)
        (folder / "password").chmod(0o600)
        to = ("--gateway", gateway.url, "--home", str(folder), "--password-file", str(folder / "password"))
        return _told(*command, *to, code=code)
    finally:
        gateway.end()


def _compare(folder: Path) -> None:
    runs = [
        saved(queued(seed, times(40, seed), service_s=0.01), folder / str(seed), seed=1) for seed in (1, 2)
    ]
    assert _told("compare", *map(str, runs), "--force")["lines"]


def _doctor(folder: Path) -> None:
    gateway = ReportGateway()
    (folder / "password").write_text(PASSWORD)
    to = ("--gateway", gateway.url, "--password-file", str(folder / "password"))
    try:
        code, out = _run("doctor", "--home", str(folder), *to)
    finally:
        gateway.end()
    told = json.loads(out)
    levels = [check["level"] for check in told["checks"]]
    assert code == max({"ok": 0, "warn": 1, "fail": 2}[level] for level in levels)
    assert told["counts"] == {level: levels.count(level) for level in ("ok", "warn", "fail")}


def _load(folder: Path) -> None:
    gateway = ReportGateway()
    try:
        to = ("load", f"{gateway.url}/function/p", "--target", "raw", "--rate", "20", "--duration", "1")
        code, out = _run(*to, "--out", str(folder), "--processes", "1")
    finally:
        gateway.end()
    assert code in (0, 1)
    assert json.loads(out)["requests"]


def _dead_letters(folder: Path) -> None:
    """JSON lines: as many as there are letters, here none."""
    with RedisServer(folder / "r", tcp=True) as server:
        assert _run("async", "dead-letters", "--redis", server.url) == (0, "")


def _replay(folder: Path) -> None:
    (folder / "decisions.jsonl").touch()
    told = _told("replay-decisions", str(folder / "decisions.jsonl"))
    assert told == {"decisions": 0, "differences": []}


def _trace(folder: Path) -> None:
    (folder / "trace.csv").write_text(TRACE)
    assert _told("trace", "info", str(folder / "trace.csv"))["kind"] == "azure-llm"


def _train(folder: Path) -> None:
    few = ("--quick", "--seeds", "16", "--epochs", "1", "--held-out", "2", "--workers", "1")
    code, out = _run("train-cv", *few, "--out", str(folder / "weights.json"))
    assert code in (0, 3)  # so few chains teach nothing
    assert json.loads(out)["file"] == str(folder / "weights.json")


def _bench(folder: Path) -> None:
    code, out = _run("bench", "scheduler", "--quick", "--out", str(folder))
    assert code in (0, 3)
    assert isinstance(json.loads(out), dict)


def _cache(folder: Path) -> None:
    told = _told("cache", str(folder / "absent.sock"), code=1)
    assert told["nodes"] == []
    assert "absent.sock" in told["failures"][0]


RUNS: dict[str, Callable[[Path], object]] = {
    "load": _load,
    "compare": _compare,
    "split": lambda folder: _told("split", "program:diffusion", "--out", str(folder / "b"))["pipeline"],
    "emulate": lambda folder: _told("emulate", "em", "--out", str(folder / "b"))["pipeline"],
    "simulate": lambda _: _told("simulate", "--list")["demo"],
    "train-cv": _train,
    "bench": _bench,
    "cache": _cache,
    "async dead-letters": _dead_letters,
    "program check": lambda _: _told("program", "check", "diffusion")["graph"]["modules"],
    "trace info": _trace,
    "check-gateway": lambda folder: _stock(folder, "check-gateway")["limits"],
    "doctor": _doctor,
    "status": lambda folder: _reported(folder, "status")["report"],
    "top": lambda folder: _reported(folder, "top")["pipelines"],
    "explain": lambda folder: _reported(folder, "explain", "llm/3")["decisions"],
    "replay-decisions": _replay,
}
SLOW = {"train-cv", "bench"}


def test_each_command_that_has_it_is_run_here() -> None:
    having = {name for name, flags in commands() if JSON in flags}
    assert having == set(RUNS) | set(ELSEWHERE)
    for file in ELSEWHERE.values():
        assert f'"{JSON}"' in (Path(__file__).parent / file).read_text()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in RUNS]
)
def test_one_object_and_nothing_else(name: str, tmp_path: Path) -> None:
    RUNS[name](tmp_path)
