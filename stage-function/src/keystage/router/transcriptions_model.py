"""What a router knows of a speech model: its window of sound and the tokens that steer it.

Made from `pipeline.json` and the tokenizer; `router.transcriptions` asks it for prompts. The first
positions of every session are frames of sound, so a prompt begins with as many placeholders. Names of
the special tokens are those of OpenAI's Whisper (Radford et al., arXiv 2212.04356, section 2.3).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from keystage.bundle.api import Pipeline
from keystage.bundle.errors import SplitError
from keystage.models.config_fields import count, shown
from keystage.router.openai_errors import FieldRefused
from keystage.router.text import TextCodec, decode
from keystage.router.transcriptions_languages import LANGUAGES

FAMILY = "whisper"
MOST_POSITIONS = 100_000
"""Frames or tokens of one session; a prompt lists as many placeholders."""
RATE = 16_000
"""Samples a second."""
_FRAME_SAMPLES = 320
_ENGLISH_ONLY_BELOW = 51_865
"""Vocabularies below that size are of models that know English only."""


@dataclasses.dataclass(frozen=True, slots=True)
class SpeechModel:
    """One speech pipeline.

    Attributes:
        name: the pipeline's.
        frames: positions of a session that are frames of sound.
        token_positions: tokens of a session at most, prompt included.
        eos: token ids that end a text.
        start: token that every prompt has.
        is_multilingual: whether the prompt names language and task.
        specials: ids of special tokens by name, those that the tokenizer has.
        text_below: ids of text are below it; what is not is left out of answers.
    """

    name: str
    frames: int
    token_positions: int
    eos: tuple[int, ...]
    start: int
    is_multilingual: bool
    specials: dict[str, int]
    text_below: int

    @property
    def window_samples(self) -> int:
        """Samples of one session's sound."""
        return self.frames * _FRAME_SAMPLES

    @property
    def window_s(self) -> float:
        """Seconds of one session's sound."""
        return self.window_samples / RATE

    def prompt(self, language: str, before: Sequence[int]) -> list[int]:
        """Token ids that ask for the text of one window, placeholders of the frames in front.

        Args:
            language: a language's code; of no effect in a model that knows one.
            before: ids of a text that the sound may go on from, the last of them that fit.
        """
        asked = [self.start]
        if self.is_multilingual:
            asked += [self.specials[f"<|{language}|>"], self.specials["<|transcribe|>"]]
        if "<|notimestamps|>" in self.specials:
            asked.append(self.specials["<|notimestamps|>"])
        kept = list(before)[-(self.token_positions // 2 - 1) :]
        if kept and "<|startofprev|>" in self.specials:
            asked = [self.specials["<|startofprev|>"], *kept, *asked]
        return [0] * self.frames + asked

    def asks_language(self) -> list[int]:
        """The prompt whose next token is the language of a window."""
        return [0] * self.frames + [self.start]

    def language_of(self, token: int) -> str | None:
        """The language that a token names."""
        return next((code for code in LANGUAGES if self.specials.get(f"<|{code}|>") == token), None)

    def check_language(self, language: str) -> str:
        """A language that the model knows.

        Raises:
            FieldRefused: it does not.
        """
        if not self.is_multilingual and language != "en":
            message = f"language {language[:20]!r}: {self.name!r} knows English ('en') only"
            raise FieldRefused("unsupported_value", message, param="language")
        if self.is_multilingual and not (language in LANGUAGES and f"<|{language}|>" in self.specials):
            message = f"language {language[:20]!r}: not among the codes that {self.name!r} knows"
            raise FieldRefused("invalid_value", message, param="language")
        return language

    def most_tokens(self, prompt: Sequence[int]) -> int:
        """New tokens of one window at most: half of what there is, as the model was trained to write."""
        asked = len(prompt) - self.frames
        return max(1, min(self.token_positions // 2, self.token_positions - asked))

    def text(self, codec: TextCodec, ids: Sequence[int]) -> str:
        """What was said: the ids' text without special tokens and marks of time."""
        return decode(codec, [token for token in ids if token < self.text_below and token not in self.eos])


def speech_model(pipeline: Pipeline, codec: TextCodec) -> SpeechModel | None:
    """The pipeline as a speech model, None when it is none.

    Raises:
        SplitError: its config says what cannot be.
    """
    if pipeline.family != FAMILY:
        return None
    config = pipeline.config
    generation = config.get("generation") or {}
    if not isinstance(generation, Mapping):
        raise SplitError(f"generation_config.json must be an object, got {shown(generation)}")
    specials = _specials(codec) if pipeline.tokenizer else {}
    below = min([pipeline.vocab_size, *specials.values()])
    start = specials.get("<|startoftranscript|>", config.get("decoder_start_token_id", 0))
    if not isinstance(start, int):
        raise SplitError(f"config.json: decoder_start_token_id must be a token id, got {shown(start)}")
    is_multilingual = generation.get("is_multilingual", pipeline.vocab_size >= _ENGLISH_ONLY_BELOW)
    return SpeechModel(
        name=pipeline.name,
        frames=count(config, "max_source_positions", 1500, MOST_POSITIONS),
        token_positions=count(config, "max_target_positions", 448, MOST_POSITIONS),
        eos=tuple(pipeline.eos),
        start=start,
        is_multilingual=bool(is_multilingual) and "<|transcribe|>" in specials,
        specials=specials,
        text_below=below,
    )


def _specials(codec: TextCodec) -> dict[str, int]:
    """Ids of the special tokens that steer the model; a text that is no single token is none."""
    fixed = ("startoftranscript", "transcribe", "notimestamps", "startofprev", "endoftext")
    names = [f"<|{name}|>" for name in (*fixed, *LANGUAGES)]
    ids = {name: codec.encode(name) for name in names}
    return {name: found[0] for name, found in ids.items() if len(found) == 1}
