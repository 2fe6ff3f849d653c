"""Prefill and decode over Keystage's own decoder, as stream modules.

Used by the language and the agents programs. A prompt's KV state is made by the prefill module, travels with
the message, and stays with the decode module until its loop is left; messages of the loop are a header.
Tokens are a pure function of logits, seed and position (`keystage.worker.sampling`).

With `is_exact` tokens do not depend on company: prompts are computed one by one and decode steps in forward
passes of always `ROWS` rows, so that every matrix multiplication has one shape whoever shares the batch. On a
CPU, where weights are read once for all rows of a pass; on a GPU batches are computed whole.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from keystage.streams.api import Message, Stream, StreamModule

if TYPE_CHECKING:
    import torch

    from keystage.models.base import Row
    from keystage.models.decoder import DecoderStage
    from keystage.streams.programs.language_model import LanguageModel

ROWS = 8
"""Rows of an exact decode pass; on a CPU eight cost little more than one, weights being read once."""
_BLANK_SLOT = -1
"""Slots from here downwards fill exact passes up."""


class DecoderModule(StreamModule):
    """What prefill and decode share: a whole decoder on the module's device.

    Args:
        inputs: see `StreamModule`.
        outputs: see `StreamModule`.
        model: which decoder.
        is_exact: see the module's docstring; False after `load` on another device than a CPU.
    """

    def __init__(
        self,
        inputs: Sequence[Stream],
        outputs: Sequence[Stream],
        model: LanguageModel,
        *,
        is_exact: bool = True,
    ) -> None:
        super().__init__(inputs, outputs)
        self.model = model
        self.is_exact = is_exact
        self._loaded: DecoderStage | None = None

    @property
    def stage(self) -> DecoderStage:
        """The decoder; after `load`."""
        assert self._loaded is not None, "load() comes first"
        return self._loaded

    def parameters(self) -> dict[str, torch.Tensor]:
        """See `StreamModule.parameters`."""
        return self.model.parameters()

    def load(self, parameters: Mapping[str, torch.Tensor], device: torch.device | str = "cpu") -> None:
        """See `StreamModule.load`."""
        import torch

        super().load(parameters, device)
        self._loaded = self.model.build(parameters, device)
        self.is_exact = self.is_exact and torch.device(device).type == "cpu"
        if self.is_exact:
            for slot in range(_BLANK_SLOT - ROWS + 1, _BLANK_SLOT + 1):
                self._loaded.open(slot, 1)

    def sample(
        self, logits: torch.Tensor, messages: Sequence[Message], positions: Sequence[int]
    ) -> list[int]:
        """The next token of each message; `positions` are those of the tokens to be chosen."""
        from keystage.worker.sampling import sample

        headers = [message.header for message in messages]
        return sample(
            logits,
            [header["seed"] for header in headers],
            positions,
            [header["temperature"] for header in headers],
            [header["top_p"] for header in headers],
        )

    def ends(self, token: int, count: int, message: Message) -> bool:
        """Whether a text ends with this token, its `count`-th."""
        return count >= message.header["max_tokens"] or token in self.model.eos


class Prefill(DecoderModule):
    """Prompts to KV state and first tokens; two outputs: on to decode, or out where one token is all."""

    def prompt(self, message: Message) -> list[int]:
        """Token ids to be computed, at least one."""
        ids: list[int] = message.data["ids"].tolist()
        return ids

    def carried(self, message: Message) -> dict[str, torch.Tensor]:
        """Tensors of the message that later modules want."""
        del message
        return {}

    def compute(self, messages: list[Message]) -> list[Message]:
        """See `StreamModule.compute`."""
        import torch

        prompts = [self.prompt(message) for message in messages]
        passes = [[place] for place in range(len(messages))] if self.is_exact else [[*range(len(messages))]]
        found = [part for places in passes for part in self._computed([prompts[p] for p in places])]
        logits = torch.stack([row for row, _ in found])
        tokens = self.sample(logits, messages, [len(prompt) for prompt in prompts])
        results = []
        for message, prompt, token, (_, state) in zip(messages, prompts, tokens, found, strict=True):
            is_done = self.ends(token, 1, message)
            data = self.carried(message) if is_done else {**self.carried(message), "kv": state}
            results.append(
                message.next(data, tokens=[token], written=1, prompt_tokens=len(prompt), is_done=is_done)
            )
        return results

    def scatter(self, message: Message) -> str:
        """See `StreamModule.scatter`: to the second output where the text is done."""
        return self.outputs[1 if message.header["is_done"] else 0].name

    def _computed(self, prompts: Sequence[Sequence[int]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Logits and KV state of prompts that are computed together."""
        import torch

        from keystage.models.base import Row

        stage = self.stage
        rows = [Row(slot, 0, len(prompt)) for slot, prompt in enumerate(prompts)]
        for row in rows:
            stage.open(row.slot, row.count)
        try:
            ids = torch.tensor([token for prompt in prompts for token in prompt])
            logits = stage.forward(ids, rows, range(len(rows)))
            states = [stage.kv.read(row.slot) for row in rows]
        finally:
            for row in rows:
                stage.close(row.slot)
        return [(row, state) for row, state in zip(logits, states, strict=True) if state is not None]


