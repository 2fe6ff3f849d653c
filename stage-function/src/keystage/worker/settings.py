"""What the parts of a worker share: its settings, its status, the use of its stages.

No logic but counting: `config` fills the settings from the environment, `engine` writes the status,
`http` reads it.
"""

from __future__ import annotations

import dataclasses
import queue
import time
from concurrent.futures import Future

from keystage.worker.states import WorkerState


@dataclasses.dataclass(slots=True)
class StageUse:
    """Cumulative use of one hosted stage: seconds of compute, batches, rows, tokens (items count one each).

    `wave_wait_s` is the time from a wave's arrival to its turn (looping, of the first stage run here);
    `first_at_s` is when its first batch or wave was computed (`time.monotonic`), 0 before.
    """

    busy_s: float = 0.0
    batches: int = 0
    rows: int = 0
    tokens: int = 0
    first_at_s: float = 0.0
    wave_wait_s: float = 0.0

    def add(self, seconds: float, rows: int, tokens: int = 0) -> None:
        """Counts one batch or wave, just computed."""
        if not self.batches:
            self.first_at_s = time.monotonic()
        self.busy_s += seconds
        self.batches += 1
        self.rows += rows
        self.tokens += tokens or rows


@dataclasses.dataclass(slots=True)
class Status:
    """What the HTTP thread may read, and how it asks for a drain, a `single` call or other threads.

    `threads` is what the executor computes with, 0 its own choice; the engine makes it `threads_wanted`
    (0: nobody asked) between two batches. `start` holds when a phase of the start was reached. `reserved`
    counts KV positions in blocks that are taken, `preemptions` those on paths that this worker owns,
    `corrupt` tensors that came otherwise than they were sent.
    """

    state: WorkerState = WorkerState.LOADING
    beat_s: float = 0.0
    reason: str = ""
    drain: bool = False
    held: int = 0
    reserved: int = 0
    kv_blocks: int = 0
    kv_blocks_used: int = 0
    preemptions: int = 0
    corrupt: int = 0
    use: dict[int, StageUse] = dataclasses.field(default_factory=dict)
    threads: int = 0
    threads_wanted: int = 0
    start: dict[str, float] = dataclasses.field(default_factory=dict)
    calls: queue.Queue[tuple[bytes, Future[bytes]]] = dataclasses.field(
        default_factory=lambda: queue.Queue(maxsize=64)
    )


@dataclasses.dataclass(frozen=True, slots=True)
class EngineSettings:
    """What the engine needs to know about itself.

    Attributes:
        replica: unique name.
        stages: hosted stages, ascending.
        routers: inbox addresses of the routers to serve.
        bundle: identity of the parameters.
        device: device name for `Hello`.
        slots: sessions or items in flight.
        kv_tokens: KV positions, 0 for single-pass.
        max_batch: rows of a wave or batch.
        wave_tokens: token budget of a wave.
        drain_s: longest drain.
        node: host identity.
        pid: process id.
        is_copying: whether sessions move with their KV state where that can be.
    """

    replica: str
    stages: tuple[int, ...]
    routers: tuple[str, ...]
    bundle: str
    device: str
    slots: int
    kv_tokens: int
    max_batch: int
    wave_tokens: int
    drain_s: float
    node: str
    pid: int
    is_copying: bool = True
