"""A multipart form, read by aiohttp's parser: the fields of a transcription request.

Before it: `router.face_http` has the whole body, which bounds it. After it: `router.transcriptions` checks
what the fields say.
"""

from __future__ import annotations

import asyncio
from email.message import Message

from keystage.router.openai_errors import FieldRefused, Malformed

_PARTS_MOST = 64
_TEXT_BYTES_MOST = 64 * 1024


async def read_form(content_type: str, body: bytes) -> tuple[dict[str, str], bytes | bytearray | None]:
    """The form's text fields, and the field `file` (None: it has none).

    Args:
        content_type: of the request.
        body: all of it.

    Raises:
        Malformed: the body is no form.
        FieldRefused: a field is there twice, or is too long.
    """
    # On first use: nothing else in a router needs aiohttp, which takes 0.2 s to load.
    from aiohttp import MultipartReader, StreamReader, http_exceptions
    from aiohttp.base_protocol import BaseProtocol

    if not content_type.lower().startswith("multipart/form-data"):
        raise Malformed(f"the body must be multipart/form-data, not {content_type[:100] or 'without a type'}")
    boundary = _boundary(content_type)
    if not body.startswith(boundary):
        # The parser would look for it line by line, which of 4 MB of empty lines takes 17 s.
        raise Malformed(f"the body of {len(body)} bytes does not begin with its boundary {boundary!r}")
    loop = asyncio.get_running_loop()
    stream = StreamReader(BaseProtocol(loop), 2 * len(body) + 1, loop=loop)
    stream.feed_data(body)
    stream.feed_eof()
    fields: dict[str, str] = {}
    file: bytes | bytearray | None = None
    try:
        form = MultipartReader({"Content-Type": content_type}, stream)
        for _ in range(_PARTS_MOST):
            part = await form.next()
            if part is None:
                return fields, file
            if isinstance(part, MultipartReader) or part.name is None:
                raise Malformed("the form has a part without a name, or another form in it")
            data = await part.read()
            if part.name in fields or (part.name == "file" and file is not None):
                raise FieldRefused(
                    "invalid_value", f"{part.name[:100]} is given twice", param=part.name[:100]
                )
            if part.name == "file":
                file = data
            else:
                fields[part.name] = _text(part.name, data)
    except (ValueError, http_exceptions.BadHttpMessage) as error:
        raise Malformed(f"the body of {len(body)} bytes is no form: {error}") from error
    raise Malformed(f"the form has more than {_PARTS_MOST} parts")


def _boundary(content_type: str) -> bytes:
    header = Message()
    header["Content-Type"] = content_type
    boundary = header.get_boundary()
    if not boundary:
        raise Malformed(f"the content type {content_type[:100]!r} has no boundary")
    return b"--" + boundary.encode("latin-1", "replace")


def _text(name: str, data: bytes | bytearray) -> str:
    if len(data) > _TEXT_BYTES_MOST:
        message = f"{name[:100]} has {len(data)} bytes, at most {_TEXT_BYTES_MOST} are taken"
        raise FieldRefused("invalid_value", message, param=name[:100])
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise FieldRefused("invalid_value", f"{name[:100]} is no UTF-8", param=name[:100]) from error
