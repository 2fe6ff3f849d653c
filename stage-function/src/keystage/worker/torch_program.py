"""Executes modules of a stream program with torch: bytes of messages in, bytes of messages out.

Chosen by `worker.app` where the pipeline is a stream program. The program's code is built in or the user's
own (`streams.handler`); its parameters come as any stage's do, from a `Supply` or the bundle. Whatever user
code raises becomes a fault of the requests concerned; it never ends the worker's loop.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from keystage.bundle.api import Pipeline
from keystage.bundle.errors import BundleError
from keystage.models.loading import build_stage, read_stage
from keystage.models.program import ModuleParameters
from keystage.streams.api import Message, Program, ProgramError, StreamModule
from keystage.streams.graph import Routes
from keystage.streams.handler import open_allowed
from keystage.streams.running import Outcome, Parts, check_header, run_batch
from keystage.wire.api import Fault
from keystage.wire.program import FaultKind
from keystage.worker import device_health
from keystage.worker.executor import Activation, StageError
from keystage.worker.messages import pack, unpack
from keystage.worker.sessionless import Sessionless
from keystage.worker.supply import Supply
from keystage.worker.torch_executor import use_device
from keystage.worker.turns import Ended, Packed, fault_of

log = logging.getLogger(__name__)

MOST_VISITS = 1 << 31
"""A hint beyond that says nothing, and may not fit a message."""


class TorchProgram(Sessionless):
    """Loads the hosted modules onto a device; an `Executor` and a `TurnExecutor`.

    Args:
        bundle: bundle folder.
        pipeline: its description.
        stages: hosted modules.
        device: torch device name.
        threads: intra-op threads, 0 leaves torch's choice.
        supply: what is in memory already, None: nothing.
        handler: folder of the user's code, empty for none.

    Raises:
        ProgramError, GraphError: there is no such program, or it is another one than the bundle's.
        BundleError: see `loading.read_stage`.
    """

    def __init__(
        self,
        bundle: Path,
        pipeline: Pipeline,
        stages: Sequence[int],
        device: str,
        threads: int,
        supply: Supply | None = None,
        handler: str = "",
    ) -> None:
        super().__init__(f"{pipeline.name} is a stream program")
        if threads:
            torch.set_num_threads(threads)
        self._device = torch.device(device)
        use_device(self._device)
        self._name = pipeline.name
        self._program = _opened(pipeline, handler)
        self._names = list(self._program.modules)
        self._routes = Routes(self._program.graph)
        self._modules: dict[int, StreamModule] = {}
        for index in stages:
            module = self._program.modules[self._names[index]]
            module.load(_parameters(bundle, pipeline, index, device, supply), device)
            self._modules[index] = module
        if supply is not None and torch.device(device).type != "cpu":
            supply.release()  # the device has its own copy

    # ------------------------------------------------------------ TurnExecutor

    def run(self, stage: int, sessions: Sequence[int], inputs: Sequence[Sequence[Packed]]) -> list[Ended]:
        """See `TurnExecutor.run`."""
        ended: list[Ended | None] = [None] * len(inputs)
        batch: list[Parts] = []
        places: list[int] = []
        with torch.inference_mode():
            for place, (session, packed) in enumerate(zip(sessions, inputs, strict=True)):
                parts = self._taken(session, packed)
                if isinstance(parts, Fault):
                    ended[place] = Ended((), parts)
                else:
                    batch.append(parts)
                    places.append(place)
            for place, end in zip(places, self._executed(stage, batch), strict=True):
                ended[place] = end
        keeping = set(self._modules[stage].state.requests)
        return [
            Ended(end.outputs, end.fault, session in keeping)
            for session, end in zip(sessions, ended, strict=True)
            if end is not None
        ]

    def evict(self, session: int, stage: int) -> None:
        """See `TurnExecutor.evict`."""
        for index, module in self._modules.items():
            if stage in (-1, index):
                try:
                    module.state.evict(session)
                # A value's own close(): the state is gone all the same.
                except Exception:
                    log.exception("state of request %d in module %s", session, self._names[index])

    @property
    def kept(self) -> int:
        """See `TurnExecutor.kept`."""
        return len({request for module in self._modules.values() for request in module.state.requests})

    def _taken(self, session: int, packed: Sequence[Packed]) -> Parts | Fault:
        """The messages of a turn; a request's body is parsed here."""
        try:
            return [(message.stream, self._message(session, message)) for message in packed]
        except ProgramError as error:
            return fault_of("request", _words(error), error.http_status)
        # The user's own parser, for this request alone.
        except (Exception, SystemExit) as error:  # noqa: BLE001
            return fault_of("request", f"parse: {_words(error)}", 400)

    def _message(self, session: int, packed: Packed) -> Message:
        if packed.meta:
            return unpack(packed.meta, packed.data)
        parsed = self._program.parse(packed.body, packed.content_type)
        message = parsed.next(parsed.data, request=session)
        check_header("parse", message)
        return message

    def _executed(self, stage: int, batch: Sequence[Parts]) -> list[Ended]:
        if not batch:
            return []
        name = self._names[stage]
        try:
            outcomes = run_batch(name, self._modules[stage], batch)
            packed = pack(name, [self._travelling(outcome) for outcome in outcomes])
        except torch.OutOfMemoryError as error:
            # The same batch would not fit the next time either; each alone may.
            kind: FaultKind = "company" if len(batch) > 1 else "retry"
            reason = f"module {name}, {len(batch)} messages: out of device memory: {error}"
            return [Ended((), fault_of(kind, reason))] * len(batch)
        # The user's own code: nobody knows which of the batch it was about.
        except (Exception, SystemExit) as error:  # noqa: BLE001
            words, is_known = _words(error), isinstance(error, ProgramError)
            device_health.room(self._device, f"module {name}, {len(batch)} messages", error)
            log.warning("module %s failed on a batch of %d: %s", name, len(batch), words)
            status = error.http_status if isinstance(error, ProgramError) else 500
            fault = fault_of("company", words if is_known else f"module {name}: {words}", status)
            return [Ended((), fault)] * len(batch)
        return [self._ended(outcome, entry) for outcome, entry in zip(outcomes, packed, strict=True)]

    def _travelling(self, outcome: Outcome) -> Message:
        """What other modules get of an outcome: nothing of one that was refused, or that is an answer."""
        if outcome.refusal or not set(outcome.streams) - {self._program.exit.name}:
            return Message({}, {})
        return outcome.message

    def _ended(self, outcome: Outcome, packed: tuple[bytes, memoryview | None] | ProgramError) -> Ended:
        if outcome.refusal:
            return Ended((), fault_of("request", outcome.refusal, outcome.http_status))
        if isinstance(packed, ProgramError):
            return Ended((), fault_of("request", str(packed), packed.http_status))
        meta, data = packed
        outputs = []
        for stream in outcome.streams:
            if stream != self._program.exit.name:
                outputs.append(Packed(stream, meta, data, visits=self._visits(stream, outcome.message)))
                continue
            try:
                body, content_type = self._program.render(outcome.message)
                kind = str(content_type).encode("latin-1", "replace").decode("latin-1")
                outputs.append(Packed(stream, body=bytes(body), content_type=kind))
            # The user's own code, for this request alone.
            except (Exception, SystemExit) as error:  # noqa: BLE001
                status = error.http_status if isinstance(error, ProgramError) else 500
                return Ended((), fault_of("request", f"render: {_words(error)}", status))
        return Ended(outputs)

    def _visits(self, stream: str, message: Message) -> int:
        """What the stream's consumer says of the message's visits to come."""
        consumer = self._program.modules[self._routes.consumer(stream)]
        try:
            return min(MOST_VISITS, max(0, int(consumer.visits_left(message))))
        # The user's own code, asked for a hint.
        except (Exception, SystemExit) as error:  # noqa: BLE001
            log.warning("visits_left of %s: %s", type(consumer).__name__, _words(error))
            return 0

    # ------------------------------------------------------------ Executor

    def batch(self, first: int, last: int, inputs: Sequence[Activation]) -> list[Activation]:
        """Takes no items."""
        raise StageError(f"stages {first}..{last} of {self._name} are modules of a stream program")

    def single(self, body: bytes) -> bytes:
        """A module alone has no HTTP call: what it takes are messages of a request."""
        raise StageError(f"{self._name} is a stream program: POST its router")

    def set_threads(self, threads: int) -> None:
        """Intra-op threads of this thread's operators."""
        torch.set_num_threads(threads)

    def first_forward(self) -> None:
        """What a module takes only its program knows: nothing is rehearsed."""

    def warm_up(self) -> None:
        """What a module takes only its program knows: nothing is rehearsed."""


def _words(error: BaseException) -> str:
    """What an exception of user code says; its own words may fail too."""
    name = type(error).__name__
    try:
        return str(error) if isinstance(error, ProgramError) else f"{name}: {error}"
    # The user's own class.
    except Exception:  # noqa: BLE001
        return name


def _opened(pipeline: Pipeline, handler: str) -> Program:
    assert pipeline.program is not None
    program = open_allowed(pipeline.program.path, pipeline.program.options, handler or None)
    if program.graph != pipeline.graph:
        raise ProgramError(
            f"{pipeline.program.path} has another graph than the bundle of {pipeline.name}: make it anew", 422
        )
    return program


def _parameters(
    bundle: Path, pipeline: Pipeline, index: int, device: str, supply: Supply | None
) -> Mapping[str, torch.Tensor]:
    if not pipeline.stages[index].parameters:
        return {}
    stage = supply.stage(pipeline, index, device, pipeline.dtype) if supply is not None else None
    if stage is None:
        stage = build_stage(pipeline, index, read_stage(bundle, pipeline, index), device)
    if not isinstance(stage, ModuleParameters):
        raise BundleError(f"stage {index} of {pipeline.name} is of family {pipeline.family}, no module")
    return stage.tensors
