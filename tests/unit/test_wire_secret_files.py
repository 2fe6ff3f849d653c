"""Which files are taken for a secret: the owner's own, or root's through the group that it was given to."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from keystage.keysmanager.config import KeysManagerConfig, derived_token, read_token
from keystage.wire.secret import create_secret, is_open_to_others, read_secret


@pytest.mark.parametrize(
    ("mode", "owner", "reader", "is_open"),
    [
        (0o600, 1000, 1000, False),
        (0o400, 1000, 1000, False),
        (0o440, 0, 12000, False),  # a mounted secret
        (0o640, 0, 12000, False),
        (0o440, 0, 0, True),  # root's own file, and others of root's group could read it
        (0o440, 1000, 12000, True),
        (0o440, 12000, 12000, True),
        (0o460, 0, 12000, True),
        (0o444, 0, 12000, True),
        (0o404, 0, 12000, True),
    ],
)
def test_only_root_may_lend_a_secret_to_a_group(mode: int, owner: int, reader: int, is_open: bool) -> None:
    assert is_open_to_others(0o100000 | mode, owner, reader) is is_open


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
@pytest.mark.parametrize(("mode", "is_taken"), [(0o440, True), (0o444, False), (0o400, False)])
def test_a_mounted_secret_is_read_by_who_is_not_root(mode: int, is_taken: bool) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        folder = Path(name)
        folder.chmod(0o755)
        key = folder / "key"
        create_secret(key)
        expected = derived_token(key)
        os.chown(key, 0, 12000)
        key.chmod(mode)
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.setgroups([])
            os.setresgid(12000, 12000, 12000)
            os.setresuid(12000, 12000, 12000)
            try:
                read_token(key)
                os.write(writer, derived_token(key).encode())
            except ValueError as error:
                os.write(writer, str(error).encode())
            finally:
                os._exit(0)
        os.close(writer)
        os.waitpid(child, 0)
        told = os.read(reader, 4096).decode()
        os.close(reader)
    assert (told == expected) is is_taken, told


def test_the_daemon_s_token_is_its_file_s_or_derived(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key, token = tmp_path / "key", tmp_path / "token"
    create_secret(key)
    token.write_text("of its own\n")
    token.chmod(0o600)
    monkeypatch.setenv("KEYSTAGE_KEYSMANAGER_LISTEN", "127.0.0.1:0")
    monkeypatch.setenv("KEYSTAGE_WIRE_KEY_FILE", str(key))
    derived = read_secret(key).derive("kubernetes internal http").hex()
    assert KeysManagerConfig().token() == derived
    monkeypatch.setenv("KEYSTAGE_KEYSMANAGER_TOKEN_FILE", str(token))
    assert KeysManagerConfig().token() == "of its own" == read_token(token)
    monkeypatch.delenv("KEYSTAGE_KEYSMANAGER_TOKEN_FILE")
    key.write_text("short")
    with pytest.raises(ValueError, match="holds 5 bytes"):
        KeysManagerConfig().token()
