"""Your function."""


def handle(event):
    """Answers one request.

    `event` has `method`, `path`, `query` (a dict), `headers` (lower-case names), `body` (bytes), and
    `text()`, `json()`, `secret(name)`. Return text, bytes, anything JSON can hold, a tuple
    `(body, status)` or `(body, status, headers)`, or a generator to stream its pieces. It may be
    `async def`; a plain one runs in a thread.
    """
    return f"Hello, {event.text() or 'world'}!\n"
