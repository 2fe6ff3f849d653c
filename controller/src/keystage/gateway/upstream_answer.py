"""What the bytes from a replica mean: httptools parses them, this decides where an answer ends.

Pure: no IO, no clock. Used by `gateway.upstream_connection`, one object per connection and one
answer at a time. Parsing itself is httptools' (llhttp, strict): this module must not look into
bytes, only at parsed fields. Rules of RFC 9112 section 6.3: an answer to HEAD, 204 and 304 have no
body; else it is chunked, has a length, or lasts until the connection ends. Answers of 1xx are
skipped, trailers dropped.
"""

from __future__ import annotations

import httptools

MAX_HEAD_BYTES = 1 << 16
"""Of header fields and trailers of one answer, and of bytes in a row that are no part of a body."""


class UpstreamError(Exception):
    """The exchange failed; the text completes "replica R ..."."""


class UpstreamBroken(UpstreamError):
    """The replica ended the connection before its answer was complete, or sent what is no answer."""


class Answer:
    """Collects one answer after another.

    Attributes:
        status: 0 before the head has come.
        headers: as sent, without trailers.
        chunks: parts of the body that nobody has taken yet.
        held_bytes: their size.
        is_complete: it has come to its end; also before the first.
        keep_alive: another may follow on this connection.
    """

    def __init__(self) -> None:
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.chunks: list[bytes] = []
        self.held_bytes = 0
        self.is_complete = True
        self.keep_alive = True
        self._parser = httptools.HttpResponseParser(self)
        self._is_bodiless = False
        self._is_open_ended = False
        self._head_bytes = 0
        self._idle_bytes = 0

    def begin(self, *, is_head: bool) -> None:
        """The next answer is awaited.

        Args:
            is_head: it answers a HEAD request.
        """
        self.status = 0
        self.headers = []
        self.chunks = []
        self.held_bytes = 0
        self.is_complete = False
        self._is_bodiless = is_head
        self._is_open_ended = False
        self._head_bytes = self._idle_bytes = 0

    def feed(self, data: bytes) -> None:
        """Takes what came.

        Raises:
            UpstreamBroken: it is no answer. What follows a complete answer only ends `keep_alive`.
        """
        if self.is_complete:
            self.keep_alive = False
            return
        self._idle_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self.keep_alive = False
            if not self.is_complete:
                if isinstance(error.__context__, UpstreamBroken):
                    raise error.__context__ from None
                raise UpstreamBroken(f"sent what is no HTTP answer ({error})") from error
        if self._idle_bytes > MAX_HEAD_BYTES and not self.is_complete:
            raise UpstreamBroken(f"sent more than {MAX_HEAD_BYTES} bytes of headers")

    def end(self) -> None:
        """The connection ended in good order, which may be the end of the answer."""
        self.keep_alive = False
        if self.status and self._is_open_ended:
            self.is_complete = True

    def take(self) -> bytes:
        """What is here of the body, now the caller's."""
        chunks = self.chunks
        data = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        chunks.clear()
        self.held_bytes = 0
        return data

    # ------------------------------------------------------------ the parser's side

    def on_message_begin(self) -> None:
        """A second answer to one request is none."""
        if self.is_complete:
            raise UpstreamBroken("sent more than one answer")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Of the head, or a trailer."""
        self._head_bytes += len(name) + len(value) + 4
        if self._head_bytes > MAX_HEAD_BYTES:
            raise UpstreamBroken(f"sent more than {MAX_HEAD_BYTES} bytes of headers")
        if not self.status:
            self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        """Decides how this answer ends."""
        parser = self._parser
        status = parser.get_status_code()
        if 100 <= status < 200 and status != 101:
            self.headers = []
            return
        version = parser.get_http_version()
        if not 200 <= status <= 599 or version[:2] != "1.":
            raise UpstreamBroken(f"sent what is no HTTP answer (version {version}, status {status})")
        self.status = status
        self._idle_bytes = 0
        self.keep_alive = parser.should_keep_alive()
        if self._is_bodiless:
            self.is_complete = True
            self._parser = httptools.HttpResponseParser(self)  # the old one waits for a body
        elif not self.keep_alive:
            self._is_open_ended = _is_open_ended(self.headers)

    def on_body(self, data: bytes) -> None:
        """A part of the body."""
        if self.is_complete:
            raise UpstreamBroken("sent a body where none may be")
        self._idle_bytes = 0
        self.held_bytes += len(data)
        self.chunks.append(data)

    def on_message_complete(self) -> None:
        """The end of an answer, or of a 1xx before it."""
        if self.status:
            self.is_complete = True


def _is_open_ended(headers: list[tuple[bytes, bytes]]) -> bool:
    """Whether the end of the connection is the end of the body."""
    codings: list[bytes] = []
    for name, value in headers:
        lower = name.lower()
        if lower == b"content-length":
            return False
        if lower == b"transfer-encoding":
            codings += [coding.strip() for coding in value.lower().split(b",")]
    return not codings or codings[-1] != b"chunked"
