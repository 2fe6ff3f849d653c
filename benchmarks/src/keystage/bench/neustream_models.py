"""Profiles for `keystage bench neustream`: measured by the paper's authors, from their published artifact.

github.com/Fjallraven-hc/NeuStream-AE holds the seconds per batch size with which NeuStream's own scheduler
and its Clockwork ran in the paper's section 6 (fp16; diffusion at 256 x 256 on an RTX 4090; OPT on A6000s;
the agents' 7B models on an RTX 4090). Numbers are rounded to 0.01 ms. Nothing here runs anything.
"""

from __future__ import annotations

import dataclasses

from keystage.batching.profile import LatencyProfile
from keystage.streams.interpolate import TableProfile, table


def _ms(*values: float) -> TableProfile:
    """A profile from milliseconds of batches 1, 2, 3, .."""
    return table(range(1, len(values) + 1), [value / 1000 for value in values])


def _summed(*profiles: TableProfile) -> TableProfile:
    """Modules that always run one after another, as one."""
    most = min(profile.most for profile in profiles)
    sizes = range(1, most + 1)
    return table(sizes, [sum(profile.latency_s(b) for profile in profiles) for b in sizes])


@dataclasses.dataclass(frozen=True, slots=True)
class Diffusion:
    """A diffusion program on one device.

    Attributes:
        name: as in the paper's Table 1.
        text: text encoder, None where classes condition the model.
        step: one denoising step.
        decoder: latent to image, with the safety checker where there is one.
        steps: least and most steps of a request, uniform between.
        rates_rps: arrival rates of the paper's Figure 11.
        rate_rps: the rate at which CV and objective vary.
        scales: objectives, as multiples of a request's time alone.
        printed: how many of 500 requests Clockwork served in time, by its published logs: by rate at CV 2
            and scale 3, by CV at `rate_rps` and scale 3, by scale at `rate_rps` and CV 2.
    """

    name: str
    text: TableProfile | None
    step: TableProfile
    decoder: TableProfile
    steps: tuple[int, int]
    rates_rps: tuple[float, ...]
    rate_rps: float
    scales: tuple[float, ...]
    printed: dict[tuple[str, float], int]

    def alone_s(self, steps: int) -> float:
        """Seconds of a request that has the device to itself."""
        text_s = self.text.latency_s(1) if self.text is not None else 0.0
        return text_s + steps * self.step.latency_s(1) + self.decoder.latency_s(1)

    def whole(self, steps: int) -> TableProfile:
        """l(b) of whole requests of equal steps: what request-level batching schedules."""
        parts = [self.step, self.decoder] if self.text is None else [self.text, self.step, self.decoder]
        most = min(part.most for part in parts)
        text_s = [0.0 if self.text is None else self.text.latency_s(b) for b in range(1, most + 1)]
        times = [
            text_s[b - 1] + steps * self.step.latency_s(b) + self.decoder.latency_s(b)
            for b in range(1, most + 1)
        ]
        return table(range(1, most + 1), times)


DIT_S2 = Diffusion(
    "DiT-S/2",
    None,
    _ms(
        8.64, 9.17, 9.59, 9.84, 10.19, 10.42, 10.93, 11.31, 11.76, 12.18,
        12.50, 12.82, 13.19, 13.79, 14.10, 14.40, 14.64, 15.10, 15.47, 15.80,
    ),
    _ms(10.92, 18.19, 26.86, 35.19, 44.60, 53.49, 61.82, 70.21, 79.69, 88.44),
    (200, 250),
    (0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0),
    2.0,
    (1.2, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0),
    {
        ("rate", 0.5): 273, ("rate", 1.0): 185, ("rate", 1.5): 121, ("rate", 2.0): 148, ("rate", 2.5): 81,
        ("rate", 3.0): 102, ("rate", 3.5): 99, ("rate", 4.0): 86, ("cv", 1.0): 60, ("cv", 2.0): 82,
        ("cv", 3.0): 81, ("cv", 4.0): 76, ("scale", 1.2): 50, ("scale", 1.5): 51, ("scale", 2.0): 56,
        ("scale", 3.0): 75, ("scale", 5.0): 109,
    },
)  # fmt: skip
"""Its decoder was measured to 10; what is said to be at most 20 images waits there in batches of 10."""

DIT_XL2 = Diffusion(
    "DiT-XL/2",
    None,
    _ms(
        17.60, 17.83, 18.48, 24.69, 29.42, 32.73, 35.35, 46.66, 50.23, 51.10,
        57.88, 59.99, 71.22, 67.25, 79.45, 81.29, 86.50, 91.08, 94.63, 97.74,
    ),
    _ms(16.49, 31.21, 45.94, 60.67, 75.40, 90.13, 104.86, 119.58, 134.31, 149.04),
    (200, 250),
    (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9),
    0.4,
    (1.2, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0),
    {
        ("rate", 0.2): 324, ("rate", 0.3): 286, ("rate", 0.4): 248, ("rate", 0.5): 229, ("rate", 0.6): 205,
        ("rate", 0.7): 183, ("rate", 0.8): 170, ("rate", 0.9): 161, ("cv", 1.0): 296, ("cv", 2.0): 253,
        ("cv", 3.0): 177, ("cv", 4.0): 162, ("scale", 1.2): 139, ("scale", 1.5): 168, ("scale", 2.0): 203,
        ("scale", 3.0): 237, ("scale", 5.0): 275,
    },
)  # fmt: skip

