"""Becomes `keystage worker`, under the container's own name where it was given none.

It is replaced, not wrapped: SIGTERM reaches the worker itself, which drains and ends.
"""

import os
import socket
import sys

os.environ.setdefault("KEYSTAGE_REPLICA", socket.gethostname())
os.execv(sys.executable, [sys.executable, "-m", "keystage.worker.app"])  # noqa: S606  (no shell is wanted)
