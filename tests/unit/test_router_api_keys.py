"""The file of API keys: what a line says, what is refused, and that a broken file changes nothing."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from keystage.router.api_keys import LOOK_EVERY_S, ApiKeys, KeysError, keys_path, made, parse

A, B = hashlib.sha256(b"key-a").hexdigest(), hashlib.sha256(b"key-b").hexdigest()


def test_a_line_says_tenant_weight_and_priority() -> None:
    found = parse(f"# who\n\nteam-a {A} weight=2.5 priority=high # of the office\nteam-b {B.upper()}\n")
    one, other = found[bytes.fromhex(A)], found[bytes.fromhex(B)]
    assert (one.tenant, one.weight, one.priority) == ("team-a", 2.5, 1)
    assert (other.tenant, other.weight, other.priority) == ("team-b", 1.0, 0)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("team-a", "line 1: it must be TENANT SHA256"),
        (f"ok {A}\n-x {B}", "line 2: it must be TENANT SHA256"),
        ("team-a s3cret-key", "line 1: the key of team-a must be its SHA-256, 64 hexadecimal digits"),
        (f"a {A} weight=0", "line 1: a weight is above 0 and at most 1000, not '0'"),
        (f"a {A} weight=nan", "line 1: a weight is above 0"),
        (f"a {A} weight=x", "line 1: a weight is above 0"),
        (f"a {A} priority=top", "line 1: 'priority=top' is neither"),
        (f"a {A}\nb {A}", "line 2: this key has a line already"),
        (f"a {A}\na {B} weight=2", "line 2: tenant a has weight 1 in an earlier line, here 2"),
        ("\n".join(f"t{n} {n:064x}" for n in range(257)), "257 tenants, at most 256"),
    ],
)
def test_what_a_file_may_not_say_is_named_without_the_key(text: str, why: str) -> None:
    with pytest.raises(KeysError, match=why) as refused:
        parse(text)
    assert "s3cret" not in str(refused.value)
    assert A not in str(refused.value)


def test_a_changed_file_is_read_again_and_a_broken_one_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "keys"
    path.write_text(f"a {A} weight=3\n")
    keys = ApiKeys(path)
    keys.load()
    assert keys.weight_of("a") == 3
    assert keys.find(b"key-b") is None
    now_s = 100.0

    def rewritten(text: str) -> None:
        nonlocal now_s
        other = tmp_path / "other"
        other.write_text(text)
        other.replace(path)
        now_s += LOOK_EVERY_S
        keys.refresh(now_s)

    rewritten(f"a {A} weight=3\nb {B}\n")
    found = keys.find(b"key-b")
    assert found is not None
    assert found.tenant == "b"
    for broken in ("nonsense", "\udcff".encode("utf-8", "surrogateescape").decode("latin-1"), f"a {A} x=1"):
        rewritten(broken)
        assert keys.find(b"key-a") is not None
        assert "the keys read before stay in force" in caplog.text
        caplog.clear()
    path.unlink()
    keys.refresh(now_s + LOOK_EVERY_S)
    now_s += 2 * LOOK_EVERY_S
    keys.refresh(now_s)
    assert keys.find(b"key-a") is not None
    assert caplog.text.count("stay in force") == 1
    rewritten(f"b {B}\n")
    assert keys.find(b"key-a") is None
    assert keys.tenants == ["b"]


def test_the_file_is_looked_at_no_more_often_than_stated(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"a {A}\n")
    keys = ApiKeys(path)
    keys.load()
    keys.refresh(10.0)
    path.write_text(f"b {B} priority=high\n")
    keys.refresh(10.0 + LOOK_EVERY_S / 2)
    assert keys.find(b"key-a") is not None
    keys.refresh(10.0 + LOOK_EVERY_S)
    assert keys.find(b"key-a") is None


def test_a_file_that_is_missing_or_huge_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(KeysError, match=r"API keys in .*none cannot be read: No such file"):
        ApiKeys(tmp_path / "none").load()
    huge = tmp_path / "huge"
    huge.write_bytes(b"#" * ((1 << 20) + 1))
    with pytest.raises(KeysError, match="more than 1048576 bytes"):
        ApiKeys(huge).load()


def test_the_setting_names_a_file_or_a_secret() -> None:
    assert keys_path("", "/s") is None
    assert keys_path("/etc/keys", "/s") == Path("/etc/keys")
    assert keys_path("secret:router-keys", "/s") == Path("/s/router-keys")
    for bad in ("secret:", "secret:../x", "secret:a/b", "secret:.."):
        with pytest.raises(KeysError, match="no slash"):
            keys_path(bad, "/s")


def test_a_made_key_is_what_its_line_says() -> None:
    key, line = made("team-a", 2.0, "high")
    assert key not in line
    found = parse(line)[hashlib.sha256(key.encode()).digest()]
    assert (found.tenant, found.weight, found.priority) == ("team-a", 2.0, 1)
    with pytest.raises(KeysError):
        made("no tenant", 1.0, "normal")
