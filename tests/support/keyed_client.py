"""A client that streams with an `Idempotency-Key`, and goes on behind what it has."""

from __future__ import annotations

import http.client
import json
import time
import urllib.parse
from typing import Any


class KeyedStream:
    """One answer, over as many connections as it takes.

    Args:
        body: of the plain call.
        key: the request's.

    Attributes:
        tokens: what came so far.
        text: what came so far.
        times_s: when each token came (monotonic seconds).
        last: the closing event, None so far.
        error: the error event, None so far.
    """

    def __init__(self, body: dict[str, Any], key: str) -> None:
        self._body = json.dumps({**body, "stream": True, "return_token_ids": True}).encode()
        self._key = key
        self.tokens: list[int] = []
        self.text = ""
        self.times_s: list[float] = []
        self.last: dict[str, Any] | None = None
        self.error: dict[str, Any] | None = None

    def read(self, url: str, until: int = 1 << 30, *, timeout_s: float = 60) -> int:
        """Connects, and reads until it has so many tokens or the end; the status.

        Raises:
            OSError: the connection broke or could not be made.
            http.client.HTTPException: likewise.
        """
        connection = self.connect(url, timeout_s)
        try:
            return self.follow(connection, until)
        finally:
            connection.close()

    def connect(self, url: str, timeout_s: float = 60) -> http.client.HTTPConnection:
        """Sends the request."""
        host = urllib.parse.urlsplit(url).netloc
        connection = http.client.HTTPConnection(host, timeout=timeout_s)
        headers = {"Idempotency-Key": self._key}
        if self.tokens:
            headers["Last-Event-ID"] = str(len(self.tokens))
        connection.request("POST", "/", self._body, headers)
        return connection

    def follow(self, connection: http.client.HTTPConnection, until: int = 1 << 30) -> int:
        """Reads the answer of a connection; see `read`."""
        answer = connection.getresponse()
        if answer.status != 200:
            self.error = json.loads(answer.read())["error"]
            return answer.status
        number = 0
        while len(self.tokens) < until and self.last is None:
            line = answer.readline()
            if not line:
                raise ConnectionError("the stream broke off")
            if line.startswith(b"id: "):
                number = int(line[4:])
            elif line.startswith(b"data: {"):
                event = json.loads(line[6:])
                if "error" in event:
                    self.error = event["error"]
                    return answer.status
                self.text += event["text"]
                if "finish_reason" in event:
                    self.last = event
                    continue
                self.tokens += event["token_ids"]
                self.times_s += [time.monotonic()] * len(event["token_ids"])
                assert number == len(self.tokens), (number, len(self.tokens))
        return answer.status

    def read_through(self, url: str, within_s: float = 60) -> None:
        """Connects again and again until the answer is complete, as a client does whose server died."""
        end_s = time.monotonic() + within_s
        while self.last is None:
            assert time.monotonic() < end_s, f"not complete within {within_s} s: {len(self.tokens)} tokens"
            try:
                status = self.read(url)
            except (OSError, http.client.HTTPException):
                status = 0
            if self.last is None:
                assert status in (0, 200, 429, 503), self.error
                time.sleep(0.02)