@dataclass(slots=True)
class _Text:
    """A text that is being written, kept in the module's state.

    Attributes:
        stage: holds the KV state.
        slot: where.
        tokens: so far; the last one is not in the KV state yet.
        prompt_tokens: positions before them.
        carried: tensors for later modules.
    """

    stage: DecoderStage
    slot: int
    tokens: list[int]
    prompt_tokens: int
    carried: dict[str, torch.Tensor] = field(default_factory=dict)

    def close(self) -> None:
        """Frees the KV state."""
        self.stage.close(self.slot)

    @property
    def row(self) -> Row:
        """The next decode step."""
        from keystage.models.base import Row

        return Row(self.slot, self.prompt_tokens + len(self.tokens) - 1, 1)


class Decode(DecoderModule):
    """One token for each message, which goes round by the first output until its text is done."""

    is_stateful = True

    def compute(self, messages: list[Message]) -> list[Message]:
        """See `StreamModule.compute`."""
        import torch

        texts = [self._text(message) for message in messages]
        size = ROWS if self.is_exact else len(texts)
        parts = [self._logits(texts[start : start + size]) for start in range(0, len(texts), size)]
        positions = [text.prompt_tokens + len(text.tokens) for text in texts]
        tokens = self.sample(torch.cat(parts), messages, positions)
        for text, token in zip(texts, tokens, strict=True):
            text.tokens.append(token)
        return [self._next(message, text) for message, text in zip(messages, texts, strict=True)]

    def scatter(self, message: Message) -> str:
        """See `StreamModule.scatter`."""
        return self.outputs[1 if message.header["is_done"] else 0].name

    def visits_left(self, message: Message) -> int:
        """See `StreamModule.visits_left`: unknown where a token may end the text."""
        return 0 if self.model.eos else int(message.header["max_tokens"]) - int(message.header["written"])

    def _text(self, message: Message) -> _Text:
        """The state of a text, made from what prefill sent at its first visit."""
        if "kv" not in message.data:
            found = self.state.get(message.request, "text")
            assert isinstance(found, _Text), f"request {message.request} comes back without state"
            return found
        slot = self._free_slot()
        header = message.header
        kv = message.data["kv"]
        self.stage.open(slot, kv.shape[2] + header["max_tokens"])
        carried = {name: tensor for name, tensor in message.data.items() if name != "kv"}
        text = _Text(self.stage, slot, list(header["tokens"]), header["prompt_tokens"], carried)
        self.state.put(message.request, "text", text)
        is_written = self.stage.kv.write(slot, kv)
        assert is_written, f"KV state of shape {tuple(kv.shape)} is of another decoder"
        return text

    def _free_slot(self) -> int:
        used = {self.state.get(request, "text").slot for request in self.state.requests}
        return next(slot for slot in range(len(used) + 1) if slot not in used)

    def _next(self, message: Message, text: _Text) -> Message:
        written = len(text.tokens)
        if self.ends(text.tokens[-1], written, message):
            return message.next(text.carried, tokens=list(text.tokens), written=written, is_done=True)
        return message.next({}, tokens=[], written=written, is_done=False)

    def _logits(self, texts: Sequence[_Text]) -> torch.Tensor:
        """One forward pass, filled up where it is to be exact."""
        import torch

        from keystage.models.base import Row

        rows = [text.row for text in texts]
        ids = [text.tokens[-1] for text in texts]
        if self.is_exact:
            blanks = range(_BLANK_SLOT, _BLANK_SLOT - (ROWS - len(rows)), -1)
            rows = [*rows, *(Row(slot, 0, 1) for slot in blanks)]
            ids = [*ids, *(0 for _ in blanks)]
        return self.stage.forward(torch.tensor(ids), rows, range(len(rows)))[: len(texts)]


@functools.lru_cache(maxsize=8)
def cached_model(source: str, dtype: str) -> LanguageModel:
    """The model of a source, opened once in a process."""
    from keystage.streams.programs.language_model import LanguageModel

    return LanguageModel(source, dtype)
