"""What a worker may find in its memory when it begins, because it was forked from there.

`keystage.keysmanager` implements `Supply` and calls `worker.app.main(supply)` in a forked child or a
filled standby; a worker that was started as a program has none and reads its bundle. The worker
must not know how parameters came to be there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol

from keystage.bundle.api import Pipeline

if TYPE_CHECKING:
    from keystage.models.base import AnyStage
    from keystage.worker.http import WorkerHttp
    from keystage.worker.settings import Status

Phase = Literal["mapped", "listening", "forward", "ready"]


class Supply(Protocol):
    """Stages that are in memory already, and somebody who wants to know how far the start is."""

    def stage(self, pipeline: Pipeline, index: int, device: str, dtype: str) -> AnyStage | None:
        """A stage ready to run, or None: it must be loaded from the bundle.

        Args:
            pipeline: as the worker has read it; another identity than the supply's gives None.
            index: the stage.
            device: full torch name (`cpu`, `cuda:0`).
            dtype: `float32`, `bfloat16`, `float16`.
        """

    def report(self, phase: Phase, note: str = "") -> None:
        """Tells that a phase of the start is reached; never raises, never blocks."""

    def release(self) -> None:
        """The host copy is no longer mapped by this process (parameters are on the device)."""


class Front(Protocol):
    """A process that answers HTTP already and lends its port to the worker that it becomes."""

    def show(self, face: WorkerHttp, status: Status) -> None:
        """The worker's face answers from now on; `status` tells how far it is, and why it failed."""

    def failed(self, reason: str) -> None:
        """There will be no worker."""
