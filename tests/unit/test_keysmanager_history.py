"""What survives a restart, and what a damaged file costs."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec
import pytest

from keystage.keysmanager.api import HistoryEntry, StageName
from keystage.keysmanager.history import LIMIT, History

A, B = StageName("file:///b", 0), StageName("file:///b", 1)


def again(history: History) -> History:
    loaded = History(history.path)
    loaded.load()
    return loaded


def test_a_restart_knows_what_was_used_last(tmp_path: Path) -> None:
    history = History(tmp_path / "state" / "history.json")
    history.load()
    history.remember(A, "a", 10.0)
    history.remember(B, "b", 20.0)
    history.remember(A, "a", 30.0)
    history.save()
    assert again(history).entries() == (
        HistoryEntry(name=A, identity="a", at_s=30.0, uses=2),
        HistoryEntry(name=B, identity="b", at_s=20.0, uses=1),
    )
    assert again(history).names() == (A, B)
    assert [path.name for path in history.path.parent.iterdir()] == ["history.json"]


def test_an_invalid_one_is_kept_but_not_loaded_first(tmp_path: Path) -> None:
    history = History(tmp_path / "history.json")
    history.remember(A, "old", 10.0)
    history.remember(B, "b", 11.0)
    history.remember(A, "old", 50.0, is_valid=False)
    assert history.entries()[1] == HistoryEntry(name=A, identity="old", at_s=10.0, uses=1, is_valid=False)
    assert history.names() == (B,)
    history.remember(A, "new", 60.0)
    assert history.names() == (A, B)
    history.invalidate("b")
    assert history.names() == (A,)


def test_bounded_the_longest_unused_go(tmp_path: Path) -> None:
    history = History(tmp_path / "history.json")
    for number in range(LIMIT + 5):
        history.remember(StageName("file:///b", number), "x", float(number))
    history.save()
    entries = again(history).entries()
    assert len(entries) == LIMIT
    assert entries[-1].name.stage == 5


@pytest.mark.parametrize("content", [b"{", b"[1]", b"\xff\xfe", b'[{"name": 1}]', b""])
def test_a_corrupt_file_is_set_aside_with_a_warning(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    history = History(tmp_path / "history.json")
    history.path.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        history.load()
    assert "is corrupt and was set aside" in caplog.text
    assert (tmp_path / "history.json.corrupt").read_bytes() == content
    assert history.entries() == ()
    history.remember(A, "a", 1.0)
    history.save()
    assert again(history).names() == (A,)


def test_a_folder_that_cannot_be_written_is_a_warning_and_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "state").write_text("a file where the folder should be")
    history = History(tmp_path / "state" / "history.json")
    history.remember(A, "a", 1.0)
    with caplog.at_level(logging.WARNING):
        history.save()
    assert "cannot be written" in caplog.text
    (tmp_path / "state").unlink()
    history.save()
    assert again(history).names() == (A,)


def test_nothing_is_written_where_nothing_has_changed(tmp_path: Path) -> None:
    history = History(tmp_path / "history.json")
    history.save()
    assert not history.path.exists()
    history.remember(A, "a", 1.0)
    history.save()
    assert msgspec.json.decode(history.path.read_bytes())[0]["identity"] == "a"
    history.path.unlink()
    history.save()
    assert not history.path.exists()
