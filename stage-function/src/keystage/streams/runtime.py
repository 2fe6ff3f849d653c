"""Requests in a program within one process, moved one module execution at a time.

The same pieces as a deployment, with nothing between them: `flow.RequestFlow` says what is ready,
`running.run_batch` executes it. Which module runs next, and with whom, is the caller's choice
(`streams.local` makes it for whole runs).
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from keystage.streams.api import Message, Program, ProgramError
from keystage.streams.flow import RequestFlow, Step, Work
from keystage.streams.graph import Routes
from keystage.streams.running import Outcome, check_header, run_batch

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Answer:
    """How a request ended.

    Attributes:
        request: its number.
        body: what `render` made; empty where it was refused.
        content_type: of the body.
        refusal: why there is no answer; empty otherwise.
        http_status: what a caller would see.
    """

    request: int
    body: bytes = b""
    content_type: str = ""
    refusal: str = ""
    http_status: int = 200


@dataclass(frozen=True, slots=True)
class TraceStep:
    """One execution of a module.

    Attributes:
        number: from 0.
        module: which.
        requests: of its batch, in order.
        streams: where each message went, comma between several; `!` before a refusal.
        evicted: modules and requests whose state went after it.
    """

    number: int
    module: str
    requests: tuple[int, ...]
    streams: tuple[str, ...]
    evicted: tuple[tuple[str, int], ...] = ()

    def __str__(self) -> str:
        ways = "  ".join(
            f"{request}>{stream or '-'}" for request, stream in zip(self.requests, self.streams, strict=True)
        )
        gone = ", ".join(f"{module}[{request}]" for module, request in self.evicted)
        return f"{self.number:4} {self.module}: {ways}" + (f"  (evicted {gone})" if gone else "")


@dataclass(slots=True)
class _Queued:
    request: int
    work: Work[Message]


@dataclass(slots=True)
class _Request:
    flow: RequestFlow[Message]
    answer: Answer | None = None


class LocalRuntime:
    """Requests in a program, moved one module execution at a time.

    Args:
        program: whose modules it loads.
        device: where they compute.
        parameters: of modules, by name; those that are left out take their own.
        is_strict: exceptions of the program's code are raised, not made into refusals.
    """

    def __init__(
        self,
        program: Program,
        device: torch.device | str = "cpu",
        parameters: Mapping[str, Mapping[str, torch.Tensor]] | None = None,
        *,
        is_strict: bool = False,
    ) -> None:
        self._program = program
        self._routes = Routes(program.graph)
        self._queues: dict[str, list[_Queued]] = {name: [] for name in program.modules}
        self._requests: list[_Request] = []
        self._is_strict = is_strict
        self.trace: list[TraceStep] = []
        for name, module in program.modules.items():
            given = (parameters or {}).get(name)
            module.load(module.parameters() if given is None else given, device)

    @property
    def waiting(self) -> dict[str, int]:
        """Works that wait at each module that has any, in the program's order."""
        return {name: len(queue) for name, queue in self._queues.items() if queue}

    @property
    def held(self) -> dict[str, int]:
        """Values of state that modules keep, where there are any."""
        sizes = {name: len(module.state) for name, module in self._program.modules.items()}
        return {name: size for name, size in sizes.items() if size}

    def answer(self, request: int) -> Answer | None:
        """How a request ended; None while it is on its way."""
        return self._requests[request].answer

    def executed(self, request: int) -> Counter[str]:
        """How often a request has passed each module."""
        return Counter(self._requests[request].flow.executed)

    def submit(self, body: bytes, content_type: str = "application/json") -> int:
        """A request comes in; one that cannot be parsed is refused at once.

        Returns:
            Its number.
        """
        number = len(self._requests)
        request = _Request(RequestFlow(self._routes))
        self._requests.append(request)
        try:
            parsed = self._program.parse(body, content_type)
            message = parsed.next(parsed.data, request=number)
            check_header("parse", message)
        # What a caller sent may break a program's parser in any way.
        except Exception as error:
            if self._is_strict and not isinstance(error, ProgramError):
                raise
            self._refuse(number, _reason("parse", error), _status(error))
            return number
        self._follow(number, request.flow.enter(message), [])
        return number

    def cancel(self, request: int) -> None:
        """The caller of a request has gone away."""
        flow = self._requests[request].flow
        if not flow.is_over:
            self._follow(request, flow.end("cancelled"), [], 499)

    def step(self, module: str, most: int = 0, choose: random.Random | None = None) -> TraceStep | None:
        """Executes a module once.

        Args:
            module: which.
            most: messages of its batch; 0: all that wait. Earlier requests go first.
            choose: takes a random batch of those that wait instead.

        Returns:
            What was done, None where nothing waits.
        """
        batch = self._taken(module, most, choose)
        if not batch:
            return None
        evictions: list[tuple[str, int]] = []
        streams: list[str] = []
        for queued, outcome in zip(batch, self._outcomes(module, batch), strict=True):
            streams.append(f"!{outcome.refusal}" if outcome.refusal else ",".join(outcome.streams))
            flow = self._requests[queued.request].flow
            if flow.is_over:
                continue
            if outcome.refusal:
                self._follow(queued.request, flow.end(outcome.refusal), evictions, outcome.http_status)
            else:
                outputs = [(stream, outcome.message) for stream in outcome.streams]
                self._follow(queued.request, flow.done(queued.work, outputs), evictions)
        requests = tuple(queued.request for queued in batch)
        self.trace.append(TraceStep(len(self.trace), module, requests, tuple(streams), tuple(evictions)))
        return self.trace[-1]

    def _taken(self, module: str, most: int, choose: random.Random | None) -> list[_Queued]:
        """A batch: at most one work of a request."""
        first: dict[int, _Queued] = {}
        for queued in self._queues[module]:
            first.setdefault(queued.request, queued)
        batch = sorted(first.values(), key=lambda queued: queued.request)
        if choose is not None and batch:
            batch = choose.sample(batch, choose.randint(1, min(most or len(batch), len(batch))))
        elif most:
            batch = batch[:most]
        taken = {id(queued) for queued in batch}
        self._queues[module] = [queued for queued in self._queues[module] if id(queued) not in taken]
        return batch

    def _outcomes(self, name: str, batch: Sequence[_Queued]) -> list[Outcome]:
        try:
            return run_batch(name, self._program.modules[name], [queued.work.parts for queued in batch])
        # The user's own code: it fails the requests of this batch, not the run.
        except Exception as error:
            if self._is_strict:
                raise
            reason = _reason(f"module {name}", error)
            return [Outcome(queued.work.parts[0][1], refusal=reason) for queued in batch]

    def _follow(
        self, number: int, step: Step[Message], evictions: list[tuple[str, int]], status: int = 500
    ) -> None:
        """Does what a step says."""
        for name in step.evict:
            self._program.modules[name].state.evict(number)
            evictions.append((name, number))
        if step.is_over:
            for name, queue in self._queues.items():
                self._queues[name] = [queued for queued in queue if queued.request != number]
            if step.answer is None:
                self._refuse(number, step.refusal, status)
            else:
                self._render(number, step.answer)
        for work in step.ready:
            self._queues[work.module].append(_Queued(number, work))

    def _render(self, number: int, message: Message) -> None:
        try:
            body, content_type = self._program.render(message)
        # The user's own code, for this request alone.
        except Exception as error:
            if self._is_strict:
                raise
            self._refuse(number, _reason("render", error), 500)
            return
        self._requests[number].answer = Answer(number, body, content_type)

    def _refuse(self, number: int, reason: str, status: int) -> None:
        self._requests[number].answer = Answer(number, refusal=reason, http_status=status)


def _reason(place: str, error: Exception) -> str:
    return str(error) if isinstance(error, ProgramError) else f"{place}: {type(error).__name__}: {error}"


def _status(error: Exception) -> int:
    return error.http_status if isinstance(error, ProgramError) else 400
