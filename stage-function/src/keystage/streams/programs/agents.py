"""Three language agents in a chain: the first drafts, the second critiques, the third refines.

Each agent is a prefill and a decode module of its own, with its own decoder where `sources` says so; its
prompt is made of the question and of what the agents before it wrote (NeuStream, section 6.5, where an agent
is a model of its own). All agents of a program share one vocabulary: their prompts are put together as ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from keystage.streams.api import Message, Program, ProgramError, Stream, StreamModule
from keystage.streams.programs import fields
from keystage.streams.programs.decoding import Decode, Prefill, cached_model
from keystage.streams.programs.language import SAMPLING, sampling_header

if TYPE_CHECKING:
    import torch

    from keystage.streams.programs.language_model import LanguageModel

AGENTS: Sequence[tuple[str, str]] = (
    ("draft", "Answer the question.\nQuestion: {question}\nAnswer:"),
    ("critique", "Question: {question}\nAnswer: {draft}\nWhat is wrong with this answer?\nCritique:"),
    (
        "refine",
        "Question: {question}\nAnswer: {draft}\nCritique: {critique}\nA better answer, please.\nAnswer:",
    ),
)
"""Name of each agent, and its prompt: text, and in braces the question or what an earlier agent wrote."""


class AgentPrefill(Prefill):
    """Makes an agent's prompt of the texts so far, and computes it.

    Args:
        inputs: see `StreamModule`.
        outputs: see `StreamModule`.
        model: the agent's decoder.
        name: of the agent.
        template: of its prompt.
        is_exact: see `programs.decoding`.
        previous: name of the agent before it, empty for the first: its tokens are in the header.
    """

    def __init__(
        self,
        inputs: Sequence[Stream],
        outputs: Sequence[Stream],
        model: LanguageModel,
        name: str,
        template: str,
        *,
        is_exact: bool = True,
        previous: str = "",
    ) -> None:
        super().__init__(inputs, outputs, model, is_exact=is_exact)
        self.name = name
        self.previous = previous
        self._pieces = [_piece(model, part) for part in _split(template)]

    def compute(self, messages: list[Message]) -> list[Message]:
        """See `StreamModule.compute`."""
        return super().compute([self._entered(message) for message in messages])

    def prompt(self, message: Message) -> list[int]:
        """The template with ids in its places; its front is cut where the context is too short for all."""
        ids: list[int] = [] if self.model.bos is None else [self.model.bos]
        for piece in self._pieces:
            ids.extend(message.data[piece].tolist() if isinstance(piece, str) else piece)
        return ids[-(self.model.shape.context_length - message.header["max_tokens"]) :]

    def carried(self, message: Message) -> dict[str, torch.Tensor]:
        """The question and the texts so far."""
        return message.data

    def _entered(self, message: Message) -> Message:
        """The text of the agent before becomes one of the texts; the seed becomes this agent's."""
        import torch

        data = dict(message.data)
        if self.previous:
            data[self.previous] = torch.tensor(message.header["tokens"])
        place = [name for name, _ in AGENTS].index(self.name)
        return message.next(data, seed=(message.header["first_seed"] + place) % 2**64)


def program(
    name: str = "agents",
    sources: Sequence[str] = ("random:llama-tiny",),
    dtype: str = "float32",
    most_tokens: int = 128,
    *,
    is_exact: bool = True,
    partial_slos_s: Mapping[str, float] | None = None,
) -> Program:
    """Makes the program.

    Args:
        name: pipeline name.
        sources: the agents' models, see `LanguageModel`: one for all, or one each.
        dtype: of parameters, activations and KV state.
        most_tokens: tokens that a request may ask of each agent.
        is_exact: see `programs.decoding`.
        partial_slos_s: see `Program`.

    Raises:
        ProgramError: a wrong number of sources, or vocabularies of different sizes.
        SplitError: see `LanguageModel`.
    """
    if len(sources) not in (1, len(AGENTS)):
        raise ProgramError(f"sources must be 1 or {len(AGENTS)} models, got {len(sources)}")
    models = [cached_model(source, dtype) for source in (sources if len(sources) > 1 else [*sources] * 3)]
    sizes = sorted({model.shape.vocab_size for model in models})
    if len(sizes) > 1:
        raise ProgramError(f"agents hand on token ids and need one vocabulary, got sizes {sizes}")

    def parse(body: bytes, content_type: str) -> Message:
        import torch

        found = fields.json_object(body, content_type, ("question", *SAMPLING))
        header = sampling_header(found, most_tokens)
        header["first_seed"] = header["seed"]
        ids = models[0].encode(fields.text(found, "question"))
        longest = min(model.shape.context_length for model in models) // 4
        if not 1 <= len(ids) <= longest:
            raise ProgramError(f"question has {len(ids)} tokens, it may have 1 to {longest}")
        return Message(header, {"question": torch.tensor(ids)})

    def render(message: Message) -> tuple[bytes, str]:
        tokens = message.header["tokens"]
        texts = {agent: message.data[agent].tolist() for agent, _ in AGENTS[:-1]}
        answer = {
            "text": models[-1].decode(tokens),
            "tokens": tokens,
            **{agent: models[0].decode(ids) for agent, ids in texts.items()},
        }
        return msgspec.json.encode(answer), "application/json"

    question = Stream("question", "texts")
    modules: dict[str, StreamModule] = {}
    entry, previous = question, ""
    for (agent, template), model in zip(AGENTS, models, strict=True):
        prefix, done = Stream(f"{agent}-prefix", "prefix"), Stream(agent, "texts")
        modules[f"{agent}-prefill"] = AgentPrefill(
            [entry], [prefix, done], model, agent, template, is_exact=is_exact, previous=previous
        )
        modules[f"{agent}-decode"] = Decode([prefix], [prefix, done], model, is_exact=is_exact)
        entry, previous = done, agent
    return Program(name, modules, question, entry, parse, render, 3 * (most_tokens + 1), partial_slos_s)


def request(question: str, max_tokens: int, *, temperature: float = 0.0, seed: int = 0) -> bytes:
    """The body of a request."""
    return msgspec.json.encode(
        {"question": question, "max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    )


def _split(template: str) -> list[str]:
    """Text and names in braces, in turn: `a {b} c` gives `a `, `{b}`, ` c`."""
    parts: list[str] = []
    for piece in template.split("{"):
        name, closed, rest = piece.partition("}")
        parts.extend(["{" + name, rest] if closed else [piece])
    return [part for part in parts if part]


def _piece(model: LanguageModel, part: str) -> str | list[int]:
    """The name of a text, or the ids of a part of the template."""
    return part[1:] if part.startswith("{") else model.encode(part)
