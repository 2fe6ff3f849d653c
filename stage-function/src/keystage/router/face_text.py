"""Answers of text: whole or in events, of a request of its own or of a keyed record.

Before it: `router.face` has read the request. `text_output` makes text of tokens, `openai_render` writes
it. A keyed answer is written from its record's tokens, one by one, so that it does not depend on how many
came together.
"""

from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING, cast

from keystage.router.engine import Engine, Failure, Refusal, enough
from keystage.router.face_http import Receive, Scope, Send, send_whole, start_events, tenant_of, watched
from keystage.router.idempotency import Stamp, name_of
from keystage.router.idempotency_http import fingerprint, key_of, position_of
from keystage.router.idempotency_runs import KeyedRequests
from keystage.router.idempotency_text import Making
from keystage.router.openai import Call
from keystage.router.openai_errors import error_body
from keystage.router.openai_render import Events, event, stamp_of, whole
from keystage.router.text import TextCodec
from keystage.router.text_output import TextOutput

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator


class TextAnswers:
    """Writes the answers of one pipeline.

    Args:
        engine: generates.
        text: the pipeline's tokenizer.
        name: the pipeline's name.
        keyed: requests with a key.
    """

    def __init__(self, engine: Engine, text: TextCodec, name: str, keyed: KeyedRequests) -> None:
        self._engine = engine
        self._text = text
        self._name = name
        self._keyed = keyed

    async def serve(self, call: Call, body: bytes, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request.

        Args:
            call: what it asks for.
            body: as it came.
            scope: of the request.
            receive: tells when the client leaves.
            send: takes the answer.

        Raises:
            Refusal: before the answer began.
        """
        key = key_of(scope)
        position = position_of(scope, goes_on=key is not None and call.stream)
        if key is None:
            # The port promises `aclose`; its type says AsyncIterator so that engines may be classes.
            tokens = cast("AsyncGenerator[list[int], None]", self._engine.generate(call.generation))
            answer = _Answer(call, self._name, stamp_of(call), self._output(call), send)
            with watched(receive):
                await answer.write(tokens)
            await answer.finish()
            return
        name, digest = name_of(tenant_of(scope), key), fingerprint(scope, body)
        making = self._making(call, position or 0)
        with watched(receive):
            async with self._keyed.joined(
                name, digest, stamp_of(call), making, call.generation.deadline_s
            ) as record:
                await self._keyed.reach(record, position or 0)
                answer = _Answer(call, self._name, record.stamp, self._output(call), send, is_numbered=True)
                if position is not None:
                    answer.skip(record.tokens[:position].tolist())
                await answer.write(self._keyed.read(record, position or 0))
        await answer.finish()

    def _making(self, call: Call, position: int) -> Making:
        has_journal = self._keyed.journal is not None
        return Making(self._engine, self._text, call, position, has_journal=has_journal)

    def _output(self, call: Call) -> TextOutput:
        return TextOutput(self._text.decoder(call.generation.prompt), call.stops, call.generation.eos)


class _Answer:
    """One answer on its way to a client: `write` until it is complete, then `finish`."""

    def __init__(
        self,
        call: Call,
        name: str,
        stamp: Stamp,
        output: TextOutput,
        send: Send,
        *,
        is_numbered: bool = False,
    ) -> None:
        self._call = call
        self._name = name
        self._stamp = stamp
        self._output = output
        self._send = send
        self._is_keyed = is_numbered
        self._events = Events(call, name, stamp, is_numbered=is_numbered)
        self._pending = self._events.opening() if call.stream else b""
        self._is_begun = False

    def skip(self, ids: list[int]) -> None:
        """The client has the beginning of the answer, these tokens and the text that they gave."""
        self._pending = b""
        self._push(ids)

    async def write(self, tokens: AsyncGenerator[list[int], None]) -> None:
        """Takes the tokens to their end, and sends what may be sent before it.

        Raises:
            Refusal: before anything was sent.
        """
        if not self._call.stream:
            self._pending = await self._collect(tokens)
            return
        try:
            await self._stream(tokens)
        except Refusal as refusal:
            if not self._is_begun:
                raise
            self._pending += event(error_body(refusal))
        except Exception:  # a bug: the client is told, the server logs it
            if self._is_begun:
                failure = Failure("the router failed on this request")
                self._pending += event(error_body(failure))
                await self.finish()
            raise

    async def finish(self) -> None:
        """Sends the end."""
        if self._call.stream:
            await self._send({"type": "http.response.body", "body": self._pending})
        else:
            await send_whole(self._send, self._pending)

    def _push(self, ids: list[int]) -> str:
        if self._is_keyed:
            return "".join([self._output.push((token,)) for token in ids])
        return self._output.push(ids)

    async def _collect(self, tokens: AsyncGenerator[list[int], None]) -> bytes:
        parts: list[str] = []
        ids: list[int] = []
        output = self._output
        async with aclosing(tokens):
            async for new in tokens:
                parts.append(self._push(new))
                ids.extend(new)
                if output.is_cut:
                    await enough(tokens)
                    break
        tail, reason = output.finish()
        parts.append(tail)
        return whole(self._call, self._name, self._stamp, "".join(parts), ids[: output.tokens], reason)

    async def _stream(self, tokens: AsyncGenerator[list[int], None]) -> None:
        """Sends events. Status and refusals are decided by the first tokens."""
        output, events, send = self._output, self._events, self._send
        most = self._call.generation.max_tokens
        async with aclosing(tokens):
            async for ids in tokens:
                if not self._is_begun:
                    await start_events(send)
                    self._is_begun = True
                seen = output.tokens
                text = self._push(ids)
                self._pending += events.chunk(text, ids[: output.tokens - seen], output.tokens)
                if output.is_cut:
                    await enough(tokens)
                    break
                # The last chunk waits for the engine's end, which is there already.
                if self._pending and output.reason is None and output.tokens < most:
                    await send({"type": "http.response.body", "body": self._pending, "more_body": True})
                    self._pending = b""
        if not self._is_begun:
            if not output.tokens:
                raise Failure("the pipeline ended the request without a token")
            await start_events(send)  # the client has all the tokens, and not their end
            self._is_begun = True
        text, reason = output.finish()
        self._pending += events.closing(text, output.tokens, reason)
