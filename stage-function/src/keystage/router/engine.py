"""The port between the router's HTTP face and its core.

The face (`router.face`, `router.openai`) parses, validates, tokenises and streams; the core
queues, binds, moves and retries. They meet here and nowhere else, so each is tested alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Protocol


class Refusal(Exception):
    """A request that is refused by name.

    Attributes:
        status: HTTP status code.
        code: short machine-readable reason (`queue_full`, `too_late`, ...).
        param: request field at fault, if one is.
        retry_after_s: seconds after which a retry makes sense (429).
    """

    status = 500
    code = "internal_error"

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.retry_after_s = retry_after_s


class InvalidRequest(Refusal):
    """The request can never be served as it is."""

    status = 400
    code = "invalid_request_error"


class QueueFull(Refusal):
    """Admission bound reached; comes with `retry_after_s`."""

    status = 429
    code = "queue_full"


class DeadlineUnreachable(Refusal):
    """The request would not be answered by its deadline; comes at once, with `retry_after_s`."""

    status = 429
    code = "deadline_unreachable"


class TooLate(Refusal):
    """The request's own deadline passed, also where no worker came in that time."""

    status = 504
    code = "deadline_exceeded"


class Failure(Refusal):
    """The pipeline failed on this request (named by the worker)."""

    status = 500
    code = "stage_failed"


_PROGRAM_CODES = {413: "body_too_large", 415: "unsupported_media_type"}
"""As where the router itself refuses so."""


class ProgramRefusal(Failure):
    """A stream program, or one of its modules, refused the request (the client's status), or failed on it."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status if 400 <= status < 600 else 500
        named = _PROGRAM_CODES.get(self.status, InvalidRequest.code)
        self.code = named if self.status < 500 else Failure.code


class Enough(Exception):
    """Thrown into the tokens of a request by who has all of the answer that it wants (a stop string)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """What the pipeline admits.

    Attributes:
        looping: False for single-pass pipelines (only `run` works).
        context_length: prompt + max_tokens may not exceed it (tokens).
        vocab_size: token ids are below it.
        max_body_bytes: largest request body taken.
    """

    looping: bool
    context_length: int
    vocab_size: int
    max_body_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class Caller:
    """Who asks.

    Attributes:
        tenant: whose share of the pipeline a request counts on, empty for those without an API key.
        priority: the higher ones go first; 0 is ordinary.
    """

    tenant: str = ""
    priority: int = 0


NOBODY = Caller()
"""Who asks where nobody has to say."""


@dataclasses.dataclass(frozen=True, slots=True)
class Generation:
    """One generation request, validated and tokenised.

    Attributes:
        prompt: token ids, at least one.
        max_tokens: new tokens at most, at least 1.
        temperature: 0 is greedy.
        top_p: nucleus mass in (0, 1].
        seed: 64-bit unsigned seed (drawn by the face if the client gave none).
        eos: token ids that end it.
        deadline_s: seconds from now within which it must finish, None for the pipeline's default.
        input: what the first stage works on beside the prompt (samples of sound), kept for replay.
        whole: tokens at the front of the prompt that the first stage takes in one row of their own.
        resumed: new tokens that a former router made of this request; they count, and are not yielded again.
        tenant: whose share of the pipeline it counts on, empty for those without an API key.
        priority: the higher ones go first; 0 is ordinary.
    """

    prompt: Sequence[int]
    max_tokens: int
    temperature: float
    top_p: float
    seed: int
    eos: Sequence[int]
    deadline_s: float | None = None
    input: bytes = b""
    whole: int = 0
    resumed: Sequence[int] = ()
    tenant: str = ""
    priority: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes that it keeps while it waits."""
        return 4 * (len(self.prompt) + len(self.resumed)) + len(self.input)


async def enough(tokens: AsyncGenerator[list[int], None]) -> None:
    """Ends a session whose client has all that it wants; see `Engine.generate`."""
    with contextlib.suppress(Enough, StopAsyncIteration):
        await tokens.athrow(Enough())


class Engine(Protocol):
    """What the face needs of the core."""

    @property
    def limits(self) -> Limits:
        """What the pipeline admits."""

    def generate(self, request: Generation) -> AsyncIterator[list[int]]:
        """Yields new token ids in order, several at once where several are there.

        The end token, if one is produced, is yielded too and is the last. Closing the iterator
        (`aclose`) cancels the session at every stage; throwing `Enough` into it (`enough`) ends it there
        too, and counts as an answer.

        Raises:
            Refusal: on first iteration when not admitted, later when it fails or is too late.
        """

    async def run(
        self,
        payload: bytes,
        deadline_s: float | None = None,
        dtype: str = "uint8",
        shape: tuple[int, ...] | None = None,
        caller: Caller = NOBODY,
    ) -> bytes:
        """Sends one item through a single-pass pipeline and returns the last stage's bytes.

        Args:
            payload: the item's bytes.
            deadline_s: seconds from now within which it must be answered, None for the default.
            dtype: element type of the payload.
            shape: its shape, None: bytes in a row.
            caller: who asks.

        Raises:
            Refusal: as for `generate`.
        """

    async def call(
        self, body: bytes, content_type: str, deadline_s: float | None = None, caller: Caller = NOBODY
    ) -> tuple[bytes, str]:
        """Sends a request through a stream program; returns the answer and its content type.

        Args:
            body: the request's body.
            content_type: of the body, empty where the client said none.
            deadline_s: as for `run`.
            caller: who asks.

        Raises:
            Refusal: as for `generate`.
        """
