"""A running system is replaced by another build under load: no request fails, no answer is wrong."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from support.upgrade_world import (
    CLIENTS,
    NAME,
    STAGES,
    Clients,
    Tally,
    Up,
    code_of,
    install,
    pipeline,
    previous_commit,
    running,
    until,
)

pytestmark = pytest.mark.slow
FUNCTIONS = (NAME, *(f"{NAME}-stage-{k}" for k in range(STAGES)))
UPGRADE_S = 240.0


@pytest.fixture(scope="session")
def this_build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(tmp_path_factory.mktemp("this") / "build")


@pytest.fixture(scope="session")
def same_build(this_build: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """This one once more, elsewhere: what an upgrade becomes is told by its place."""
    link = tmp_path_factory.mktemp("same") / "build"
    link.symlink_to(this_build)
    return link


def upgrade(home: Path, path: Path) -> subprocess.CompletedProcess[str]:
    """The command, as the new installation has it."""
    return subprocess.run(
        [sys.executable, "-m", "keystage.cli.main", "upgrade", "--home", str(home)],
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(path)},
        cwd=home.parent,
        capture_output=True,
        text=True,
        timeout=UPGRADE_S,
    )


def ready(up: Up) -> bool:
    return all(up.ready(function) for function in FUNCTIONS)


def check(tally: Tally, least: int) -> None:
    assert not tally.wrong, tally.wrong[:5]
    assert not tally.failed, tally.failed[:5]
    assert tally.right == tally.sent >= least


def become(up: Up, build: Path) -> None:
    """Upgrades a running system by the command, under load: every answer is right, nobody asks twice."""

    async def run() -> Tally:
        clients = Clients(up.gateway)
        await clients.learn()
        async with clients.asking() as tally:
            done = await asyncio.to_thread(upgrade, up.home, build)
            assert done.returncode == 0, (done.stdout, done.stderr, up.log())
        return tally

    tally = asyncio.run(run())
    print(tally)
    check(tally, least=20)
    assert tally.retried == 0


def test_a_supervisor_becomes_another_build_and_renews_every_part(
    tmp_path: Path, this_build: Path, same_build: Path
) -> None:
    """No client asks anything twice."""
    with running(tmp_path / "home", this_build) as up:
        up.deploy(*pipeline(tmp_path))
        until(lambda: ready(up), "the pipeline is ready")
        parts, replicas = up.parts(), {r.replica: r.pid for r in up.view().replicas}
        become(up, same_build)
        assert up.process.poll() is None
        assert code_of(up.process.pid) == str(same_build)
        after = up.parts()
        assert after.keys() == parts.keys() == {"gateway", "controller", "keysmanager"}
        assert not set(after.values()) & set(parts.values())
        view = up.view()
        assert {r.function for r in view.replicas if r.state == "ready"} == set(FUNCTIONS)
        assert not {r.pid for r in view.replicas} & set(replicas.values())
        assert {code_of(pid) for pid in (*after.values(), *(r.pid for r in view.replicas))} == {
            str(same_build)
        }


@pytest.fixture(scope="session")
def previous_build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    commit = previous_commit()
    if not commit:
        pytest.skip("there is no earlier commit here to upgrade from (KEYSTAGE_UPGRADE_FROM names one)")
    return install(tmp_path_factory.mktemp("previous") / "build", commit)


def test_the_previous_build_becomes_this_one(tmp_path: Path, previous_build: Path, this_build: Path) -> None:
    """By the command where that build has it; else in place, part by part, the supervisor last."""
    if (previous_build / "keystage" / "local" / "upgrades.py").exists():
        by_command(tmp_path, previous_build, this_build)
    else:
        in_place(tmp_path, previous_build, this_build)


def by_command(tmp_path: Path, old: Path, new: Path) -> None:
    with running(tmp_path / "home", old) as up:
        up.deploy(*pipeline(tmp_path))
        until(lambda: ready(up), "the pipeline is ready")
        become(up, new)
        assert {code_of(r.pid) for r in up.view().replicas} == {str(new)}


def in_place(tmp_path: Path, old: Path, new: Path) -> None:
    """The installation's folder is replaced below a running system, as `git pull && make setup` does it.

    Clients ask again under their key where a connection breaks off: an idle one does when the old gateway
    ends, every one does while `up` is started anew.
    """
    installed = tmp_path / "installed"
    installed.symlink_to(old)
    router, *stages = pipeline(tmp_path)
    upgraded = [
        msgspec.structs.replace(one, envVars={**one.envVars, "UPGRADED": "1"}) for one in (*stages, router)
    ]
    stays = {"KEYSTAGE_LEAVE_S": "1", "KEYSTAGE_STOP_S": "60"}
    ups = [Up(tmp_path / "home", installed, **stays)]
    up = ups[0]
    try:
        up.deploy(router, *stages)
        until(lambda: ready(up), "the pipeline is ready")

        def replace_parts() -> None:
            link = tmp_path / "next"
            link.symlink_to(new)
            link.replace(installed)
            for part in ("keysmanager", "controller", "gateway"):
                before = up.parts()[part]
                os.kill(before, signal.SIGTERM)
                until(lambda p=part, b=before: up.parts().get(p, b) != b, f"{part} is started anew")
            for function in upgraded:
                up.deploy(function)
                until(
                    lambda name=function.service: (
                        up.ready(name, 2) and len([r for r in up.view().replicas if r.function == name]) == 1
                    ),
                    f"{function.service} is replaced",
                )

        def replace_up() -> None:
            port = int(up.gateway.rpartition(":")[2])
            up.stop()
            ups.append(Up(tmp_path / "home", installed, port))
            until(lambda: ready(ups[-1]), "the pipeline is ready again")

        async def run() -> tuple[Tally, int]:
            clients = Clients(up.gateway, patience_s=90.0)
            await clients.learn()
            async with clients.asking() as tally:
                await asyncio.to_thread(replace_parts)
                of_parts = tally.retried
                await asyncio.to_thread(replace_up)
            return tally, of_parts

        tally, of_parts = asyncio.run(run())
        print(tally, f"retried while parts were replaced: {of_parts}")
        check(tally, least=20)
        # A connection each at most, which the old gateway closed while its client wrote.
        assert of_parts <= CLIENTS
    finally:
        for one in ups:
            one.stop()
