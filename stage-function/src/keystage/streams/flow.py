"""One request's way through a graph: what is ready, what it left behind, how it ends. Pure.

The same code in the local run and in the router: whoever carries messages tells a `RequestFlow` where a
module put them and does what the `Step` says. Items are opaque here: a message, or where one lies.

Rules. A request is over when nothing of it moves any more; then exactly one message must have come to the
exit. A second one ends the request at once, refused. A join waits for one message of each of its input
streams, first come first taken on each; one that still waits when nothing moves has lost a branch, and the
request is refused by its name. State goes from a module as soon as nothing of the request is at a module
from which a message could come to it again.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from keystage.streams.graph import Routes

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class Work(Generic[T]):
    """One execution of a module for one request; compared by identity.

    Attributes:
        module: which.
        parts: stream and item, in the order of the module's inputs; one, or one per input of a join.
    """

    module: str
    parts: tuple[tuple[str, T], ...]


@dataclass(slots=True)
class Step(Generic[T]):
    """What follows from an event.

    Attributes:
        ready: work that can be queued at its module now.
        evict: stateful modules whose state of this request goes.
        dropped: items that have lost their way: each counts once for every stream it was put on, so that a
            forked item may be named again, or still be on its way elsewhere.
        answer: the item that came to the exit, in the step that ends the request; None where it is refused.
        is_over: whether the request is over, answered or not; nothing follows.
        refusal: why it is over without an answer; empty otherwise.
    """

    ready: list[Work[T]] = field(default_factory=list)
    evict: list[str] = field(default_factory=list)
    dropped: list[T] = field(default_factory=list)
    answer: T | None = None
    is_over: bool = False
    refusal: str = ""


class RequestFlow(Generic[T]):
    """The state of one request: events in, steps out."""

    def __init__(self, routes: Routes) -> None:
        self._routes = routes
        self._moving: dict[int, Work[T]] = {}
        self._parked: dict[str, dict[str, deque[T]]] = {}
        self._touched: dict[str, None] = {}
        self._answer: T | None = None
        self._steps = 0
        self._executed: Counter[str] = Counter()
        self._is_over = False

    @property
    def moving(self) -> list[Work[T]]:
        """Work that was handed out and is not done."""
        return list(self._moving.values())

    @property
    def parked(self) -> list[T]:
        """Items that wait at joins."""
        return [item for streams in self._parked.values() for queue in streams.values() for item in queue]

    @property
    def executed(self) -> Counter[str]:
        """How often each module has been done with this request."""
        return self._executed

    @property
    def is_over(self) -> bool:
        """Whether it is over."""
        return self._is_over

    def enter(self, item: T) -> Step[T]:
        """The request comes in; called once."""
        step: Step[T] = Step()
        self._put(self._routes.graph.entry.name, item, step)
        return self._settled(step)

    def done(self, work: Work[T], outputs: Sequence[tuple[str, T]]) -> Step[T]:
        """A module has been executed.

        Args:
            work: as it was handed out; unknown to a request that is over: its outputs are dropped.
            outputs: where `scatter` sent the result: stream and item, none or several.
        """
        step: Step[T] = Step()
        if self._moving.pop(id(work), None) is None:
            step.dropped.extend(item for _, item in outputs)
            return step
        self._executed[work.module] += 1
        self._steps += 1
        for place, (stream, item) in enumerate(outputs):
            if not self._routes.has_output(work.module, stream):
                step.dropped.extend(item for _, item in outputs[place:])
                names = ", ".join(s.name for s in self._routes.modules[work.module].outputs)
                self._end(step, f"module {work.module} scattered to stream {stream!r}, it has {names}")
                return step
            if not self._routes.is_exit(stream):
                self._put(stream, item, step)
            elif self._answer is None:
                self._answer = item
            else:
                step.dropped.extend(item for _, item in outputs[place:])
                self._end(
                    step, f"a second message came to the exit, stream {stream}: join the branches before it"
                )
                return step
        if self._moving and self._steps >= self._routes.graph.most_steps:
            self._end(step, f"not answered after {self._steps} module executions, the bound of this program")
            return step
        self._evict(step)
        return self._settled(step)

    def end(self, refusal: str) -> Step[T]:
        """The request is cancelled, late, or failed in a module; harmless when it is over."""
        step: Step[T] = Step()
        if not self._is_over:
            self._end(step, refusal)
        return step

    def _put(self, stream: str, item: T, step: Step[T]) -> None:
        module = self._routes.modules[self._routes.consumer(stream)]
        if module.join == "any" or len(module.inputs) == 1:
            self._hand(Work(module.name, ((stream, item),)), step)
            return
        waiting = self._parked.setdefault(module.name, {s.name: deque() for s in module.inputs})
        waiting[stream].append(item)
        if all(waiting.values()):
            parts = tuple((name, queue.popleft()) for name, queue in waiting.items())
            if not any(waiting.values()):
                del self._parked[module.name]
            self._hand(Work(module.name, parts), step)

    def _hand(self, work: Work[T], step: Step[T]) -> None:
        self._moving[id(work)] = work
        if self._routes.modules[work.module].is_stateful:
            self._touched[work.module] = None
        step.ready.append(work)

    def _evict(self, step: Step[T]) -> None:
        """State goes where nothing of the request can come any more."""
        occupied = {work.module for work in self._moving.values()} | self._parked.keys()
        for name in [name for name in self._touched if not occupied & self._routes.upstream(name)]:
            del self._touched[name]
            step.evict.append(name)

    def _settled(self, step: Step[T]) -> Step[T]:
        """Ends a request of which nothing moves."""
        if self._moving:
            return step
        lost = [
            f"module {module} waits for a message of stream {stream}"
            for module, streams in self._parked.items()
            for stream, queue in streams.items()
            if not queue
        ]
        if lost:
            self._end(step, f"a branch was lost: {lost[0]}, and nothing of the request moves any more")
        elif self._answer is None:
            self._end(step, "its last message was scattered to no stream")
        else:
            step.answer, self._answer = self._answer, None
            self._end(step, "")
        return step

    def _end(self, step: Step[T], refusal: str) -> None:
        self._is_over = True
        step.is_over = True
        step.refusal = refusal
        step.dropped.extend(item for work in step.ready for _, item in work.parts)
        fresh = {id(work) for work in step.ready}
        step.dropped.extend(
            item for key, work in self._moving.items() if key not in fresh for _, item in work.parts
        )
        step.dropped.extend(self.parked)
        if self._answer is not None:
            step.dropped.append(self._answer)
            self._answer = None
        step.ready.clear()
        step.evict.extend(self._touched)
        self._moving.clear()
        self._parked.clear()
        self._touched.clear()
