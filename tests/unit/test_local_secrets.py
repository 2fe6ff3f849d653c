"""Secrets on disk, and what a replica gets of them."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from keystage.local.api import Deployment
from keystage.local.errors import BadSecret, SecretExists, UnknownSecret
from keystage.local.program import Program, program
from keystage.local.secret_store import SecretStore


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def secrets(tmp_path: Path) -> SecretStore:
    return SecretStore(tmp_path / "secrets", tmp_path / "run" / "secrets")


def test_files_are_ours_alone_and_replaced_as_a_whole(secrets: SecretStore, tmp_path: Path) -> None:
    assert secrets.put("key", b"one") is True
    before = (tmp_path / "secrets" / "key").stat().st_ino
    assert secrets.put("key", b"two") is False
    file = tmp_path / "secrets" / "key"
    assert (mode(tmp_path / "secrets"), mode(file), file.read_bytes()) == (0o700, 0o600, b"two")
    assert file.stat().st_ino != before
    assert [f.name for f in (tmp_path / "secrets").iterdir()] == ["key"]


def test_conditions_hold(secrets: SecretStore) -> None:
    with pytest.raises(UnknownSecret, match="secret key does not exist"):
        secrets.put("key", b"1", create=False)
    secrets.put("key", b"1", create=True)
    with pytest.raises(SecretExists, match="secret key exists"):
        secrets.put("key", b"2", create=True)


@pytest.mark.parametrize(
    "name", ["", ".", "..", "-a", "a-", "a..b", "A", "a/b", "a_b", "a\n", ".new-x", "a" * 254]
)
def test_names_are_those_of_kubernetes(secrets: SecretStore, name: str) -> None:
    for work in (lambda: secrets.put(name, b"1"), lambda: secrets.delete(name)):
        with pytest.raises(BadSecret, match="must have at most 253"):
            work()


def test_a_replica_gets_copies_of_just_its_own(secrets: SecretStore, tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        secrets.put(name, name.encode())
    assert secrets.lay_out("f-0", []) is None
    folder = secrets.lay_out("f-1", ["b", "a", "b"])
    assert folder == tmp_path / "run" / "secrets" / "f-1"
    assert {f.name: (f.read_bytes(), mode(f)) for f in folder.iterdir()} == {
        "a": (b"a", 0o400),
        "b": (b"b", 0o400),
    }
    assert mode(folder) == 0o700
    secrets.put("a", b"new")
    secrets.delete("b")
    assert (folder / "a").read_bytes() == b"a"
    assert (folder / "b").read_bytes() == b"b"
    with pytest.raises(BadSecret, match="function f: secret b does not exist"):
        secrets.lay_out("f-2", ["a", "b"])
    secrets.clear("f-1")
    secrets.clear("f-1")
    assert not folder.exists()


def test_halves_of_files_are_swept_and_never_listed(secrets: SecretStore, tmp_path: Path) -> None:
    secrets.sweep()
    secrets.put("a", b"1")
    (tmp_path / "secrets" / ".new-abc").write_bytes(b"half")
    assert secrets.names() == ["a"]
    secrets.sweep()
    assert [f.name for f in (tmp_path / "secrets").iterdir()] == ["a"]


def made(envs: dict[str, str], secrets: Path | None = None, role: str = "function") -> Program:
    more = {"KEYSTAGE_ROLE": role, "KEYSTAGE_PIPELINE": "p", "KEYSTAGE_BUNDLE": "file:///b"}
    deployment = Deployment(service="f", envProcess="serve", envVars={**more, **envs})
    return program(deployment, replica="f-0", run=Path("/r"), inherited={}, secrets=secrets, timeout_s=90.0)


def test_every_role_is_told_its_secrets_name_and_time_outs() -> None:
    for role in ("function", "router", "stage"):
        env = made({"write_timeout": "5s"}, Path("/r/secrets/f-0"), role).env
        assert env["secret_mount_path"] == "/r/secrets/f-0"
        assert (env["OPENFAAS_NAME"], env["OPENFAAS_NAMESPACE"]) == ("f", "openfaas-fn")
        assert (env["read_timeout"], env["write_timeout"], env["exec_timeout"]) == ("1m30s", "5s", "1m30s")
        assert env.get("KEYSTAGE_DEADLINE_S") == ("90" if role == "router" else None)
    assert "secret_mount_path" not in made({}).env
    assert made({"KEYSTAGE_DEADLINE_S": "7"}, role="router").env["KEYSTAGE_DEADLINE_S"] == "7"
