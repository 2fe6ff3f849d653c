"""Asks a changing set of pods the same question over and over, and keeps the newest answers.

Before it: pods by name and address. After it: who needs answers reads them without waiting. One thread goes
round; those asked in one round are asked in parallel, each with its own bound, so that one that hangs holds
up a round and no reader. It must not interpret answers.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

from keystage.kubernetes.asking import NotAnswered

MAX_PARALLEL = 16
T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True)
class Heard(Generic[T]):
    """What one pod answered.

    Attributes:
        at_s: Unix seconds when the question was sent.
        answer: the newest answer, None: there was none yet.
        answered_at_s: when that one was asked for.
        failed_since_s: since when there is none, 0: it answers.
        reason: why not.
    """

    at_s: float
    answer: T | None
    answered_at_s: float
    failed_since_s: float = 0.0
    reason: str = ""

    @property
    def is_current(self) -> bool:
        """Whether the last question was answered."""
        return self.answer is not None and not self.failed_since_s


class Polled(Generic[T]):
    """The thread.

    Args:
        name: of the thread.
        targets: says whom to ask: any key, and where.
        ask: asks one by key and address; raises `NotAnswered`.
        every_s: seconds from round to round.
        now_s: clock in Unix seconds.
    """

    def __init__(
        self,
        name: str,
        targets: Callable[[], Mapping[str, str]],
        ask: Callable[[str, str], T],
        *,
        every_s: float,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        self._targets = targets
        self._ask = ask
        self._every_s = every_s
        self._now_s = now_s
        self._heard: Mapping[str, Heard[T]] = {}
        self._stop = threading.Event()
        self._woken = threading.Event()
        self._pool = ThreadPoolExecutor(MAX_PARALLEL, thread_name_prefix=name)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begins to ask."""
        self._thread.start()

    def stop(self) -> None:
        """Ends; what was heard stays."""
        self._stop.set()
        self._woken.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def wake(self) -> None:
        """Begins the next round now."""
        self._woken.set()

    def heard(self) -> Mapping[str, Heard[T]]:
        """The newest of everybody who was asked in the last round."""
        return self._heard

    def round(self) -> None:
        """Asks everybody once and waits for them."""
        targets = self._targets()
        names = list(targets)
        answers = self._pool.map(self._one, names, [targets[name] for name in names])
        self._heard = dict(zip(names, answers, strict=True))

    def _run(self) -> None:
        while not self._stop.is_set():
            began_s = time.monotonic()
            self._woken.clear()
            self.round()
            self._woken.wait(max(0.0, began_s + self._every_s - time.monotonic()))

    def _one(self, name: str, address: str) -> Heard[T]:
        before = self._heard.get(name)
        at_s = self._now_s()
        try:
            return Heard(at_s, self._ask(name, address), at_s)
        except NotAnswered as error:
            since_s = before.failed_since_s if before is not None else 0.0
            return Heard(
                at_s,
                before.answer if before is not None else None,
                before.answered_at_s if before is not None else 0.0,
                since_s or at_s,
                str(error),
            )
