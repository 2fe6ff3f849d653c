"""Text to image as a stream program: text encoder, denoiser in a loop, image decoder.

A request says how many steps it wants: `{"prompt": "a tree", "steps": 12, "seed": 3}`. Requests at different
steps, and with different numbers of steps, share batches in the denoiser, since each step is one visit there
(NeuStream, figures 5 and 7). Latent and text stay in the denoiser's state, so messages of the loop are a
header. Sampling is deterministic: the angular form of DDIM for velocities (Salimans and Ho, arXiv
2202.00512, appendix D), x' = cos(d) x - sin(d) v, over n steps of d = pi / 2n.

On a CPU an image does not depend on its company, to the last bit; on a GPU, beyond rounding
(`programs.diffusion_nets`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import msgspec

from keystage.streams.api import Message, NetModule, Program, ProgramError, Stream, StreamModule
from keystage.streams.programs import fields

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from keystage.streams.programs.diffusion_nets import DiffusionShape

_SEEDS = 2**63 - 1
_PAD = 256

TEXT = Stream("text", "text")
LATENT = Stream("latent", "latent")
DENOISED = Stream("denoised", "denoised")
IMAGE = Stream("image", "image")


class _RandomNet(NetModule, ABC):
    """A net with random parameters by seed, made without computing them twice."""

    def __init__(
        self, inputs: Sequence[Stream], outputs: Sequence[Stream], shape: str, seed: int, dtype: str
    ) -> None:
        super().__init__(inputs, outputs)
        self.shape_name = shape
        self.seed = seed
        self.dtype_name = dtype

    @property
    def shape(self) -> DiffusionShape:
        """Sizes."""
        from keystage.streams.programs.diffusion_nets import SHAPES

        return SHAPES[self.shape_name]

    @property
    def dtype(self) -> torch.dtype:
        """Of parameters and activations."""
        from keystage.models.base import torch_dtype

        return torch_dtype(self.dtype_name)

    @abstractmethod
    def make(self) -> torch.nn.Module:
        """The net; only its shapes are used."""

    def build(self) -> torch.nn.Module:
        """See `NetModule.build`: without storage, parameters come from outside."""
        import torch

        with torch.device("meta"):
            return self.make()

    def parameters(self) -> dict[str, torch.Tensor]:
        """See `StreamModule.parameters`."""
        from keystage.streams.programs.diffusion_nets import seeded

        return seeded(self.build(), self.seed, self.dtype)


class TextModule(_RandomNet):
    """Prompt to text vectors, and the noise that the request starts from."""

    def make(self) -> torch.nn.Module:
        """See `_RandomNet.make`."""
        from keystage.streams.programs.diffusion_nets import TextEncoder

        return TextEncoder(self.shape)

    def compute(self, messages: list[Message]) -> list[Message]:
        """See `StreamModule.compute`."""
        import torch

        ids = torch.full((len(messages), self.shape.text_tokens), _PAD)
        for row, message in enumerate(messages):
            ids[row, : len(message.data["ids"])] = message.data["ids"]
        ids = ids.to(self.device)
        texts = self.net(ids, ids != _PAD)
        return [
            message.next({"text": text, "latent": self._noise(message.header["seed"])})
            for message, text in zip(messages, texts, strict=True)
        ]

    def _noise(self, seed: int) -> torch.Tensor:
        import torch

        shape = self.shape
        generator = torch.Generator().manual_seed(seed)
        size = (shape.latent_channels, shape.latent_size, shape.latent_size)
        return torch.randn(size, generator=generator).to(self.dtype)


class DenoiserModule(_RandomNet):
    """One step for each message; it goes round until its steps are done."""

    is_stateful = True

    def make(self) -> torch.nn.Module:
        """See `_RandomNet.make`."""
        from keystage.streams.programs.diffusion_nets import Denoiser

        return Denoiser(self.shape)

    def compute(self, messages: list[Message]) -> list[Message]:
        """See `StreamModule.compute`."""
        import torch

        for message in messages:
            for name in ("latent", "text"):
                if name in message.data:
                    self.state.put(message.request, name, message.data[name].to(self.device))
        latents = torch.stack([self.state.get(message.request, "latent") for message in messages])
        texts = torch.stack([self.state.get(message.request, "text") for message in messages])
        counts = torch.tensor([message.header["tokens"] for message in messages], device=self.device)
        is_visible = torch.arange(texts.shape[1], device=self.device) < counts[:, None]
        turns = [math.pi / 2 / message.header["steps"] for message in messages]
        times = torch.tensor([1 - m.header["step"] / m.header["steps"] for m in messages])
        turned = [self._column([f(turn) for turn in turns]) for f in (math.cos, math.sin)]
        velocity = self.net(latents, times.to(self.device), texts, is_visible)
        latents = turned[0] * latents - turned[1] * velocity
        return [self._stepped(message, latent) for message, latent in zip(messages, latents, strict=True)]

    def scatter(self, message: Message) -> str:
        """See `StreamModule.scatter`."""
        is_done = message.header["step"] == message.header["steps"]
        return DENOISED.name if is_done else LATENT.name

    def visits_left(self, message: Message) -> int:
        """See `StreamModule.visits_left`."""
        return int(message.header["steps"]) - int(message.header["step"])

    def _stepped(self, message: Message, latent: torch.Tensor) -> Message:
        step = message.header["step"] + 1
        if step == message.header["steps"]:
            return message.next({"latent": latent}, step=step)
        self.state.put(message.request, "latent", latent)
        return message.next({}, step=step)

    def _column(self, values: list[float]) -> torch.Tensor:
        import torch

        return torch.tensor(values, device=self.device, dtype=self.dtype)[:, None, None, None]


class ImageModule(_RandomNet):
    """Latents to images."""

    def make(self) -> torch.nn.Module:
        """See `_RandomNet.make`."""
        from keystage.streams.programs.diffusion_nets import ImageDecoder

        return ImageDecoder(self.shape)

    def compute(self, messages: list[Message]) -> list[Message]:
        """See `StreamModule.compute`."""
        import torch

        latents = torch.stack([message.data["latent"] for message in messages]).to(self.device)
        images = self.net(latents).float().mul(255).round().to(torch.uint8).permute(0, 2, 3, 1)
        return [
            message.next({"image": image.contiguous()})
            for message, image in zip(messages, images, strict=True)
        ]


def program(
    name: str = "diffusion",
    shape: str = "tiny",
    seed: int = 0,
    dtype: str = "float32",
    most_steps: int = 250,
    image: str = "png",
    partial_slos_s: Mapping[str, float] | None = None,
) -> Program:
    """Makes the program.

    Args:
        name: pipeline name.
        shape: sizes: `tiny`, `small`, `dit-b`, `dit-xl`.
        seed: of the parameters.
        dtype: of parameters and activations.
        most_steps: steps that a request may ask for.
        image: `png` (needs Pillow; without it the answer is as with `npy`), or `npy`.
        partial_slos_s: see `Program`: a request of n steps has text + n denoiser + decoder.

    Raises:
        ProgramError: unknown shape or image format.
    """
    from keystage.streams.programs.diffusion_nets import SHAPES

    if shape not in SHAPES:
        raise ProgramError(f"shape {shape!r} is unknown, known are {', '.join(SHAPES)}")
    if image not in ("png", "npy"):
        raise ProgramError(f"image must be png or npy, got {image!r}")
    text_tokens = SHAPES[shape].text_tokens

    def parse(body: bytes, content_type: str) -> Message:
        import torch

        found = fields.json_object(body, content_type, ("prompt", "steps", "seed"))
        ids = list(fields.text(found, "prompt").encode())[:text_tokens]
        steps = fields.whole(found, "steps", min(20, most_steps), 1, most_steps)
        header: dict[str, Any] = {
            "steps": steps,
            "step": 0,
            "seed": fields.whole(found, "seed", 0, 0, _SEEDS),
            "tokens": max(1, len(ids)),
        }
        return Message(header, {"ids": torch.tensor(ids or [0], dtype=torch.int64)})

    def render(message: Message) -> tuple[bytes, str]:
        return picture(message.data["image"], image)

    modules: dict[str, StreamModule] = {
        "text": TextModule([TEXT], [LATENT], shape, seed, dtype),
        "denoiser": DenoiserModule([LATENT], [LATENT, DENOISED], shape, seed, dtype),
        "decoder": ImageModule([DENOISED], [IMAGE], shape, seed, dtype),
    }
    return Program(name, modules, TEXT, IMAGE, parse, render, most_steps + 2, partial_slos_s)


def picture(image: torch.Tensor, kind: str) -> tuple[bytes, str]:
    """A file of an image.

    Args:
        image: uint8 [height, width, 3].
        kind: `png` or `npy`.

    Returns:
        The file and its content type; `npy` where Pillow is not installed.
    """
    import io

    import numpy as np

    values = image.cpu().numpy()
    file = io.BytesIO()
    if kind == "png":
        try:
            from PIL import Image
        except ModuleNotFoundError:
            return picture(image, "npy")
        Image.fromarray(values).save(file, "PNG")
        return file.getvalue(), "image/png"
    np.save(file, values)
    return file.getvalue(), "application/x-npy"


def request(prompt: str, steps: int, seed: int = 0) -> bytes:
    """The body of a request."""
    return msgspec.json.encode({"prompt": prompt, "steps": steps, "seed": seed})
