"""Runs a program's `main()` in a forked process for each input: does it end with words, or with a traceback?

For what reads its environment and then begins to serve. An input is a JSON object of variables. The
program may refuse (its exit code, with words), or live on: then it is killed after a moment. A traceback,
another exit code, or silence with an exit is a crash. The parent has imported the program, so a fork is all
that an input costs.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

from fuzz.target import FuzzError

REFUSED = (1, 2, 3)
"""1: of the gateway, whose address is taken; 3: of the KeysManager, whose socket is."""


class Refused(Exception):
    """The program said why it does not start."""


class Forked:
    """One program.

    Args:
        main: gives its exit code, or raises SystemExit.
        scratch: where it runs.
        base: variables that every input has unless it says otherwise.
        up: what it says once it serves.
        lives_s: what lives longer, or says that, has taken its environment.
    """

    def __init__(
        self, main: Callable[[], int], scratch: Path, base: Mapping[str, str], up: str, lives_s: float = 1.0
    ) -> None:
        self._main, self._scratch, self._base = main, scratch, dict(base)
        self._up, self._lives_s = up.encode(), lives_s
        # Standard input that does not end: a program may be told that its owner's pipe is number 0.
        self._input, self._held = os.pipe()

    def run(self, data: bytes) -> None:
        """One environment.

        Raises:
            Refused: its exit code, with words.
            FuzzError: a traceback, another exit code, or no words.
        """
        try:
            given = json.loads(data.decode("utf-8", "surrogatepass"))
        except (ValueError, RecursionError) as error:
            raise Refused("no environment") from error
        if not isinstance(given, dict):
            raise Refused("no environment")
        env = {**self._base, **{key: _text(value) for key, value in given.items() if key.isidentifier()}}
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(read)
            self._be(env, write)
        os.close(write)
        with contextlib.suppress(OSError):  # both do it, whoever is first
            os.setpgid(child, child)
        try:
            said, code = self._watch(read, child)
        finally:
            os.close(read)
        words = said.decode(errors="replace")
        if "Traceback (most recent call last)" in words or "Fatal Python error" in words:
            raise FuzzError(f"a traceback:\n{words[-3000:]}")
        if code is None:
            return
        if code not in REFUSED or not words.strip():
            raise FuzzError(f"exit code {code}, words {words[-3000:]!r}")
        raise Refused(words)

    def _watch(self, read: int, child: int) -> tuple[bytes, int | None]:
        """What it said, and its exit code; None: it lived on."""
        said, until_s = b"", time.monotonic() + self._lives_s
        while (left_s := until_s - time.monotonic()) > 0:
            if select.select([read], [], [], left_s)[0]:
                part = os.read(read, 65536)
                if not part:
                    break
                said += part
            if self._up in said:
                break
        if self._up in said or time.monotonic() >= until_s:
            with contextlib.suppress(ProcessLookupError):  # it has just ended by itself
                os.killpg(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
            code = os.waitstatus_to_exitcode(status)
            return said, None if code == -signal.SIGKILL else code
        _, status = os.waitpid(child, 0)
        return said, os.waitstatus_to_exitcode(status)

    def _be(self, env: dict[str, str], write: int) -> None:
        code = 99
        try:
            os.setpgid(0, 0)
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.signal(signal.SIGPROF, signal.SIG_DFL)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            os.chdir(self._scratch)
            os.dup2(self._input, 0)
            for fd in (1, 2):
                os.dup2(write, fd)
            os.environ.clear()
            for key, value in env.items():
                os.environb[key.encode()] = value.encode("utf-8", "surrogatepass").replace(b"\0", b"")
            sys.stdout, sys.stderr = (
                open(fd, "w", closefd=False, errors="backslashreplace", buffering=1)  # noqa: SIM115
                for fd in (1, 2)
            )
            import logging

            logging.disable(logging.NOTSET)
            code = self._main()
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
        except BaseException:  # noqa: BLE001  # what Python itself would have said
            traceback.print_exc()
            code = 1
        finally:
            sys.stdout.flush()
            os._exit(code)


def _text(value: object) -> str:
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value)[:4000]
    except ValueError:
        return "9" * 4000
