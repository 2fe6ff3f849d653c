"""Becomes `keystage router`, under the container's own name where it was given none.

It is replaced, not wrapped: SIGTERM reaches the router itself, which drains and ends.
"""

import os
import socket
import sys

os.environ.setdefault("KEYSTAGE_REPLICA", socket.gethostname())
os.execv(sys.executable, [sys.executable, "-m", "keystage.router.app"])  # noqa: S606  (no shell is wanted)
