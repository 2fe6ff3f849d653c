"""The two programs of `keystage bench diffusion`, as a user's handler folder has them.

`stepwise` is a diffusion program of modules that sleep: a label, a denoiser that a request passes once a
step, a decoder. `whole` serves the requests of any such program request by request, as Clockwork does: a
batch is of requests with equal numbers of steps, and runs from its first step to its image. Both do the
same work, on emulated devices or (`inner`) with the real nets of a ready program.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from keystage.batching.profile import LatencyProfile
from keystage.streams.api import Message, Program, ProgramError, Stream, StreamModule
from keystage.streams.opening import open_program

if TYPE_CHECKING:
    import torch

LABEL, LATENT, DENOISED, IMAGE = Stream("label"), Stream("latent"), Stream("denoised"), Stream("image")
PICKED = "steps-{}"


class Sleeping(StreamModule):
    """Takes as long as a device would for the batch.

    Args:
        inputs: see `StreamModule`.
        outputs: see `StreamModule`.
        times_s: seconds of batches 1, 2, 3, ..; larger ones take the largest's time an item.
        visits: whether it is passed once a step.
    """

    def __init__(
        self,
        inputs: Sequence[Stream],
        outputs: Sequence[Stream],
        times_s: Sequence[float],
        *,
        visits: bool = False,
    ) -> None:
        super().__init__(inputs, outputs, profile=line(times_s) if any(times_s) else None)
        self.times_s = times_s
        self.is_passed_often = visits

    def seconds(self, batch: int) -> float:
        """Of a batch."""
        last = len(self.times_s)
        return self.times_s[batch - 1] if batch <= last else self.times_s[-1] * batch / last

    def compute(self, messages: list[Message]) -> list[Message]:
        """See `StreamModule.compute`."""
        time.sleep(self.seconds(len(messages)))
        step = 1 if self.is_passed_often else 0
        return [message.next({}, step=message.header["step"] + step) for message in messages]

    def scatter(self, message: Message) -> str:
        """See `StreamModule.scatter`."""
        if not self.is_passed_often:
            return self.outputs[0].name
        return DENOISED.name if message.header["step"] >= message.header["steps"] else LATENT.name

    def visits_left(self, message: Message) -> int:
        """See `StreamModule.visits_left`."""
        return message.header["steps"] - message.header["step"] if self.is_passed_often else 0


def line(times_s: Sequence[float]) -> LatencyProfile:
    """The least-squares line through the times of batches 1, 2, 3, .."""
    count = len(times_s)
    mean_b, mean_s = (count + 1) / 2, sum(times_s) / count
    spread = sum((b - mean_b) ** 2 for b in range(1, count + 1)) or 1.0
    slope = sum((b - mean_b) * (t - mean_s) for b, t in enumerate(times_s, 1)) / spread
    alpha_s = max(0.0, slope)
    return LatencyProfile(alpha_s, max(1e-6, mean_s - alpha_s * mean_b), count)


def parse(body: bytes, content_type: str) -> Message:
    """A request says how many steps it wants."""
    del content_type
    try:
        steps = msgspec.json.decode(body, type=dict[str, int])["steps"]
    except (msgspec.DecodeError, KeyError) as error:
        raise ProgramError(f'a body such as {{"steps": 20}} is expected: {error!r}') from error
    return Message({"steps": steps, "step": 0})


def render(message: Message) -> tuple[bytes, str]:
    """How many steps were done."""
    return msgspec.json.encode({"steps": message.header["step"]}), "application/json"


def stepwise(step_s: Sequence[float], decoder_s: Sequence[float], name: str = "stepwise") -> Program:
    """A diffusion program on emulated devices.

    Args:
        step_s: seconds of a denoising step of batches 1, 2, 3, ..
        decoder_s: seconds of a decoder of batches 1, 2, 3, ..
        name: of the pipeline.
    """
    modules: dict[str, StreamModule] = {
        "label": Sleeping([LABEL], [LATENT], [0.0]),
        "denoiser": Sleeping([LATENT], [LATENT, DENOISED], step_s, visits=True),
        "decoder": Sleeping([DENOISED], [IMAGE], decoder_s),
    }
    return Program(name, modules, LABEL, IMAGE, parse, render)


class Pick(StreamModule):
    """Sends a request to the module of its number of steps; holds the parameters of the inner program."""

    def __init__(self, outputs: Sequence[Stream]) -> None:
        super().__init__([LABEL], outputs)

    def compute(self, messages: list[Message]) -> list[Message]:
        """See `StreamModule.compute`."""
        return messages

    def scatter(self, message: Message) -> str:
        """See `StreamModule.scatter`."""
        return PICKED.format(message.header["steps"])


class Whole(StreamModule):
    """Runs requests of one number of steps through all modules of the inner program.

    Args:
        steps: of its requests.
        inner: whose modules it runs; loaded once for all that share it.
        profile: of a whole batch, None: measured while it runs.
    """

    def __init__(self, steps: int, inner: Inner, profile: LatencyProfile | None) -> None:
        super().__init__([Stream(PICKED.format(steps))], [IMAGE], profile=profile)
        self.steps = steps
        self.inner = inner

    def load(self, parameters: Mapping[str, torch.Tensor], device: torch.device | str = "cpu") -> None:
        """See `StreamModule.load`."""
        super().load(parameters, device)
        self.inner.load(device)

    def compute(self, messages: list[Message]) -> list[Message]:
        """See `StreamModule.compute`."""
        first, denoiser, decoder = self.inner.program.modules.values()
        messages = first.compute(messages)
        for _ in range(self.steps):
            messages = denoiser.compute(messages)
        for message in messages:
            denoiser.state.evict(message.request)
        return decoder.compute(messages)


class Inner:
    """A diffusion program of three modules that `Whole`s run; loaded with its own parameters."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._is_loaded = False

    def load(self, device: torch.device | str) -> None:
        """Loads its modules, the first time."""
        if not self._is_loaded:
            for module in self.program.modules.values():
                module.load(module.parameters(), device)
            self._is_loaded = True


def whole(
    steps: Sequence[int],
    step_s: Sequence[float] = (),
    decoder_s: Sequence[float] = (),
    inner: str = "",
    inner_options: Mapping[str, object] | None = None,
    name: str = "whole",
) -> Program:
    """Request-level batching: a module for each number of steps.

    Args:
        steps: numbers of steps that requests ask for.
        step_s: see `stepwise`; with `decoder_s` for emulated devices.
        decoder_s: see `stepwise`.
        inner: import path of a ready program of three modules, instead of emulated devices.
        inner_options: its options.
        name: of the pipeline.
    """
    made = open_program(inner, inner_options) if inner else stepwise(step_s, decoder_s)
    shared = Inner(made)
    picked = [Stream(PICKED.format(count)) for count in steps]
    modules: dict[str, StreamModule] = {"pick": Pick(picked)}
    for count in steps:
        profile = None
        if not inner:
            one, last = line(step_s), line(decoder_s)
            profile = LatencyProfile(
                count * one.alpha_s + last.alpha_s, count * one.beta_s + last.beta_s, min(one.most, last.most)
            )
        modules[f"steps-{count}"] = Whole(count, shared, profile)
    return Program(name, modules, LABEL, IMAGE, made.parse, made.render)
