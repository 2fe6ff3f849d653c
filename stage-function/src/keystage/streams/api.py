"""Stream programs as a user writes them: messages, streams, modules, the program.

A program is a graph of modules joined by streams (NeuStream, section 3). A module takes a batch of messages,
computes with tensors, and says by each message's header where it goes next. One class serves the local run
(`streams.local`), the bundle and the worker. Nothing here imports torch before a module computes. All that a
user's handler imports is in this one module, hence its length.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from keystage.batching.profile import LatencyProfile
from keystage.streams import graph_checks
from keystage.streams.graph import MOST_STEPS, Graph, Join, ModuleSpec, StreamSpec
from keystage.streams.state import StateStore

if TYPE_CHECKING:
    import torch

Header: TypeAlias = dict[str, Any]
"""Field names to int, float, str, bool, or lists of those. `request` is the number of the request."""

Merge: TypeAlias = Literal["sum", "max", "concat"]
"""How a join makes one message of several."""

DEFAULT_KIND = "tensors"


class ProgramError(Exception):
    """A program, or a request, that does not do; the message names the thing, the bound and the value.

    Raised by `parse` for a bad request (400), by the runtime for a program that breaks its contract.
    """

    def __init__(self, reason: str, http_status: int = 400) -> None:
        super().__init__(reason)
        self.http_status = http_status


@dataclass(frozen=True, slots=True)
class Message:
    """What travels on a stream.

    Attributes:
        header: small plain values that route and describe; travels through the router.
        data: tensors by name; travel from worker to worker.
    """

    header: Header
    data: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def request(self) -> int:
        """Number of its request, set by the runtime.

        Raises:
            ProgramError: it has none: it was made anew where `next` was meant.
        """
        number = self.header.get("request")
        if not isinstance(number, int):
            raise ProgramError(
                f"a message without its request: header {sorted(self.header)}; make it with next()", 500
            )
        return number

    @property
    def refusal(self) -> str:
        """Why a module refused the request; empty where none did."""
        return str(self.header.get("refusal", ""))

    def next(self, data: Mapping[str, torch.Tensor], **fields: Any) -> Message:
        """The message that follows in the same request: other tensors, the header with these fields set."""
        return Message({**self.header, **fields}, dict(data))

    def refused(self, reason: str, http_status: int = 422) -> Message:
        """What `compute` gives for a message it cannot take: ends this request alone."""
        return self.next({}, refusal=reason, refusal_status=http_status)


@dataclass(frozen=True, slots=True)
class Stream:
    """A channel between modules.

    Attributes:
        name: unique in the program.
        kind: name of what its messages are (`latent`, `tokens`); producers and consumer must agree.
    """

    name: str
    kind: str = DEFAULT_KIND


class StreamModule(ABC):
    """A node of a program. Subclass it, say what `compute` does, and `scatter` if there are several outputs.

    One instance serves one device, from one thread. The constructor stores options and nothing large: it
    runs in every worker of the program, while `parameters` runs where the bundle is made and `load` in the
    worker of this module alone.

    Attributes:
        is_stateful: class attribute; whether it keeps state between the visits of a request. Only then
            `state` takes anything, and only then a request is bound to one replica of the module.
        inputs: streams it consumes, in order.
        outputs: streams it may send to.
        join: `any`: each message on its own; `all`: one of each input stream of the same request at a time.
        merge: how `gather` makes one message of those: by `sum` or `max` of tensors of one name, or `concat`
            along `merge_axis`; a tensor that only one of them has is kept as it is.
        merge_axis: see `merge`.
        state: what it keeps by request; evicted when the request cannot come back to it, or ends.
        device: where it computes; set by `load`.
        profile: service time over batch size where it is known.
        partial_slo_s: share of a request's SLO for one pass through the module; 0: none stated.
    """

    is_stateful: bool = False

    def __init__(
        self,
        inputs: Sequence[Stream],
        outputs: Sequence[Stream],
        *,
        join: Join = "any",
        merge: Merge = "sum",
        merge_axis: int = 0,
        partial_slo_s: float = 0.0,
        profile: LatencyProfile | None = None,
    ) -> None:
        self.inputs = tuple(inputs)
        self.outputs = tuple(outputs)
        self.join: Join = join
        self.merge: Merge = merge
        self.merge_axis = merge_axis
        self.partial_slo_s = partial_slo_s
        self.profile = profile
        self.state = StateStore(type(self).__name__, is_allowed=self.is_stateful)
        self.device: torch.device | str = "cpu"

    def gather(self, batches: Mapping[str, Sequence[Message]]) -> list[Message]:
        """Makes a batch of what came in.

        Args:
            batches: messages by input stream. With `join="all"` all streams have equally many and those at
                one place belong to one request.

        Returns:
            The batch: with `join="all"` one message a place, else all of them, stream by stream.
        """
        from keystage.streams.merging import merge_messages

        rows = [batches[stream.name] for stream in self.inputs if stream.name in batches]
        if self.join == "any" or len(self.inputs) == 1:
            return [message for row in rows for message in row]
        return [merge_messages(parts, self.merge, self.merge_axis) for parts in zip(*rows, strict=True)]

    @abstractmethod
    def compute(self, messages: list[Message]) -> list[Message]:
        """Computes a batch; torch's inference mode is on.

        Args:
            messages: of different requests; their tensors may lie on any device.

        Returns:
            One message for each, in the same order, made with `Message.next` or `Message.refused`. What a
            message becomes must not depend on its company beyond rounding. An exception ends all requests
            of the batch.
        """

    def scatter(self, message: Message) -> str | Sequence[str]:
        """Says where a computed message goes: the name of an output stream, or several (a fork), or none.

        Called for each message, with `message.data` as computed; decide by the header.
        """
        if len(self.outputs) != 1:
            raise ProgramError(
                f"{type(self).__name__} has {len(self.outputs)} outputs and no scatter()",
                500,
            )
        return self.outputs[0].name

    def visits_left(self, message: Message) -> int:
        """How often a message that is about to come will still pass this module, this visit included.

        Schedulers plan with it where requests have deadlines; 0: not known. Decide by the header.
        """
        del message
        return 0

    def parameters(self) -> dict[str, torch.Tensor]:
        """Its parameters as they are when the program is made: the content of its stage's file."""
        return {}

    def load(self, parameters: Mapping[str, torch.Tensor], device: torch.device | str = "cpu") -> None:
        """Makes it ready to compute; called once, before the first message.

        Args:
            parameters: by the names of `parameters()`.
            device: where it is to compute.
        """
        del parameters
        self.device = device


