"""A function that is no more than a web server: SIGTERM ends it in the middle of what it does.

Run as `python abrupt_function.py PORT [one]`; with `one` it takes a single connection at a time. A path
ends with the seconds that its answer takes.
"""

from __future__ import annotations

import os
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer


class Handler(BaseHTTPRequestHandler):
    """Answers with the replica's name."""

    def do_GET(self) -> None:
        """Takes the seconds that the path says."""
        last = self.path.rsplit("/", 1)[-1]
        time.sleep(float(last) if last.replace(".", "").isdigit() else 0.0)
        body = os.environ["KEYSTAGE_REPLICA"].encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Says nothing."""


if __name__ == "__main__":
    server = HTTPServer if sys.argv[2:] == ["one"] else ThreadingHTTPServer
    server(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
