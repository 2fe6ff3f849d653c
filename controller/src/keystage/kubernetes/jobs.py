"""Work that waits for others: done in threads, its outcome taken by the one thread that owns the state.

Before it: `reconciler` submits work under a key. After it: `collect` hands outcomes back in the reconciler's
thread. One job that hangs holds up no other; one key has one job at a time. It must not know what work is.
"""

from __future__ import annotations

import dataclasses
import queue
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Generic, TypeVar

from keystage.kubernetes.errors import ClusterError

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True)
class _Outcome(Generic[T]):
    key: str
    future: Future[T]
    done: Callable[[T | ClusterError], None]


class Jobs:
    """Running work.

    Args:
        workers: most jobs at a time; others wait.
        name: of the threads.
        wake: called when a job has ended.
    """

    def __init__(self, workers: int, name: str, wake: Callable[[], None]) -> None:
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix=name)
        self._wake = wake
        self._busy: set[str] = set()
        self._running: set[Future[Any]] = set()
        self._ended: queue.SimpleQueue[_Outcome[Any]] = queue.SimpleQueue()

    def is_busy(self, key: str) -> bool:
        """Whether there is a job of this key whose outcome was not collected."""
        return key in self._busy

    def busy(self) -> frozenset[str]:
        """Keys of all such jobs."""
        return frozenset(self._busy)

    def submit(self, key: str, work: Callable[[], T], done: Callable[[T | ClusterError], None]) -> None:
        """Begins a job.

        Args:
            key: what it is about; must not be busy.
            work: runs in a thread; `ClusterError` is an outcome, anything else a bug that `collect` raises.
            done: takes the outcome in the thread that calls `collect`.
        """
        assert key not in self._busy, key
        self._busy.add(key)
        future = self._pool.submit(work)
        self._running.add(future)
        future.add_done_callback(lambda ended: self._end(_Outcome(key, ended, done)))

    def collect(self) -> None:
        """Hands out what has ended."""
        while True:
            try:
                outcome = self._ended.get_nowait()
            except queue.Empty:
                return
            self._busy.discard(outcome.key)
            if outcome.future.cancelled():
                continue
            error = outcome.future.exception()
            if error is None:
                outcome.done(outcome.future.result())
            elif isinstance(error, ClusterError):
                outcome.done(error)
            else:
                raise error

    def stop(self, wait_s: float = 0.0) -> None:
        """Takes no more; what runs ends by its own bounds, and is waited for so long (seconds)."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        wait(set(self._running), wait_s)

    def _end(self, outcome: _Outcome[Any]) -> None:
        self._running.discard(outcome.future)
        self._ended.put(outcome)
        self._wake()
