"""A Whisper model as CTranslate2 stores it: `model.bin`, `config.json`, `tokenizer.json` in one folder.

The file (version 6) is a list of named arrays without an index; opening walks over their headers only.
Names and shapes become those of a Hugging Face folder: q, k, v lie fused in the file and are cut apart,
and k's bias, which Whisper does not have, must be zero there. All integers are little-endian.

Layout: u32 version, text specification, u32 revision, u32 number of arrays; per array: text name, u8 rank,
u32 per axis, u8 element type, u32 bytes, the elements; u32 number of aliases; per alias: text, text.
A text is u16 bytes, then as many bytes, the last of them zero.
"""

from __future__ import annotations

import math
import re
import shutil
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import msgspec

from keystage.bundle.errors import SplitError
from keystage.bundle.source import Vocabulary, added_tokens
from keystage.wire.unreadable import UNREADABLE

if TYPE_CHECKING:
    import torch

MODEL_FILE = "model.bin"
_TOKENIZER = "tokenizer.json"
_VERSION, _SPECIFICATION = 6, "WhisperSpec"
_FLOATS = {0: "float32", 4: "float16", 5: "bfloat16"}
_ITEM_BYTES = {0: 4, 1: 1, 2: 2, 3: 4, 4: 2, 5: 2}
_GELU = 3
_ARRAYS_MOST = 1 << 16

_PLAIN = {
    "encoder/conv1/": "model.encoder.conv1.",
    "encoder/conv2/": "model.encoder.conv2.",
    "encoder/layer_norm/": "model.encoder.layer_norm.",
    "decoder/layer_norm/": "model.decoder.layer_norm.",
}
_TABLES = {
    "encoder/position_encodings/encodings": "model.encoder.embed_positions.weight",
    "decoder/position_encodings/encodings": "model.decoder.embed_positions.weight",
    "decoder/embeddings/weight": "model.decoder.embed_tokens.weight",
}
_KINDS = {"weight": "weight", "bias": "bias", "gamma": "weight", "beta": "bias"}
_LAYER = re.compile(r"(encoder|decoder)/layer_(\d+)/(.+)/(weight|bias|gamma|beta)")
_PARTS = {
    "self_attention/layer_norm": ("self_attn_layer_norm",),
    "self_attention/linear_0": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attention/linear_1": ("self_attn.out_proj",),
    "attention/layer_norm": ("encoder_attn_layer_norm",),
    "attention/linear_0": ("encoder_attn.q_proj",),
    "attention/linear_1": ("encoder_attn.k_proj", "encoder_attn.v_proj"),
    "attention/linear_2": ("encoder_attn.out_proj",),
    "ffn/layer_norm": ("final_layer_norm",),
    "ffn/linear_0": ("fc1",),
    "ffn/linear_1": ("fc2",),
}


