"""Where parameters come from: a Hugging Face style folder, a file of another kind, a known name, a shape.

First step of `keystage split`: `open_source` finds the model and says what it is; parameters are
then read one tensor at a time by `bundle.split`. Opening reads no parameters.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from keystage.bundle.errors import SplitError
from keystage.bundle.packaged import PACKAGED, packaged
from keystage.bundle.random_shapes import PREFIX

if TYPE_CHECKING:
    import torch

_NAME_LENGTH = 42
_MODEL_FILES = (".json", ".safetensors", ".jinja", ".bin", ".txt")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What a model folder says about its tokens.

    Attributes:
        file: `tokenizer.json` where one was written, else empty.
        chat_template: Jinja source, empty for none.
        special_tokens: names to token texts.
        eos: token ids that end a text.
        bos: token id put before a prompt, or None.
    """

    file: str = ""
    chat_template: str = ""
    special_tokens: dict[str, str] = field(default_factory=dict)
    eos: tuple[int, ...] = ()
    bos: int | None = None


def added_tokens(tokenizer: Mapping[str, Any]) -> dict[str, int]:
    """Ids of the special tokens in a `tokenizer.json`, by their text; entries of another form name none."""
    added = tokenizer.get("added_tokens")
    found: dict[str, int] = {}
    for entry in added if isinstance(added, list) else []:
        if not isinstance(entry, dict):
            continue
        content, number = entry.get("content"), entry.get("id")
        if isinstance(content, str) and isinstance(number, int) and not isinstance(number, bool):
            found[content] = number
    return found


class ModelSource(Protocol):
    """An unsplit model."""

    words: str
    """What it is, for `Pipeline.source`."""

    def config(self) -> dict[str, Any]:
        """The model's config.json.

        Raises:
            SplitError: missing or garbled.
        """

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every parameter, by Hugging Face name.

        Raises:
            SplitError: a file is missing or garbled.
        """

    def read(self, name: str) -> torch.Tensor:
        """One parameter on the CPU, in the type it is stored in (GGUF: float32).

        Raises:
            SplitError: missing, or its file is cut short.
        """

    def write_vocabulary(self, folder: Path) -> Vocabulary:
        """Writes `tokenizer.json` into a folder, if the model has a tokenizer.

        Raises:
            SplitError: the tokenizer is garbled or of an unknown kind.
        """


def source_files(model: str | os.PathLike[str]) -> list[Path]:
    """The files that make a model, for its identity; none for random parameters.

    Raises:
        SplitError: there is no such model.
    """
    if _is_random(model):
        return []
    path = _located(model)
    if path.is_file():
        return [path]
    found = [*path.iterdir(), *path.glob("*/config.json")]
    return sorted(p for p in found if p.is_file() and p.suffix in _MODEL_FILES)


def source_identity(files: Sequence[Path]) -> str:
    """SHA-256 (hex) over name, size and modification time of each file.

    Cheap on purpose: it decides whether a bundle made earlier can be used again, and parameters
    themselves are hashed when a bundle is written.
    """
    facts = [(str(p.resolve()), p.stat().st_size, p.stat().st_mtime_ns) for p in files]
    return hashlib.sha256(msgspec.json.encode(facts)).hexdigest()


def identity_of(model: str | os.PathLike[str]) -> str:
    """SHA-256 (hex) of what a model is made of: `source_identity` of its files, or of its shape.

    Raises:
        SplitError: there is no such model.
    """
    if _is_random(model):
        from keystage.bundle.source_random import random_identity

        return random_identity(os.fspath(model).removeprefix(PREFIX))
    return source_identity(source_files(model))


def open_source(model: str | os.PathLike[str]) -> ModelSource:
    """Opens a model.

    Args:
        model: folder with `config.json` and safetensors files, a `.gguf` file, the folder of a
            CTranslate2 Whisper model, the name of a model in a package (`packaged.PACKAGED`), or
            `random:<shape>` for random parameters in the shape of a model (`random_shapes.SHAPES`).

    Raises:
        SplitError: there is no such model, or it is of no known kind.
    """
    from keystage.bundle.source_ctranslate2 import Ctranslate2Source, is_ctranslate2
    from keystage.bundle.source_folder import FolderSource
    from keystage.bundle.source_gguf import GgufSource

    if _is_random(model):
        from keystage.bundle.source_random import RandomSource

        return RandomSource(os.fspath(model).removeprefix(PREFIX))
    path = _located(model)
    if path.is_file():
        return GgufSource(path)
    return Ctranslate2Source(path) if is_ctranslate2(path) else FolderSource(path)


def pipeline_name(model: str | os.PathLike[str]) -> str:
    """The name that a model's pipeline has unless another is asked for.

    The last part of a path, in lower-case letters, digits and dashes: `Qwen2.5-7B` is `qwen2-5-7b`.
    """
    last = Path(os.fspath(model)).name.removesuffix(".gguf")
    return re.sub(r"[^a-z0-9]+", "-", last.lower()).strip("-")[:_NAME_LENGTH].rstrip("-")


def _is_random(model: str | os.PathLike[str]) -> bool:
    return os.fspath(model).startswith(PREFIX)


def _located(model: str | os.PathLike[str]) -> Path:
    path, name = Path(model), os.fspath(model)
    if name in PACKAGED and not path.exists():
        return packaged(name)
    if not path.exists():
        raise SplitError(
            f"model {name!r}: no such folder or .gguf file, and no known name: "
            f"{', '.join(PACKAGED)}, or {PREFIX}SHAPE"
        )
    if path.is_file() and path.suffix != ".gguf":
        raise SplitError(f"model {path}: a folder or a .gguf file is expected")
    return path
