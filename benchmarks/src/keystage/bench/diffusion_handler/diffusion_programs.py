"""The two programs of `keystage bench diffusion`, as a user's handler folder has them.

`stepwise` is a diffusion program of modules that sleep: a label, a denoiser that a request passes once a
step, a decoder. `whole` runs batches of requests of any such program from their first step to their images,
as Clockwork does; which requests a batch has is said by whoever sends it (`bench.diffusion_whole`). Both do
the same work, on emulated devices or (`inner`) with the real nets of a ready program.
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
BATCH, WHOLE = Stream("batch", "batch"), Stream("whole", "batch")


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


class Passing(StreamModule):
    """Hands batches on; it stands where the program in modules has its first one."""

    def compute(self, messages: list[Message]) -> list[Message]:
        """See `StreamModule.compute`."""
        return messages


class Whole(StreamModule):
    """Runs batches of whole requests through all modules of the inner program, one batch after another.

    Who has done its steps computes no more; all answers leave when the last one's image is made.

    Args:
        inner: a program of three modules, the second of which is passed once a step.
    """

    def __init__(self, inner: Program) -> None:
        super().__init__([WHOLE], [IMAGE])
        self.inner = inner

    def load(self, parameters: Mapping[str, torch.Tensor], device: torch.device | str = "cpu") -> None:
        """See `StreamModule.load`; the inner modules have parameters of their own."""
        super().load(parameters, device)
        for module in self.inner.modules.values():
            module.load(module.parameters(), device)

    def compute(self, messages: list[Message]) -> list[Message]:
        """See `StreamModule.compute`."""
        return [self._served(message) for message in messages]

    def _served(self, batch: Message) -> Message:
        import torch

        first, denoiser, decoder = self.inner.modules.values()
        parsed = [self.inner.parse(body.encode(), "application/json") for body in batch.header["requests"]]
        going = first.compute([one.next(one.data, request=place) for place, one in enumerate(parsed)])
        done: dict[int, Message] = {}
        while going:
            going = denoiser.compute(going)
            done |= {one.request: one for one in going if denoiser.scatter(one) == DENOISED.name}
            going = [one for one in going if one.request not in done]
        for place in done:
            denoiser.state.evict(place)
        images = decoder.compute([done[place] for place in sorted(done)])
        answers = b"".join(self.inner.render(image)[0] for image in images)
        return batch.next({"answers": torch.frombuffer(bytearray(answers), dtype=torch.uint8)}, requests=[])


def parse_batch(body: bytes, content_type: str) -> Message:
    """A batch is the bodies of its requests."""
    del content_type
    try:
        bodies = msgspec.json.decode(body, type=dict[str, list[msgspec.Raw]])["requests"]
    except (msgspec.DecodeError, KeyError) as error:
        raise ProgramError(f'a body such as {{"requests": [..]}} is expected: {error!r}') from error
    if not bodies:
        raise ProgramError("a batch has at least one request, this has none")
    return Message({"requests": [bytes(one).decode() for one in bodies]})


def render_batch(message: Message) -> tuple[bytes, str]:
    """The answers, one after another."""
    return message.data["answers"].numpy().tobytes(), "application/octet-stream"


def whole(
    step_s: Sequence[float] = (),
    decoder_s: Sequence[float] = (),
    inner: str = "",
    inner_options: Mapping[str, object] | None = None,
    name: str = "whole",
) -> Program:
    """Request-level batching: batches of whole requests, as they are sent.

    Args:
        step_s: see `stepwise`; with `decoder_s` for emulated devices.
        decoder_s: see `stepwise`.
        inner: import path of a ready program of three modules, instead of emulated devices.
        inner_options: its options.
        name: of the pipeline.
    """
    made = open_program(inner, inner_options) if inner else stepwise(step_s, decoder_s)
    modules: dict[str, StreamModule] = {"batch": Passing([BATCH], [WHOLE]), "whole": Whole(made)}
    return Program(name, modules, BATCH, IMAGE, parse_batch, render_batch)