_UNET = _ms(
    33.06, 32.46, 33.34, 35.92, 34.63, 36.78, 38.73, 39.45, 46.87, 46.28,
    49.98, 55.46, 65.71, 71.00, 73.28, 75.92, 81.46, 81.57, 84.68, 88.15,
)  # fmt: skip
_CLIP = _ms(
    12.47, 12.47, 12.47, 12.56, 12.79, 12.92, 12.93, 13.06, 14.51, 14.32,
    15.58, 14.22, 13.99, 14.09, 14.17, 14.40, 14.74, 14.54, 14.55, 14.73,
)  # fmt: skip
_VAE = _ms(
    10.05, 15.77, 22.99, 31.20, 40.40, 47.37, 55.61, 63.64, 72.33, 80.54,
    90.89, 99.54, 109.77, 118.53, 126.70, 134.89, 144.37, 152.72, 160.71, 169.04,
)  # fmt: skip
_SAFETY = _ms(
    41.73, 41.56, 62.80, 84.12, 105.19, 129.03, 149.43, 173.11, 196.01, 227.31,
    255.93, 263.65, 281.14, 305.78, 323.66, 368.40, 388.52, 418.06, 433.50, 461.23,
)  # fmt: skip
STABLE_DIFFUSION = Diffusion(
    "Stable Diffusion",
    _CLIP,
    _UNET,
    _summed(_VAE, _SAFETY),
    (30, 50),
    (0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.25, 2.5),
    1.25,
    (1.2, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0),
    {
        ("rate", 0.75): 326, ("rate", 1.0): 277, ("rate", 1.25): 252, ("rate", 1.5): 243, ("rate", 1.75): 235,
        ("rate", 2.0): 220, ("rate", 2.25): 201, ("rate", 2.5): 186, ("cv", 1.0): 310, ("cv", 2.0): 256,
        ("cv", 3.0): 205, ("cv", 4.0): 182, ("scale", 1.2): 130, ("scale", 1.5): 156, ("scale", 2.0): 194,
        ("scale", 3.0): 251, ("scale", 5.0): 335,
    },
)  # fmt: skip

DIFFUSION = (STABLE_DIFFUSION, DIT_XL2, DIT_S2)


@dataclasses.dataclass(frozen=True, slots=True)
class Language:
    """A language model on its device(s).

    Attributes:
        name: as in the paper.
        prefill_s: seconds of a prefill: constant, per token of the batch, per squared token of each prompt.
        decode_s: seconds of a decode step: constant, and per token of KV state it attends to.
        kv_tokens: room for KV state, in tokens.
        most_batched: tokens of one prefill at most.
    """

    name: str
    prefill_s: tuple[float, float, float]
    decode_s: tuple[float, float]
    kv_tokens: int
    most_batched: int

    def prefill(self, tokens: float) -> LatencyProfile:
        """Profile of prompts of this length."""
        base, each, squared = self.prefill_s
        alpha_s = each * tokens + squared * tokens * tokens
        return LatencyProfile(alpha_s, base, max(1, int(self.most_batched / tokens)))

    def prefill_time_s(self, lengths: list[int]) -> float:
        """Seconds of one prefill of these prompts."""
        base, each, squared = self.prefill_s
        return base + each * sum(lengths) + squared * sum(n * n for n in lengths)

    def decode(self, tokens: float) -> LatencyProfile:
        """Profile of steps of sessions of this many tokens."""
        return LatencyProfile(
            self.decode_s[1] * tokens, self.decode_s[0], max(1, int(self.kv_tokens / tokens))
        )

    def decode_time_s(self, kv_tokens: int) -> float:
        """Seconds of one step over so many tokens of KV state."""
        return self.decode_s[0] + self.decode_s[1] * kv_tokens

    def alone_s(self, prompt: int, output: int) -> tuple[float, float]:
        """Seconds of a request alone: to its first token, and from there to its last."""
        later = output - 1
        tokens = later * prompt + later * (later + 1) // 2
        return self.prefill_time_s([prompt]), later * self.decode_s[0] + self.decode_s[1] * tokens


def _kv_tokens(memory_bytes: float, used_ratio: float, parameters: float, token_bytes: float) -> int:
    """Tokens that fit beside fp16 parameters, 1 GiB of work space left to the framework."""
    return int((memory_bytes * used_ratio - 2 * parameters - 2**30) / token_bytes)


OPT_13B = Language(
    "OPT-13B",
    (0.013512, 0.0002468, -2.8e-9),
    (0.043863, 1.0531e-6),
    _kv_tokens(48e9, 0.9, 12.85e9, 2 * 40 * 5120 * 2),
    8192,
)
"""One A6000 of 48 GB, 0.9 of it used, as the artifact's experiment sets it."""

CODE_LLAMA = Language(
    "Code Llama 7B",
    (0.012456, 8.238e-5, 1.952e-9),
    (0.015829, 6.757e-7),
    _kv_tokens(24e9, 0.9, 6.74e9, 2 * 32 * 4096 * 2),
    4096,
)
LLAVA = Language(
    "LLaVA 1.5 7B",
    (0.012620, 8.239e-5, 1.949e-9),
    (0.015809, 6.543e-7),
    _kv_tokens(24e9, 0.9, 7.06e9, 2 * 32 * 4096 * 2),
    4096,
)
"""One RTX 4090 of 24 GB each, 0.9 of it used (vLLM's default)."""
