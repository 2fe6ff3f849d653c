"""Which code a bundle may name."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.program_handlers import write_fork

from keystage.streams.api import ProgramError
from keystage.streams.graph import ProgramReference
from keystage.streams.handler import open_allowed
from keystage.streams.samples import sample_bodies


@pytest.mark.parametrize(
    "path", ["os:system", "subprocess:run", "keystage.streams.opening:open_program", "json:loads"]
)
def test_code_elsewhere_is_refused(path: str, tmp_path: Path) -> None:
    with pytest.raises(ProgramError, match="KEYSTAGE_HANDLER names no folder"):
        open_allowed(path, {})
    with pytest.raises(ProgramError, match="is not in KEYSTAGE_HANDLER"):
        open_allowed(path, {}, tmp_path)


@pytest.mark.parametrize("path", ["", ":program", "nowhere_at_all:program"])
def test_paths_that_lead_nowhere_are_refused(path: str, tmp_path: Path) -> None:
    with pytest.raises(ProgramError, match="is not in KEYSTAGE_HANDLER"):
        open_allowed(path, {}, tmp_path)


@pytest.mark.parametrize("path", ["os:getcwd", "posix:getcwd", "builtins:dict", "__main__:program"])
def test_what_is_built_into_the_interpreter_is_refused_where_the_folder_is_the_current_one(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ProgramError, match="is not in KEYSTAGE_HANDLER"):
        open_allowed(path, {}, ".")


def test_what_a_handler_imported_is_not_called(tmp_path: Path) -> None:
    (tmp_path / "handler_that_imports.py").write_text("from os import mkdir\nfrom subprocess import run\n")
    made = tmp_path / "made"
    for name, options in (("mkdir", {"path": str(made)}), ("run", {"args": ["mkdir", str(made)]})):
        with pytest.raises(ProgramError, match="is not in KEYSTAGE_HANDLER"):
            open_allowed(f"handler_that_imports:{name}", options, tmp_path)
    assert not made.exists()
    with pytest.raises(ProgramError, match="not built in"):
        open_allowed("keystage.streams.programs.language_model:open_source", {"source": "x"})


def test_a_handler_may_hand_on_a_ready_program(tmp_path: Path) -> None:
    (tmp_path / "handler_that_hands_on.py").write_text(
        "from keystage.streams.programs.diffusion import program\n"
    )
    assert open_allowed("handler_that_hands_on:program", {}, tmp_path).name == "diffusion"


def test_a_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ProgramError, match="no such folder"):
        open_allowed("fork_handler:program", {}, tmp_path / "none")


def test_code_in_the_folder_and_built_in_is_opened(tmp_path: Path) -> None:
    folder = Path(write_fork(tmp_path / "handler"))
    # Under a name of its own: a module of this name from another folder may be imported already.
    (folder / "fork_handler.py").rename(folder / "handler_of_this_test.py")
    assert list(open_allowed("handler_of_this_test:program", {"name": "mine"}, folder).modules) == [
        "split", "scale", "slow", "join", "count",
    ]  # fmt: skip
    assert open_allowed("keystage.streams.programs.diffusion:program").name == "diffusion"


def test_samples_are_drawn_by_seed_and_fit_their_program() -> None:
    reference = ProgramReference("keystage.streams.programs.diffusion:program")
    bodies = sample_bodies(reference, 40, 3)
    assert bodies == sample_bodies(reference, 40, 3)
    assert bodies != sample_bodies(reference, 40, 4)
    program = open_allowed(reference.path)
    assert len({program.parse(body, "application/json").header["steps"] for body in bodies}) > 3
