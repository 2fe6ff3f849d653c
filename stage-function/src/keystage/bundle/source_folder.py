"""A Hugging Face style folder as a source: config.json, safetensors (sharded or not), tokenizer.

Parameters are read one by one with plain reads, never mapped, so that splitting needs little
memory whatever the size of the model.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from keystage.bundle.dtypes import FLOAT_NAMES
from keystage.bundle.errors import BundleError, SplitError
from keystage.bundle.safetensors_file import Header, parse_header, read_range
from keystage.bundle.sentence import pooling
from keystage.bundle.source import Vocabulary, added_tokens
from keystage.bundle.store import is_file_name
from keystage.wire.unreadable import UNREADABLE

if TYPE_CHECKING:
    import torch

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_TOKENIZER = "tokenizer.json"
_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token", "cls_token", "sep_token", "mask_token")
_PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json", "model.pt", "pytorch_model.pt")
_CONVERT = (
    "pickled parameters are never loaded, since loading them can run code; convert them once: "
    "transformers' AutoModel.from_pretrained(FOLDER).save_pretrained(FOLDER) writes safetensors"
)


class FolderSource:
    """See `keystage.bundle.source.ModelSource`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, Path] | None = None
        self._headers: dict[Path, Header] = {}
        self.words = f"folder {folder.resolve().name}"

    def config(self) -> dict[str, Any]:
        """See `ModelSource.config`; with what a sentence-transformers folder says about pooling."""
        config = self._json("config.json")
        if config.get("model_type") == "whisper":
            # Tokens that are never chosen, and what the special ones mean, are told there.
            config["generation"] = self._json_if_there("generation_config.json")
        said = pooling(self._folder, self._json)
        return config if said is None else {**config, "sentence_transformers": said}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """See `ModelSource.shapes`."""
        return {name: self._header(path).tensors[name].shape for name, path in self._located().items()}

    def read(self, name: str) -> torch.Tensor:
        """See `ModelSource.read`."""
        import torch

        path = self._located().get(name)
        if path is None:
            raise SplitError(f"{self._folder}: parameter {name} is missing")
        header = self._header(path)
        entry = header.tensors[name]
        if entry.dtype not in FLOAT_NAMES:
            raise SplitError(f"{path}: parameter {name} has type {entry.dtype}, a floating type is expected")
        start, end = entry.data_offsets
        buffer = torch.empty(end - start, dtype=torch.uint8)
        try:
            read_range(path, header.data_start + start, buffer.numpy().data)
        except BundleError as error:
            raise SplitError(str(error)) from error
        return buffer.view(getattr(torch, FLOAT_NAMES[entry.dtype])).view(entry.shape)

    def write_vocabulary(self, folder: Path) -> Vocabulary:
        """See `ModelSource.write_vocabulary`."""
        config = self.config()
        generation = self._json_if_there("generation_config.json")
        texts = self._json_if_there("tokenizer_config.json")
        tokenizer = self._folder / _TOKENIZER
        ids = added_tokens(self._json(_TOKENIZER)) if tokenizer.exists() else {}
        if tokenizer.exists():
            shutil.copyfile(tokenizer, folder / _TOKENIZER)
        special = {key: text for key in _SPECIAL if (text := _text(texts.get(key)))}
        eos = [*_ids(generation.get("eos_token_id")), *_ids(config.get("eos_token_id"))]
        if special.get("eos_token") in ids:
            eos.append(ids[special["eos_token"]])
        bos = None
        if texts.get("add_bos_token") is not False and _adds_bos(self._json_if_there(_TOKENIZER), texts):
            bos = ids.get(special.get("bos_token", ""))
        return Vocabulary(
            file=_TOKENIZER if tokenizer.exists() else "",
            chat_template=self._chat_template(texts),
            special_tokens=special,
            eos=tuple(dict.fromkeys(eos)),
            bos=bos,
        )

    def _chat_template(self, texts: dict[str, Any]) -> str:
        separate = self._folder / "chat_template.jinja"
        if separate.exists():
            return separate.read_text(encoding="utf-8")
        template = texts.get("chat_template")
        if isinstance(template, list):
            entries = [entry for entry in template if isinstance(entry, dict)]
            template = next((e.get("template") for e in entries if e.get("name") == "default"), None)
        return template if isinstance(template, str) else ""

    def _located(self) -> dict[str, Path]:
        if self._files is None:
            self._files = self._find_tensors()
        return self._files

    def _find_tensors(self) -> dict[str, Path]:
        index, single = self._folder / _INDEX, self._folder / _SINGLE
        if not index.exists():
            if not single.exists():
                if any((self._folder / name).exists() for name in _PICKLED):
                    raise SplitError(f"{self._folder}: no {_SINGLE}; {_CONVERT}")
                raise SplitError(f"{self._folder}: neither {_SINGLE} nor {_INDEX} is there")
            return dict.fromkeys(self._header(single).tensors, single)
        weight_map = self._json(_INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
            raise SplitError(f"{index}: weight_map is missing or garbled")
        for shard in sorted(set(weight_map.values())):
            if not is_file_name(shard):
                named = f"shard {shard[:300]!r}, named in {_INDEX},"
                raise SplitError(f"{self._folder}: {named} lies outside the folder")
            if not (self._folder / shard).exists():
                raise SplitError(f"{self._folder}: shard {shard}, named in {_INDEX}, is missing")
        files = {name: self._folder / shard for name, shard in weight_map.items()}
        for name, path in files.items():
            if name not in self._header(path).tensors:
                raise SplitError(f"{path}: parameter {name}, which {_INDEX} places here, is missing")
        return files

    def _header(self, path: Path) -> Header:
        if path not in self._headers:
            try:
                self._headers[path] = parse_header(path)
            except BundleError as error:
                raise SplitError(str(error)) from error
        return self._headers[path]

    def _json_if_there(self, name: str) -> dict[str, Any]:
        return self._json(name) if (self._folder / name).exists() else {}

    def _json(self, name: str) -> dict[str, Any]:
        path = self._folder / name
        try:
            return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        except OSError as error:
            raise SplitError(f"{path}: {error.strerror or error}") from error
        except UNREADABLE as error:
            raise SplitError(f"{path}: garbled JSON: {error}") from error


def _text(token: object) -> str:
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else ""


def _ids(value: object) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [v for v in values if isinstance(v, int) and not isinstance(v, bool)]


def _adds_bos(tokenizer: dict[str, Any], texts: dict[str, Any]) -> bool:
    """Whether prompts start with the bos token: asked for, or done by the post-processor."""
    if texts.get("add_bos_token"):
        return True
    bos = _text(texts.get("bos_token"))
    return bool(bos) and f'"{bos}"'.encode() in msgspec.json.encode(tokenizer.get("post_processor"))