@dataclass(frozen=True, slots=True)
class _Array:
    """One array of the file: its shape, element type, and where its bytes lie."""

    shape: tuple[int, ...]
    kind: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a parameter lies: rows [first, first + shape[0]) of an array."""

    array: str
    shape: tuple[int, ...]
    first: int


def is_ctranslate2(folder: Path) -> bool:
    """Whether a folder holds a CTranslate2 model and no safetensors."""
    return (folder / MODEL_FILE).is_file() and not any(folder.glob("*.safetensors"))


class Ctranslate2Source:
    """See `keystage.bundle.source.ModelSource`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = folder / MODEL_FILE
        self._arrays: dict[str, _Array] = {}
        self._places: dict[str, _Place] = {}
        self.words = f"CTranslate2 {folder.resolve().name}"

    def config(self) -> dict[str, Any]:
        """See `ModelSource.config`: sizes from the arrays, suppressed tokens from `config.json`."""
        shapes = self.shapes()
        for name, wanted in (("decoder/activation", _GELU), ("decoder/pre_norm", 1), ("decoder/alibi", 0)):
            if name in self._arrays and self._scalar(name) != wanted:
                raise SplitError(
                    f"{self._path}: {name} is {self._scalar(name)}, only {wanted} is implemented"
                )
        own = self._json("config.json")
        tokens = self._tokens()
        end = tokens.get("<|endoftext|>")
        vocab_size, hidden = self._shape("model.decoder.embed_tokens.weight")
        config: dict[str, Any] = {
            "architectures": ["WhisperForConditionalGeneration"],
            "model_type": "whisper",
            "activation_function": "gelu",
            "d_model": hidden,
            "num_mel_bins": self._shape("model.encoder.conv1.weight")[1],
            "max_source_positions": self._shape("model.encoder.embed_positions.weight")[0],
            "max_target_positions": self._shape("model.decoder.embed_positions.weight")[0],
            "vocab_size": vocab_size,
            "scale_embedding": bool(self._scalar("decoder/scale_embeddings")),
            "decoder_start_token_id": tokens.get("<|startoftranscript|>"),
            "eos_token_id": end,
            "suppress_tokens": own.get("suppress_ids", []),
            "begin_suppress_tokens": own.get("suppress_ids_begin", []),
        }
        for part in ("encoder", "decoder"):
            prefix = f"model.{part}.layers."
            layers = {name.removeprefix(prefix).split(".")[0] for name in shapes if name.startswith(prefix)}
            config[f"{part}_layers"] = len(layers)
            config[f"{part}_attention_heads"] = self._scalar(f"{part}/num_heads")
            config[f"{part}_ffn_dim"] = self._shape(f"{prefix}0.fc1.weight")[0]
        return config

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """See `ModelSource.shapes`."""
        self._open()
        return {name: place.shape for name, place in self._places.items()}

    def read(self, name: str) -> torch.Tensor:
        """See `ModelSource.read`."""
        import torch

        self._open()
        place = self._places.get(name)
        if place is None:
            raise SplitError(f"{self._path}: parameter {name} is missing")
        array = self._arrays[place.array]
        row_bytes = array.nbytes // array.shape[0]
        buffer = torch.empty(place.shape[0] * row_bytes, dtype=torch.uint8)
        with self._path.open("rb") as file:
            file.seek(array.offset + place.first * row_bytes)
            if file.readinto(buffer.numpy().data) != len(buffer):
                raise SplitError(f"{self._path}: truncated in {place.array}")
        return buffer.view(getattr(torch, _FLOATS[array.kind])).view(place.shape)

    def write_vocabulary(self, folder: Path) -> Vocabulary:
        """See `ModelSource.write_vocabulary`."""
        tokens = self._tokens()
        shutil.copyfile(self._folder / _TOKENIZER, folder / _TOKENIZER)
        end = tokens.get("<|endoftext|>")
        special = {"eos_token": "<|endoftext|>"} if end is not None else {}
        return Vocabulary(_TOKENIZER, special_tokens=special, eos=() if end is None else (end,))

    # ------------------------------------------------------------ inside

    def _open(self) -> None:
        if self._places:
            return
        try:
            with self._path.open("rb") as file:
                self._arrays = _read_headers(file, self._path)
        except OSError as error:
            raise SplitError(f"{self._path}: {error.strerror or error}") from error
        except (struct.error, UnicodeDecodeError) as error:
            raise SplitError(f"{self._path}: truncated or no CTranslate2 model: {error}") from error
        for stored, array in self._arrays.items():
            if array.shape:
                self._place(stored, array)

    def _place(self, stored: str, array: _Array) -> None:
        """Notes which parameters an array holds; whole numbers that are settings hold none."""
        names = _names(stored)
        if not names:
            if array.kind in _FLOATS:
                self._places[stored] = _Place(stored, array.shape, 0)  # for whoever checks that none is left
            return
        if array.kind not in _FLOATS:
            raise SplitError(f"{self._path}: {stored} is quantised; fp32, fp16 and bf16 can be read")
        rows, rest = divmod(array.shape[0], len(names))
        if rest:
            raise SplitError(
                f"{self._path}: {stored} of shape {list(array.shape)} holds {len(names)} matrices"
            )
        for part, name in enumerate(names):
            if name.endswith(".k_proj.bias"):
                self._check_zero(stored, array, part * rows, rows)
                continue
            self._places[name] = _Place(stored, (rows, *array.shape[1:]), part * rows)

    def _check_zero(self, stored: str, array: _Array, first: int, rows: int) -> None:
        item = _ITEM_BYTES[array.kind]
        with self._path.open("rb") as file:
            file.seek(array.offset + first * item)
            if any(file.read(rows * item)):
                raise SplitError(f"{self._path}: {stored} has a bias of k, which Whisper does not have")

    def _shape(self, name: str) -> tuple[int, ...]:
        place = self._places.get(name)
        if place is None:
            raise SplitError(f"{self._path}: parameter {name} is missing")
        return place.shape

    def _scalar(self, name: str) -> int:
        array = self._arrays.get(name)
        if array is None or array.shape or array.kind not in (1, 2, 3):
            raise SplitError(f"{self._path}: setting {name} is missing or no whole number")
        with self._path.open("rb") as file:
            file.seek(array.offset)
            return int.from_bytes(file.read(array.nbytes), "little", signed=True)

    def _tokens(self) -> dict[str, int]:
        """Ids of the special tokens."""
        return added_tokens(self._json(_TOKENIZER))

    def _json(self, name: str) -> dict[str, Any]:
        path = self._folder / name
        try:
            return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        except OSError as error:
            raise SplitError(f"{path}: {error.strerror or error}") from error
        except UNREADABLE as error:
            raise SplitError(f"{path}: garbled JSON: {error}") from error


