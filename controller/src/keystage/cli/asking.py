"""How `status`, `top` and `explain` ask a gateway for its report: address, credentials, one exchange.

The report is `observability.api`'s. Whatever keeps it from being read is one `NotAsked` with what to do; the
commands end with code 2 then. A report that looks old is read again for a moment: the clock of this machine
may differ from the controller's, and only one that does not change any more is old.
"""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from keystage.cli.errors import fail
from keystage.observability.api import REPORT_PATH, STALE_S, Report
from keystage.openfaas.errors import BadAddress, BadPassword, OpenFaasError, answered
from keystage.openfaas.exchange import Wire, read_password
from keystage.wire.unreadable import UNREADABLE

NOT_ASKED = 2
AGAIN_S = 3.0
"""A controller that lives reports several times in that time."""
AGAIN_EVERY_S = 0.25
MOST_S = 3600.0
"""Nobody waits longer for an answer; sockets take no infinite time."""

Gateway = Annotated[str, typer.Option("--gateway", envvar="OPENFAAS_URL", help="address of the gateway")]
User = Annotated[str, typer.Option(help="user of the gateway")]
PasswordFile = Annotated[
    Path | None,
    typer.Option(help="file with its password (default: that of the state folder, where there is one)"),
]
Home = Annotated[Path | None, typer.Option(help="state folder (default .keystage, or KEYSTAGE_HOME)")]
Timeout = Annotated[float, typer.Option(help="seconds to wait for an answer", min=0.1, max=MOST_S)]
AsJson = Annotated[bool, typer.Option("--json", help="one JSON object on standard output")]


class NotAsked(Exception):
    """There is no report; says why and what to do."""


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """A gateway that is asked."""

    wire: Wire

    def report(self) -> Report:
        """What it reports now.

        Raises:
            NotAsked: it does not answer, refuses, or has no report.
        """
        asked = self.wire.asked("GET", REPORT_PATH)
        try:
            status, body = self.wire.exchange("GET", REPORT_PATH)
        except OpenFaasError as error:
            raise NotAsked(f"{error}: is it running, and is --gateway its address?") from error
        if status in (401, 403):
            raise NotAsked(f"{asked} answered {status}: {self._credentials()}")
        if status == 404:
            raise NotAsked(f"{asked} answered 404: is it Keystage's own gateway, and not an older one?")
        if status != 200:
            raise NotAsked(str(answered(asked, status, body)))
        try:
            return msgspec.json.decode(body, type=Report)
        except UNREADABLE as error:
            raise NotAsked(f"{asked} answered what is no report: {error}") from error

    def _credentials(self) -> str:
        """What to do about credentials that were not taken."""
        if self.wire.credentials is None:
            return "no password was sent, the state folder has none: --home, or --user and --password-file"
        return "user or password are wrong: --user, --password-file, --home"

    def judged(self) -> tuple[Report, str]:
        """What it reports now, and in words how old that is, empty where it is fresh.

        Raises:
            NotAsked: see `report`.
        """
        report = self.report()
        if abs(time.time() - report.at_s) <= STALE_S:
            return report, ""
        end_s = time.monotonic() + AGAIN_S
        while time.monotonic() < end_s:
            time.sleep(AGAIN_EVERY_S)
            again = self.report()
            if (again.controller, again.number) != (report.controller, report.number):
                return again, ""  # it lives: it is the clocks that differ
        age_s = time.time() - report.at_s
        since = f"is {age_s:.0f} s old" if age_s > STALE_S else f"did not change for {AGAIN_S:g} s"
        return report, f"the report {since}, at most {STALE_S:g} s are fresh: is the controller gone?"


def source(
    gateway: str, user: str, password_file: Path | None, home: Path | None, timeout_s: float
) -> Source:
    """A gateway by what a person typed.

    Raises:
        typer.Exit: code 2, for an address or a password file that cannot be used.
    """
    from keystage.local.config import LocalSettings

    file = password_file or own_password_file(home or LocalSettings().home)
    try:
        credentials = read_password(user, file) if file is not None else None
        return Source(Wire(gateway, credentials, timeout_s))
    except (BadAddress, BadPassword) as error:
        fail(error, NOT_ASKED)


def own_password_file(folder: Path) -> Path | None:
    """The password file of a state folder, None where there is none."""
    from keystage.local.home import PASSWORD_FILE

    file = folder / "credentials" / PASSWORD_FILE
    try:
        file.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError:
        pass  # it is another user's: whoever reads it says so
    return file
