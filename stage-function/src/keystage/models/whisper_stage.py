"""A Whisper stage in torch: encoder layers, decoder layers or both, on any device.

A session's positions [0, frames) are the encoder's frames, its tokens begin behind them. The row that
opens a session carries all frames and exactly the decoder's prompt, in one piece: the first stage makes
frames of the session's input, encoder layers change them, decoder layers keep keys and values of them
and hand them on, the last stage drops them. Later rows are tokens only and pass encoder layers by.

That the opening row ends with the prompt is what tells the last stage which token is the first new
one, for the tokens that the model must not begin with; a rebuilt session therefore opens with the same
row. Driven by the worker wave by wave; samples nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from keystage.models.base import Row, StageError, StageRole
from keystage.models.kv import KvSlots, Span
from keystage.models.whisper_config import WhisperConfig, shape_of
from keystage.models.whisper_layers import decode, encode, frame_state, frames_of, normed
from keystage.models.whisper_mel import log_mel
from keystage.models.whisper_parameters import StageParameters

_SAMPLE_BYTES = 4


@dataclass(frozen=True, slots=True)
class _Wave:
    """The rows of a forward pass.

    Attributes:
        rows: as they came.
        opening: indices of those that open their session.
        tokens: the rows without frames, positions counted from the first token.
        places: index of each row's first element in the activation.
        spans: `tokens`, resolved.
    """

    rows: Sequence[Row]
    opening: list[int]
    tokens: list[Row]
    places: list[int]
    spans: list[Span]


class WhisperStage:
    """Layers [first, end) of a Whisper model, with the ends where they belong."""

    def __init__(
        self,
        config: WhisperConfig,
        role: StageRole,
        parameters: StageParameters,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._config = config
        self._parameters = parameters
        self.role = role
        self.shape = shape_of(config)
        self.device = device
        self.dtype = dtype
        head_dim = config.hidden_size // config.decoder_heads
        self._state = KvSlots(len(parameters.decoder), config.decoder_heads, 1, head_dim, device, dtype)
        self._frames: dict[int, list[torch.Tensor]] = {}
        self._inputs: dict[int, torch.Tensor] = {}
        self._masks = _masks(config, device) if role.is_last else []

    @property
    def kv_token_bytes(self) -> int:
        """See `LoadedStage.kv_token_bytes`; a stage of encoder layers holds a frame while it works on it."""
        layers = len(self._parameters.decoder)
        return max(2 * layers, 1) * self._config.hidden_size * self.dtype.itemsize

    @torch.inference_mode()
    def open(self, slot: int, capacity: int) -> None:
        """See `StageModel.open`; the capacity counts frames and tokens."""
        frames, most = self._config.frames, self.shape.context_length
        if not frames < capacity <= most:
            raise StageError(
                f"slot {slot}: capacity must be {frames + 1} to {most} positions ({frames} of frames), "
                f"got {capacity}"
            )
        self.close(slot)
        self._state.open(slot, capacity - frames)

    def take_input(self, slot: int, data: bytes) -> None:
        """Gives an open session what the first stage makes its frames of; without it they are silence.

        Args:
            slot: the session's.
            data: float32 samples at 16 kHz.

        Raises:
            StageError: longer than the frames, or cut inside a sample.
        """
        most = _SAMPLE_BYTES * self._config.samples
        if len(data) > most or len(data) % _SAMPLE_BYTES:
            raise StageError(
                f"slot {slot}: an input has at most {most} bytes, {_SAMPLE_BYTES} a sample, got {len(data)}"
            )
        if data:
            self._inputs[slot] = torch.frombuffer(bytearray(data), dtype=torch.float32)

    def close(self, slot: int) -> None:
        """See `StageModel.close`."""
        self._state.close(slot)
        self._frames.pop(slot, None)
        self._inputs.pop(slot, None)

    @torch.inference_mode()
    def forward(self, x: torch.Tensor, rows: Sequence[Row], want: Sequence[int]) -> torch.Tensor:
        """See `StageModel.forward`; logits of tokens that must not be chosen are minus infinity."""
        wave = self._wave(rows)
        expected = sum(row.count for row in rows)
        shape = (expected,) if self.role.is_first else (expected, self._config.hidden_size)
        if tuple(x.shape) != shape:
            raise StageError(f"input of shape {tuple(x.shape)}, {shape} expected for these rows")
        frames, tokens = self._entered(x, wave)
        parameters, config = self._parameters, self._config
        if frames is not None:
            for layer in parameters.encoder:
                frames = encode(frames, layer, config.encoder_heads)
            if parameters.encoder_norm is not None:
                frames = normed(frames, parameters.encoder_norm)
            for index, mine in zip(wave.opening, frames, strict=True):
                self._frames[rows[index].slot] = [
                    frame_state(mine, layer, config.decoder_heads) for layer in parameters.decoder
                ]
        if len(tokens):
            for index, block in enumerate(parameters.decoder):
                seen = [self._frames[row.slot][index] for row in rows]
                tokens = decode(tokens, block, index, wave.spans, self._state, seen, config)
        self._state.commit(wave.tokens)
        if self.role.is_last:
            return self._logits(tokens, wave, want)
        return _joined(frames, tokens, wave)

    def _wave(self, rows: Sequence[Row]) -> _Wave:
        """Checks the rows and takes the frames off them."""
        frames = self._config.frames
        opening, tokens, places, place = [], [], [], 0
        for index, row in enumerate(rows):
            places.append(place)
            place += row.count
            if row.start == 0 and row.count > frames:
                opening.append(index)
                tokens.append(Row(row.slot, 0, row.count - frames))
            elif row.start > frames:
                tokens.append(Row(row.slot, row.start - frames, row.count))
            else:
                raise StageError(
                    f"slot {row.slot}: row [{row.start}, {row.start + row.count}) begins or ends among the "
                    f"{frames} positions of frames; a session's first row has them all and a token"
                )
        return _Wave(rows, opening, tokens, places, self._state.spans(tokens))

    def _entered(self, x: torch.Tensor, wave: _Wave) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Frames of the opening rows [B, frames, hidden] (None for none) and tokens [T, hidden]."""
        count = self._config.frames
        skipped = [count if row.start == 0 else 0 for row in wave.rows]
        parts = [
            x[place + skip : place + row.count]
            for place, skip, row in zip(wave.places, skipped, wave.rows, strict=True)
        ]
        tokens = torch.cat(parts) if parts else x
        entrance = self._parameters.entrance
        if entrance is None:
            tokens = tokens.to(self.device, self.dtype)
            if not wave.opening:
                return None, tokens
            frames = torch.stack([x[wave.places[i] : wave.places[i] + count] for i in wave.opening])
            return frames.to(self.device, self.dtype), tokens
        if len(tokens):
            self._check_ids(int(tokens.min()), int(tokens.max()))
        ids = tokens.to(self.device, torch.int64)
        at = [torch.arange(row.start, row.start + row.count) for row in wave.tokens]
        positions = (torch.cat(at) if at else torch.arange(0)).to(self.device)
        embedded = functional.embedding(ids, entrance.embedding)
        embedded = embedded + functional.embedding(positions, entrance.token_positions)
        if not wave.opening:
            return None, embedded
        spectra = torch.stack([self._spectrum(wave.rows[i].slot) for i in wave.opening])
        return frames_of(spectra, entrance), embedded

    def _spectrum(self, slot: int) -> torch.Tensor:
        samples = self._inputs.get(slot, torch.empty(0)).to(self.device)
        return log_mel(samples, self._config.mels, self._config.samples).to(self.dtype)

    def _check_ids(self, least: int, greatest: int) -> None:
        if least < 0 or greatest >= self._config.vocab_size:
            raise StageError(
                f"token ids {least} to {greatest}, the vocabulary is 0 to {self._config.vocab_size - 1}"
            )

    def _logits(self, tokens: torch.Tensor, wave: _Wave, want: Sequence[int]) -> torch.Tensor:
        head, norm = self._parameters.head, self._parameters.final_norm
        assert head is not None
        assert norm is not None
        if not want:
            return torch.empty(0, self._config.vocab_size, device=self.device)
        ends = torch.tensor([span.first + span.count - 1 for span in wave.spans], device=self.device)
        logits = head(normed(tokens[ends[list(want)]], norm)).float()
        return logits + torch.stack([self._masks[wave.rows[index].start == 0] for index in want])


def _joined(frames: torch.Tensor | None, tokens: torch.Tensor, wave: _Wave) -> torch.Tensor:
    """Frames and tokens in the rows' order again, [T, hidden]."""
    if frames is None:
        return tokens
    parts: list[torch.Tensor] = []
    opened = iter(frames)
    for row, span in zip(wave.rows, wave.spans, strict=True):
        if row.start == 0:
            parts.append(next(opened))
        parts.append(tokens[span.first : span.first + span.count])
    return torch.cat(parts)


def _masks(config: WhisperConfig, device: torch.device) -> list[torch.Tensor]:
    """What is added to logits: for any new token, and for the first one; [vocab] each."""
    later = torch.zeros(config.vocab_size)
    later[list(config.suppressed)] = float("-inf")
    first = later.clone()
    first[list(config.suppressed_first)] = float("-inf")
    return [later.to(device), first.to(device)]
