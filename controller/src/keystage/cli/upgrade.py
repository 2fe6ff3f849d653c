"""`keystage upgrade`: a running `keystage up` becomes this installation, part by part, while it serves."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from keystage.cli.errors import fail

Home = Annotated[Path | None, typer.Option(help="state folder (default .keystage, or KEYSTAGE_HOME)")]
GONE_S = 60.0
"""For the supervisor to answer again: it becomes another program in between."""
POLL_S = 0.2


def upgrade(home: Home = None) -> None:
    """Let the `keystage up` of a state folder go on as this installation; no accepted request fails."""
    from keystage.local.api import UpgradeRequest
    from keystage.local.client import begin_upgrade, upgrade_status
    from keystage.local.config import LocalSettings
    from keystage.local.errors import LocalError

    folder = home or LocalSettings().home
    try:
        successor = begin_upgrade(folder, UpgradeRequest(sys.executable, os.environ.get("PYTHONPATH", "")))
        typer.echo(f"becomes version {successor.version} of {sys.executable}")
        step, deadline_s = "", time.monotonic() + GONE_S
        while True:
            time.sleep(POLL_S)
            try:
                status = upgrade_status(folder)
            except LocalError:
                if time.monotonic() > deadline_s:
                    raise
                continue  # it has not listened again yet
            deadline_s = time.monotonic() + GONE_S
            if status.step and status.step != step:
                step = status.step
                typer.echo(step)
            if status.is_over:
                break
    except LocalError as error:
        fail(error, error.exit_code)
    if status.error:
        fail(f"the upgrade ended before its end: {status.error}", 1)
    typer.echo("done")
