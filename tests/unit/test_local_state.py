"""State folder, functions.json, deployments and logs, on real files."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import msgspec
import pytest

from keystage.bundle.api import emulated
from keystage.controller.platforms import local_view
from keystage.local import api, logs, store
from keystage.local.api import Deployment, FunctionRecord, Override
from keystage.local.errors import BadDeployment, CorruptState, HomeLocked, LocalError
from keystage.local.home import Home, control_socket, read_credentials
from keystage.local.key_stages import resolve
from keystage.local.pipeline import deployments_for
from keystage.local.program import check, program, upkeep, with_port
from keystage.wire.threads import SPIN


def test_home_makes_credentials_once_and_keeps_them_private(tmp_path: Path) -> None:
    home = Home(tmp_path / "state", tmp_path)
    home.open()
    first = read_credentials(home.credentials)
    run = home.run
    assert run.parent == tmp_path
    assert control_socket(home.path) == run / "up.sock"
    assert {stat.S_IMODE(f.stat().st_mode) for f in home.credentials.iterdir()} == {0o600}
    home.close()
    assert not run.exists()
    assert first[0] == "admin"
    assert len(first[1]) >= 32
    home.open()
    assert read_credentials(home.credentials) == first
    home.close()
    with pytest.raises(LocalError, match="nothing runs on state folder"):
        control_socket(home.path)


def test_second_holder_is_refused_and_told_who_holds(tmp_path: Path) -> None:
    first, second = Home(tmp_path / "state", tmp_path), Home(tmp_path / "state", tmp_path)
    first.open()
    with pytest.raises(HomeLocked, match=f"in use by process {os.getpid()}"):
        second.open()
    assert first.run.exists()
    first.close()
    second.open()
    second.close()


def test_run_folder_of_a_killed_predecessor_is_removed_but_nothing_else(tmp_path: Path) -> None:
    stale, foreign = tmp_path / "ks-old", tmp_path / "precious"
    for folder in (stale, foreign):
        folder.mkdir()
        (folder / "up.sock").touch()
    home = Home(tmp_path / "state", tmp_path)
    for left, remains in ((stale, False), (foreign, True)):
        (tmp_path / "state").mkdir(exist_ok=True)
        (tmp_path / "state" / "run").write_text(str(left))
        home.open()
        home.close()
        assert left.exists() is remains


def test_functions_survive_a_round_trip(tmp_path: Path) -> None:
    file = tmp_path / "functions.json"
    assert store.load(file) == []
    records = [
        FunctionRecord(
            deployment=Deployment(service="a", envVars={"K": 'x"\n'}), created_at_s=1.5, desired=0
        ),
        FunctionRecord(deployment=Deployment(service="b"), created_at_s=2.0, override=Override(3, 9.0)),
    ]
    for durable in (True, False):
        store.save(file, records, durable=durable)
        assert store.load(file) == records
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize(
    ("damage", "line"),
    [
        (lambda text: text.replace('"created_at_s":2.0', '"created_at_s":"soon"'), 3),
        (lambda text: text[: len(text) - 30], 3),
        (lambda text: text.replace("[", "{", 1), 1),
        (lambda _: "", 1),
    ],
)
def test_corrupt_functions_are_refused_with_file_and_line(tmp_path: Path, damage: object, line: int) -> None:
    file = tmp_path / "functions.json"
    records = [FunctionRecord(deployment=Deployment(service=n), created_at_s=2.0) for n in ("a", "b")]
    records[0] = msgspec.structs.replace(records[0], created_at_s=1.0)
    store.save(file, records, durable=True)
    file.write_text(damage(file.read_text()))  # type: ignore[operator]
    with pytest.raises(CorruptState, match=rf"functions\.json, line {line}: "):
        store.load(file)


PIPELINE = {"KEYSTAGE_PIPELINE": "p", "KEYSTAGE_BUNDLE": "file:///b"}


@pytest.mark.parametrize(
    ("deployment", "said"),
    [
        (Deployment(service="Upper"), "'Upper'"),
        (Deployment(service="../etc"), "must have at most 63"),
        (Deployment(service="a" * 64), "must have at most 63"),
        (Deployment(service="f"), "envProcess is empty"),
        (Deployment(service="f", envProcess="say 'hi"), "cannot be parsed"),
        (Deployment(service="f", envProcess="serve a\0b"), "envProcess holds a NUL"),
        (
            Deployment(service="f", envProcess="a\0b", envVars={"KEYSTAGE_ROLE": "router", **PIPELINE}),
            "envProcess holds a NUL",
        ),
        (
            Deployment(service="f", envProcess="x", annotations={"com.openfaas.ready.http.path": "ready"}),
            r"com\.openfaas\.ready\.http\.path must be a path .* not 'ready'",
        ),
        (Deployment(service="f", envVars={"KEYSTAGE_ROLE": "king"}), "not 'king'"),
        (Deployment(service="f", envVars={"KEYSTAGE_ROLE": "stage"}), "needs KEYSTAGE_PIPELINE"),
        (Deployment(service="f", envProcess="x", labels={"keystage.role": "king"}), "not 'king'"),
        (
            Deployment(service="f", envProcess="x", labels={"keystage.role": "stage"}),
            "needs KEYSTAGE_PIPELINE",
        ),
        (
            Deployment(
                service="f", labels={"keystage.role": "stage", "keystage.stage": "0"}, envVars=PIPELINE
            ),
            "has role stage and needs KEYSTAGE_STAGES",
        ),
        (Deployment(service="f", envProcess="x", envVars={"A=B": "1"}), "'A=B'"),
        (Deployment(service="f", envProcess="x", envVars={"KEYSTAGE_DRAIN_S": "nan"}), "KEYSTAGE_DRAIN_S"),
        (
            Deployment(service="f", envProcess="x", envVars={"KEYSTAGE_SHARING": "mine"}),
            "shared, private, not 'mine'",
        ),
        (Deployment(service="f", envProcess="x", labels={"com.openfaas.scale.min": "many"}), "'many'"),
        (Deployment(service="f", envProcess="x", labels={"com.openfaas.scale.min": "-1"}), "not '-1'"),
        (Deployment(service="f", envProcess="x", labels={"com.openfaas.scale.type": "cpu"}), "not 'cpu'"),
    ],
)
def test_impossible_deployments_are_refused_by_name(deployment: Deployment, said: str) -> None:
    with pytest.raises(BadDeployment, match=said):
        check(deployment)


@pytest.mark.parametrize("kind", ["router", "stage"])
def test_a_role_by_label_alone_is_that_role_everywhere(kind: str) -> None:
    by_label = Deployment(
        service="f", labels={"keystage.role": kind}, envVars={**PIPELINE, "KEYSTAGE_STAGES": "1"}
    )
    check(by_label)
    made = program(by_label, replica="f-0", run=Path("/run/ks-1"), inherited={})
    assert made.module == {"router": "keystage.router.app", "stage": "keystage.worker.app"}[kind]
    assert upkeep(by_label).exclusive == (kind == "router")
    record = FunctionRecord(deployment=by_label, created_at_s=0.0)
    assert local_view.role_of(record) == api.role_of(by_label) == kind
    named = resolve({"p": [1]}, [by_label])
    assert [(s.bundle, s.stage) for s in named] == ([("file:///b", 1)] if kind == "stage" else [])


def test_the_environment_says_the_role_before_the_label() -> None:
    both = Deployment(
        service="f", envProcess="x", labels={"keystage.role": "stage"}, envVars={"KEYSTAGE_ROLE": "function"}
    )
    check(both)
    assert api.role_of(both) == "function"
    assert api.role_of(msgspec.structs.replace(both, envVars={"KEYSTAGE_ROLE": ""})) == "stage"


def test_a_pipeline_becomes_a_router_and_one_function_per_stage(tmp_path: Path) -> None:
    pipeline = emulated("demo", 2, execution="looping")
    router, *stages = deployments_for(
        tmp_path, pipeline, device=["emulated:beta=0.1", "emulated:beta=0.2"], slots=4, slo={"ttft_s": 1.0}
    )
    for deployment in (router, *stages):
        check(deployment)
    assert [d.service for d in (router, *stages)] == ["demo", "demo-stage-0", "demo-stage-1"]
    assert stages[1].envVars["KEYSTAGE_DEVICE"] == "emulated:beta=0.2"
    assert stages[1].envVars["KEYSTAGE_STAGES"] == stages[1].labels["keystage.stage"] == "1"
    assert router.envVars["KEYSTAGE_SLO"] == '{"ttft_s": 1.0}'
    command = program(stages[0], replica="demo-stage-0-0", run=Path("/run/ks-1"), inherited={"PATH": "/bin"})
    assert command.argv[1:] == ("-m", "keystage.worker.app")
    assert command.env["KEYSTAGE_ROUTER"] == "ipc:///run/ks-1/demo.router"
    assert (command.env["OMP_NUM_THREADS"], command.env["PATH"]) == ("1", "/bin")
    assert command.env.items() >= SPIN.items()
    chosen = program(
        stages[0], replica="demo-stage-0-0", run=Path("/run/ks-1"), inherited=dict.fromkeys(SPIN, "7")
    )
    assert chosen.env.items() >= dict.fromkeys(SPIN, "7").items()
    with pytest.raises(BadDeployment, match="device needs 2 entries"):
        deployments_for(tmp_path, pipeline, device=["cpu"])


def test_port_is_put_into_a_command_and_nothing_else() -> None:
    for given, made in {
        "serve": "serve",
        "$PORT": "8",
        "--at=${PORT}": "--at=8",
        "$HOME": "$HOME",
        "100%$": "100%$",
        "echo $$; a$$b": "echo $$; a$$b",
        "$PORTS ${PORTS} $port": "$PORTS ${PORTS} $port",
        "h:$PORT/$PORT": "h:8/8",
    }.items():
        assert with_port((given,), 8) == (made,)


def test_log_keeps_lines_with_times_within_its_bound(tmp_path: Path) -> None:
    log = logs.ReplicaLog(tmp_path / "f-0.log", max_bytes=1000)
    log.feed(b"hel", 1.0)
    log.feed(b"lo\n\xff|x\n", 2.0)
    for number in range(100):
        log.feed(b"line %d\n" % number, 3.0 + number)
    log.feed(b"no newline", 200.0)
    log.close(201.0)
    assert log.last == "no newline"
    assert sum(f.stat().st_size for f in tmp_path.iterdir()) <= 2000
    rows = logs.query(tmp_path, "f", tail=2, since_s=0.0)
    assert rows == [(102.0, "f-0", "line 99"), (201.0, "f-0", "no newline")]
    assert logs.query(tmp_path, "f", tail=None, since_s=102.0) == rows[1:]


def test_logs_of_functions_with_similar_names_stay_apart_and_old_ones_go(tmp_path: Path) -> None:
    for name in [f"f-{n}" for n in range(20)] + ["f-1-0"]:
        log = logs.ReplicaLog(tmp_path / f"{name}.log")
        log.feed(f"from {name}\n".encode(), 1.0)
        log.close(1.0)
    assert logs.query(tmp_path, "f-1", tail=None, since_s=0.0) == [(1.0, "f-1-0", "from f-1-0")]
    logs.prune(tmp_path, "f")
    assert len(logs.query(tmp_path, "f", tail=None, since_s=0.0)) == 16
    assert (tmp_path / "f-1-0.log").exists()
