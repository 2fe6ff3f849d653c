"""Removes the run folder when `keystage up` was killed and could not do it itself.

A shell with three words of work, so that it costs nothing while it waits: its standard input is the
lifeline, on end of file it gives the other processes a moment to end, and removes the sockets. It is
killed at an orderly end, when `home.close` removes the folder.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from pathlib import Path

_SCRIPT = 'read -r _; sleep 1; rm -rf -- "$1"'


class Sweeper:
    """Waits for the end of this process on behalf of its run folder.

    Args:
        run: folder to remove.
        lifeline_fd: read end of the lifeline.
        pid: of the shell that waits already; 0: none does.

    Attributes:
        pid: of the shell, 0 before it was started.
    """

    def __init__(self, run: Path, lifeline_fd: int, pid: int = 0) -> None:
        self._run = run
        self._lifeline_fd = lifeline_fd
        self.pid = pid

    def start(self) -> None:
        """Starts the shell, in a session of its own so that Ctrl-C does not reach it."""
        shell = subprocess.Popen(
            ["/bin/sh", "-c", _SCRIPT, "keystage-sweeper", str(self._run)],
            stdin=self._lifeline_fd,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self.pid = shell.pid
        shell.returncode = 0  # reaped by `stop`, not by the object

    def stop(self) -> None:
        """Ends the shell without a sweep."""
        if self.pid:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)
