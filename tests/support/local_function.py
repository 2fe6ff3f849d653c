"""Deployments of small real functions, for tests of the local world and the gateway."""

from __future__ import annotations

import base64
import shlex
import sys
from pathlib import Path

from keystage.local.api import Deployment

PYTHON = shlex.quote(sys.executable)
"""The tests' own interpreter, for command lines of functions."""
SERVE = (
    f"{PYTHON} -m uvicorn --app-dir {shlex.quote(str(Path(__file__).parent))} function_app:app "
    "--host 127.0.0.1 --port $PORT --log-level warning --no-access-log --timeout-graceful-shutdown 20"
)


def function(name: str = "echo", **envs: str) -> Deployment:
    """The ASGI function of `function_app`."""
    return Deployment(service=name, image="none", envProcess=SERVE, envVars=envs)


def authorization(user: str, password: str) -> dict[str, str]:
    """Headers with HTTP Basic credentials."""
    return {"Authorization": "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()}