class NetModule(StreamModule):
    """A module around one `torch.nn.Module`: say what `build` makes, use `self.net` in `compute`.

    Parameters are the state_dict of the net.
    """

    net: torch.nn.Module

    @abstractmethod
    def build(self) -> torch.nn.Module:
        """Makes the net, with the parameters that the program starts from (seed what is random)."""

    def parameters(self) -> dict[str, torch.Tensor]:
        """See `StreamModule.parameters`."""
        return {name: tensor.detach().contiguous() for name, tensor in self.build().state_dict().items()}

    def load(self, parameters: Mapping[str, torch.Tensor], device: torch.device | str = "cpu") -> None:
        """See `StreamModule.load`.

        Raises:
            ProgramError: parameters that the net does not have, or lacks.
        """
        super().load(parameters, device)
        # Before the loading: parameters that a KeysManager put on a GPU are inference tensors.
        net = self.build().requires_grad_(requires_grad=False)
        try:
            net.load_state_dict(dict(parameters), assign=True)
        except RuntimeError as error:
            raise ProgramError(f"{type(self).__name__}: {error}", 500) from error
        self.net = net.to(device).eval()


class Program:
    """Modules joined by streams, and the way in and out.

    Args:
        name: pipeline name.
        modules: by name, in the order of their stages.
        entry: stream that requests come in on.
        exit: stream that answers leave on.
        parse: makes the first message of a request from its body and content type; it may raise
            `ProgramError`. The runtime sets `request`. It must be pure: a lost request is parsed again.
        render: makes the answer of the message on the exit: body and content type.
        most_steps: module executions after which a request is refused.
        partial_slos_s: partial SLOs by module, in the place of those the modules state.

    Raises:
        GraphError: the graph cannot work; names every fault.
        ProgramError: a module with several outputs says nowhere how it scatters; a partial SLO of no module,
            or one that is no time.
    """

    def __init__(
        self,
        name: str,
        modules: Mapping[str, StreamModule],
        entry: Stream,
        exit: Stream,  # noqa: A002 - the word of the field
        parse: Callable[[bytes, str], Message],
        render: Callable[[Message], tuple[bytes, str]],
        most_steps: int = MOST_STEPS,
        partial_slos_s: Mapping[str, float] | None = None,
    ) -> None:
        self.name = name
        self.modules = dict(modules)
        self.entry = entry
        self.exit = exit
        self.parse = parse
        self.render = render
        for module_name, share_s in (partial_slos_s or {}).items():
            if module_name not in self.modules or not 0 <= share_s < math.inf:
                raise ProgramError(
                    f"partial SLO of {module_name!r} is {share_s}: "
                    f"seconds of one of {', '.join(self.modules)} are wanted"
                )
            self.modules[module_name].partial_slo_s = float(share_s)
        self.graph = Graph(
            entry=_spec(entry),
            exit=_spec(exit),
            modules=tuple(_module_spec(name, module) for name, module in self.modules.items()),
            most_steps=most_steps,
        )
        graph_checks.check(self.graph)
        for module_name, module in self.modules.items():
            if len(module.outputs) > 1 and type(module).scatter is StreamModule.scatter:
                outputs = ", ".join(stream.name for stream in module.outputs)
                raise ProgramError(f"module {module_name} has outputs {outputs} and no scatter()", 422)


def scattered(module: StreamModule, message: Message) -> list[str]:
    """The streams that `scatter` names, as a list."""
    names = module.scatter(message)
    return [names] if isinstance(names, str) else list(names)


def _spec(stream: Stream) -> StreamSpec:
    return StreamSpec(stream.name, stream.kind)


def _module_spec(name: str, module: StreamModule) -> ModuleSpec:
    return ModuleSpec(
        name=name,
        inputs=tuple(map(_spec, module.inputs)),
        outputs=tuple(map(_spec, module.outputs)),
        join=module.join,
        is_stateful=module.is_stateful,
        partial_slo_s=module.partial_slo_s,
    )
