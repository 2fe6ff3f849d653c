"""What `keystage doctor` asks of the folders that `keystage up` writes: its state, and its sockets.

Nothing is made: rights and the kind of each are read.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from keystage.cli.doctor_report import Check, judged

AREA = "local"
OTHER_HOME = "another folder with --home or KEYSTAGE_HOME"
_WRITTEN = (
    "lock", "run", "functions.json", "decisions.jsonl", "bundles", "credentials", "keysmanager", "logs",
)  # fmt: skip
"""What `up` writes in its state folder (`local.home`)."""
_NO_FOLDER, _READ_ONLY = "no folder", "on a read-only file system"


def checks(home: Path) -> list[Check]:
    """The state folder, which need not be there, and the folder of sockets."""
    from keystage.local.config import runtime_folder

    return [state_folder(home.absolute()), run_folder(runtime_folder())]


def state_folder(home: Path) -> Check:
    """Whether `up` could make it, and write what is in it.

    Args:
        home: absolute.
    """
    actual, advice = _state(home)
    bound = "a folder that this user may write"
    return judged(AREA, f"state folder {home}", bound, actual, "fail", advice, is_met=not advice)


def run_folder(folder: Path) -> Check:
    """Whether sockets can be made in a folder."""
    why = _refusal(folder)
    return judged(
        AREA,
        f"folder of sockets {folder}",
        "a folder that this user may write",
        why or "writable",
        "fail",
        f"no part can listen: chmod 1777 {folder}, or set XDG_RUNTIME_DIR to a folder of your own, of 24 "
        "characters at most",
        is_met=not why,
    )


def _state(home: Path) -> tuple[str, str]:
    """What it is, and what to do; that is empty where it is well."""
    place = home
    while not os.path.lexists(place) and place != place.parent and not _is_hidden(place):
        place = place.parent
    why = _refusal(place)
    if why:
        return (why if place == home else f"it is not there, and {place} is {why}"), _cure(home, place, why)
    if place != home:
        return f"not there yet, {place} is writable", ""
    held = [name for name in _WRITTEN if os.path.lexists(home / name) and _refusal(home / name, folder=None)]
    if held:
        owner = (home / held[0]).lstat().st_uid
        return (
            f"{', '.join(held)} in it not writable ({held[0]}: of user {owner}, this is user {os.geteuid()})",
            f"`keystage up` ran as another user before: {_own(home)}, or choose {OTHER_HOME}",
        )
    return "writable", ""


def _cure(home: Path, place: Path, why: str) -> str:
    """What to do about a place where nothing can be written: the home, or what is above it."""
    if why == _NO_FOLDER:
        return f"`keystage up` needs a folder there: remove that file, or choose {OTHER_HOME}"
    if why == _READ_ONLY:
        return f"`keystage up` cannot write there: mount a writable volume, or choose {OTHER_HOME}"
    if _is_hidden(place):
        owner = "run it as the owner of the folders above"
        return f"`keystage up` may not even look there: {owner}, or choose {OTHER_HOME}"
    if place != home:  # what is above it belongs to somebody else, and stays so
        return (
            f"`keystage up` cannot make it: sudo install -d -o {os.geteuid()} {home}, or choose {OTHER_HOME}"
        )
    return f"`keystage up` cannot write there: {_own(home)}, or choose {OTHER_HOME}"


def _own(home: Path) -> str:
    return f"sudo chown -R {os.geteuid()} {home}"


def _is_hidden(path: Path) -> bool:
    """Whether a folder on the way may not be looked into: then nobody knows what is in it."""
    try:
        path.lstat()
    except PermissionError:
        return True
    except OSError:
        pass
    return False


def _refusal(path: Path, *, folder: bool | None = True) -> str:
    """Why this user may not write there, empty where it may.

    Args:
        path: there.
        folder: it has to be one; None: it may be.
    """
    try:
        found = path.stat()
    except OSError as error:
        return f"not to be seen ({error.strerror})"
    is_folder = stat.S_ISDIR(found.st_mode)
    if folder and not is_folder:
        return _NO_FOLDER
    needed = os.W_OK | (os.X_OK if is_folder else 0)
    if os.access(path, needed, effective_ids=True):
        return ""
    if os.statvfs(path).f_flag & os.ST_RDONLY:
        return _READ_ONLY
    return (
        f"of user {found.st_uid} with mode {stat.S_IMODE(found.st_mode):04o}, and this is user {os.geteuid()}"
    )
