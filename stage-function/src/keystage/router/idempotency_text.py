"""The tokens of a keyed request: made once, behind what is there, cut where a stop string ends them.

Between `router.idempotency_runs`, whose `Work` this is, and the engine. The record gets the tokens that
count and no others, so that whoever writes an answer from it writes the same.
"""

from __future__ import annotations

import dataclasses
from contextlib import aclosing
from typing import TYPE_CHECKING, cast

from keystage.router.engine import Engine, Failure, enough
from keystage.router.idempotency import Record, Whole
from keystage.router.idempotency_http import seconds_left
from keystage.router.idempotency_runs import Emit
from keystage.router.openai import Call
from keystage.router.openai_errors import AnswerLost, JournalAway
from keystage.router.text import TextCodec
from keystage.router.text_output import TextOutput

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator


class Making:
    """Makes the tokens of one request.

    Args:
        engine: generates.
        text: the pipeline's tokenizer.
        call: the request.
        position: tokens of its answer that the client says it has.
        has_journal: whether there is one; what is not in it then was made while it could not be asked.
    """

    def __init__(
        self, engine: Engine, text: TextCodec, call: Call, position: int, *, has_journal: bool
    ) -> None:
        self._engine = engine
        self._text = text
        self._call = call
        self._position = position
        self._has_journal = has_journal

    async def __call__(self, record: Record, emit: Emit) -> Whole | None:
        """See `idempotency_runs.Work`."""
        call = self._call
        self._check_known(record)
        made = record.tokens.tolist()
        stops = None
        if call.stops:
            stops = TextOutput(self._text.decoder(call.generation.prompt), call.stops, call.generation.eos)
            stops.push(made)
        if (stops is not None and stops.is_cut) or self._is_complete(made):
            return None
        left_s = None if record.deadline_unix_s is None else seconds_left(record.deadline_unix_s)
        request = dataclasses.replace(
            call.generation, seed=record.stamp.seed, resumed=made, deadline_s=left_s
        )
        # The port promises `aclose`; its type says AsyncIterator so that engines may be classes.
        tokens = cast("AsyncGenerator[list[int], None]", self._engine.generate(request))
        async with aclosing(tokens):
            async for new in tokens:
                if stops is None:
                    emit(new)
                    continue
                seen = stops.tokens
                stops.push(new)
                emit(new[: stops.tokens - seen])
                if stops.is_cut:
                    await enough(tokens)
                    break
        if not record.tokens:
            raise Failure("the pipeline ended the request without a token")
        return None

    def _is_complete(self, made: list[int]) -> bool:
        generation = self._call.generation
        return len(made) >= generation.max_tokens or (bool(made) and made[-1] in generation.eos)

    def _check_known(self, record: Record) -> None:
        """Whether a client that has tokens of the answer can get the rest of the same one."""
        if not self._position or record.tokens or record.is_found:
            return
        if not self._call.is_repeatable:
            if self._has_journal and record.journaled is None:
                raise JournalAway(
                    f"the journal cannot be asked for the answer of which {self._position} tokens were sent",
                    param="Last-Event-ID",
                    retry_after_s=1.0,
                )
            raise AnswerLost(
                f"the answer of which {self._position} tokens were sent is not known here any more, and its "
                "seed was drawn: it cannot be made again; ask for a new one with a new Idempotency-Key",
                param="Last-Event-ID",
            )
        record.is_found = True
