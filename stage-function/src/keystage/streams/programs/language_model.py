"""Which decoder a program runs: opened from wherever `keystage split` takes models from, and its text codec.

Opening reads the model's description, not its parameters; every worker of a program does that. Parameters are
read where the bundle is made.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from keystage.bundle.source import open_source
from keystage.models.base import StageRole, torch_dtype
from keystage.models.decoder import DecoderStage
from keystage.models.families import family_of
from keystage.streams.api import ProgramError


class LanguageModel:
    """A whole decoder.

    Args:
        source: a folder, a file, a packaged model, `random:<shape>`; see `bundle.source.open_source`.
        dtype: of parameters, activations and KV state.

    Raises:
        SplitError: there is no such model.
        ProgramError: it is no decoder of text.
    """

    def __init__(self, source: str, dtype: str) -> None:
        self._source = open_source(source)
        self._config = self._source.config()
        self._family = family_of(self._config)
        if self._family.execution != "looping" or self._family.name == "whisper":
            raise ProgramError(
                f"model {source} is of family {self._family.name}, a decoder of text is wanted"
            )
        self.shape = self._family.shape(self._config)
        self._role = StageRole(0, self.shape.layers, is_first=True, is_last=True)
        self._dtype = torch_dtype(dtype)
        with tempfile.TemporaryDirectory() as folder:
            vocabulary = self._source.write_vocabulary(Path(folder))
            self._codec = _codec(Path(folder) / vocabulary.file) if vocabulary.file else None
        self.eos = frozenset(vocabulary.eos)
        self.bos = vocabulary.bos

    def encode(self, text: str) -> list[int]:
        """Token ids of a text; its bytes where the model has no tokenizer."""
        return list(text.encode()) if self._codec is None else list(self._codec.encode(text))

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids; without a tokenizer those above 255 are left out."""
        if self._codec is None:
            return bytes(token for token in ids if token < 256).decode(errors="replace")
        return self._codec.decode(ids)

    def parameters(self) -> dict[str, torch.Tensor]:
        """All parameters, read now."""
        found: dict[str, torch.Tensor] = {}
        for tensor in self._family.stage_tensors(self._config, self._role):
            values = self._source.read(tensor.source)
            turned = values.t() if tensor.is_transposed else values
            found[tensor.name] = turned.to(self._dtype).contiguous()
        return found

    def build(self, parameters: Mapping[str, torch.Tensor], device: torch.device | str) -> DecoderStage:
        """The running decoder.

        Raises:
            BundleError: a parameter is missing or has another shape.
        """
        with torch.inference_mode():
            stage = self._family.build(
                self._config, self._role, parameters, torch.device(device), self._dtype
            )
        assert isinstance(stage, DecoderStage)
        return stage


class _Codec:
    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(path))

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        found: str = self._tokenizer.decode(list(ids))
        return found


def _codec(path: Path) -> _Codec:
    return _Codec(path)
