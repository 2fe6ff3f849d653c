"""The lifeline: processes end when `keystage up` does, however it ended.

The supervisor alone holds the write end of a pipe; every child gets the read end
(KEYSTAGE_LIFELINE_FD) and exits on end of file. Our own programs watch it themselves. Foreign
programs run under `python -m keystage.local.lifeline [--secrets FOLDER AT] -- argv`, which watches
for them and ends their whole process group. `PR_SET_PDEATHSIG` would need code between fork and
exec, which is unsafe in a process with threads. This module must stay light: it starts with every
function.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
import time
from types import FrameType

LIFELINE = "KEYSTAGE_LIFELINE_FD"
GRACE_S = 0.5
"""From SIGTERM to SIGKILL when the supervisor died: nobody waits for a result any more."""


class Lifeline:
    """The pipe whose write end only this process holds."""

    def __init__(self, ends: tuple[int, int] | None = None) -> None:
        self.read_fd, self._write_fd = ends or os.pipe()

    @property
    def ends(self) -> tuple[int, int]:
        """Read and write end."""
        return self.read_fd, self._write_fd

    def close(self) -> None:
        """Cuts it: every child that watches ends."""
        os.close(self._write_fd)
        os.close(self.read_fd)


def _end_group(lifeline_fd: int) -> None:
    poll = select.poll()  # unlike `select.select` it takes descriptors above 1023
    poll.register(lifeline_fd, select.POLLIN)
    poll.poll()
    os.killpg(0, signal.SIGTERM)
    time.sleep(GRACE_S)
    os.killpg(0, signal.SIGKILL)


def guard(argv: list[str], lifeline_fd: int) -> int:
    """Runs a program until it ends, its supervisor ends, or SIGTERM is passed on to it.

    Must be called in the leader of a process group; the program joins that group.

    Args:
        argv: command line.
        lifeline_fd: read end of the lifeline.

    Returns:
        The program's exit code, 128 + signal number when a signal ended it.
    """
    env = {key: value for key, value in os.environ.items() if key != LIFELINE}
    try:
        child = subprocess.Popen(argv, env=env)
    except OSError as error:
        sys.stderr.write(f"{argv[0]} cannot be started: {error.strerror}\n")
        return 127

    def forward(number: int, _frame: FrameType | None) -> None:
        if child.poll() is None:
            child.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, forward)
    threading.Thread(target=_end_group, args=(lifeline_fd,), daemon=True).start()
    code = child.wait()
    return code if code >= 0 else 128 - code


def main() -> int:
    """Entry of `python -m keystage.local.lifeline [--secrets FOLDER AT] -- argv`: shows FOLDER at AT."""
    words = sys.argv[1:]
    secrets: list[str] = []
    if words[:1] == ["--secrets"]:
        secrets, words = words[1:3], words[3:]
    if len(words) < 2 or words[0] != "--":
        sys.stderr.write(
            "usage: python -m keystage.local.lifeline [--secrets FOLDER AT] -- program [argument ...]\n"
        )
        return 2
    if os.getpgid(0) != os.getpid():
        os.setpgid(0, 0)
    if secrets:
        from pathlib import Path

        from keystage.local.private_mount import show

        why_not = show(secrets[0], Path(secrets[1]))
        if why_not:
            sys.stderr.write(f"keystage: secrets are in the folder of secret_mount_path alone: {why_not}\n")
    return guard(words[1:], int(os.environ[LIFELINE]))


if __name__ == "__main__":
    sys.exit(main())
