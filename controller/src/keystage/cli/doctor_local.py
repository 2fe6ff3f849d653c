"""What `keystage doctor` asks of `keystage up`: its folders, is its port free, are its credentials whole."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
from pathlib import Path

from keystage.cli import doctor_home
from keystage.cli.doctor_report import Check, judged
from keystage.cli.figures import clean

AREA = "local"
HOST = "127.0.0.1"
ANSWER_S = 5.0


def checks(home: Path, port: int | None) -> list[Check]:
    """Everything about one state folder.

    Args:
        home: the folder; it need not be there.
        port: of the gateway, None: it is not looked at.
    """
    found = doctor_home.checks(home)
    found += credentials(home)
    if port:
        found.append(gateway_port(home, port))
    return found


def credentials(home: Path) -> list[Check]:
    """Whether the files that `up` made are whole and private; nothing where there are none."""
    from keystage.local.home import PASSWORD_FILE, TOKEN_FILE, USER_FILE, WIRE_KEY_FILE

    folder = home / "credentials"
    return [
        _credential(folder / name)
        for name in (USER_FILE, PASSWORD_FILE, TOKEN_FILE, WIRE_KEY_FILE)
        if os.path.isdir(folder)  # noqa: PTH112  (it may be hidden)
    ]


def _credential(file: Path) -> Check:
    bound = "a text, mode 0600"
    try:
        mode = stat.S_IMODE(file.stat().st_mode)
        is_empty = not file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        return Check(
            area=AREA,
            level="fail",
            thing=str(file),
            bound=bound,
            actual=str(reason),
            advice="remove the file and restart `keystage up`: it makes a new one",
        )
    if is_empty:
        advice = "nobody can log in with it: remove the file and restart `keystage up`, which makes a new one"
        return Check(area=AREA, level="fail", thing=str(file), bound=bound, actual="empty", advice=advice)
    return judged(
        AREA,
        str(file),
        bound,
        f"{mode:04o}",
        "warn",
        f"others of this machine can read it: chmod 600 {file}",
        is_met=not mode & 0o077,
    )


def gateway_port(home: Path, port: int) -> Check:
    """Whether `up` can listen, or does."""
    try:
        with socket.create_server((HOST, port)):
            actual = "free"
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            return _taken(home, port, str(error.strerror), "choose another: KEYSTAGE_GATEWAY_PORT, --port")
        if _is_own(home, port):
            actual = f"held by the gateway of {home}"
        else:
            advice = (
                "`keystage up` cannot listen there: end that program, or choose another port with --port or "
                "KEYSTAGE_GATEWAY_PORT (0: a free one)"
            )
            return _taken(home, port, f"taken by {_holder(port)}", advice)
    return Check(area=AREA, level="ok", thing=_thing(port), bound=_bound(home), actual=actual)


def _taken(home: Path, port: int, actual: str, advice: str) -> Check:
    return Check(
        area=AREA, level="warn", thing=_thing(port), bound=_bound(home), actual=actual, advice=advice
    )


def _thing(port: int) -> str:
    return f"port {port} of {HOST}"


def _bound(home: Path) -> str:
    return f"free, or held by the gateway of {home}"


def _is_own(home: Path, port: int) -> bool:
    """Whether a gateway listens there that takes the state folder's credentials."""
    from keystage.local.errors import LocalError
    from keystage.local.home import read_credentials
    from keystage.openfaas.client import Client
    from keystage.openfaas.errors import OpenFaasError
    from keystage.openfaas.exchange import Credentials, Wire
    from keystage.openfaas.provider import kind_of

    try:
        known = Credentials(*read_credentials(home / "credentials"))
        client = Client(Wire(f"http://{HOST}:{port}", known, ANSWER_S))
        return kind_of(client.info()) == "keystage"
    except (LocalError, OpenFaasError):
        return False


def _holder(port: int) -> str:
    """The process that listens there, as far as it may be seen."""
    import psutil

    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp"):
            if connection.status != psutil.CONN_LISTEN or not connection.laddr or not connection.pid:
                continue
            if connection.laddr.port == port:
                command = " ".join(psutil.Process(connection.pid).cmdline()[:4])
                return f"process {connection.pid} ({clean(command, 80) or 'without a name'})"
    return "a process of another user"