def _names(stored: str) -> list[str]:
    """The parameters that an array holds, one below the other; none for a setting."""
    if stored in _TABLES:
        return [_TABLES[stored]]
    for prefix, name in _PLAIN.items():
        if stored.startswith(prefix) and (kind := _KINDS.get(stored.removeprefix(prefix))):
            return [name + kind]
    match = _LAYER.fullmatch(stored)
    if match is None or match[3] not in _PARTS:
        return []
    return [f"model.{match[1]}.layers.{match[2]}.{part}.{_KINDS[match[4]]}" for part in _PARTS[match[3]]]


def _read_headers(file: BinaryIO, path: Path) -> dict[str, _Array]:
    (version,) = _unpack(file, "<I")
    if version != _VERSION:
        raise SplitError(f"{path}: CTranslate2 file version {version}, only {_VERSION} is read")
    specification = _text(file)
    if specification != _SPECIFICATION:
        raise SplitError(f"{path}: a {specification}, only {_SPECIFICATION} is read")
    _, count = _unpack(file, "<II")
    if count > _ARRAYS_MOST:
        raise SplitError(f"{path}: {count} arrays, at most {_ARRAYS_MOST} are read")
    size = path.stat().st_size
    arrays: dict[str, _Array] = {}
    for _ in range(count):
        name = _text(file)
        (rank,) = _unpack(file, "<B")
        shape = _unpack(file, f"<{rank}I")
        kind, nbytes = _unpack(file, "<BI")
        if 0 in shape:
            raise SplitError(f"{path}: {name} of shape {list(shape)} has no elements")
        if kind not in _ITEM_BYTES or nbytes != math.prod(shape) * _ITEM_BYTES[kind]:
            raise SplitError(f"{path}: {name} of shape {list(shape)}, type {kind} has {nbytes} bytes")
        offset = file.tell()
        if offset + nbytes > size:
            raise SplitError(f"{path}: truncated: {name} ends at {offset + nbytes} of {size} bytes")
        arrays[name] = _Array(shape, kind, offset, nbytes)
        file.seek(nbytes, 1)
    return arrays


def _text(file: BinaryIO) -> str:
    (length,) = _unpack(file, "<H")
    raw = file.read(length)
    if len(raw) != length:
        raise struct.error(f"a text of {length} bytes is cut off")
    return raw.rstrip(b"\0").decode()


def _unpack(file: BinaryIO, form: str) -> tuple[int, ...]:
    return struct.unpack(form, file.read(struct.calcsize(form)))
