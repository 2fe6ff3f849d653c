"""A GGUF file of the llama architecture as a source: dequantised tensor by tensor.

GGUF stores the rows of q and k in another order (pairs of a rotation side by side); reading
turns them back, and names and metadata become those of a Hugging Face folder. Needs the package
`gguf`, which is imported on first use.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keystage.bundle import gguf_check
from keystage.bundle.errors import SplitError
from keystage.bundle.gguf_tokenizer import write_tokenizer
from keystage.bundle.source import Vocabulary
from keystage.models.config_fields import shown

if TYPE_CHECKING:
    import gguf
    import torch

_GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FACTORS = "rope_freqs.weight"
_LLAMA3_FACTORS = (8.0, 32.0)


class GgufSource:
    """See `keystage.bundle.source.ModelSource`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._opened: gguf.GGUFReader | None = None
        self._tensors: dict[str, gguf.ReaderTensor] = {}
        self.words = f"GGUF {path.name}"

    def config(self) -> dict[str, Any]:
        """See `ModelSource.config`."""
        architecture = self._field("general.architecture", str)
        if architecture != "llama":
            raise SplitError(f"{self._path}: architecture {architecture!r} is unknown: known is llama")
        shapes = self.shapes()
        heads = self._needed("llama.attention.head_count", int)
        config: dict[str, Any] = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            "hidden_size": self._needed("llama.embedding_length", int),
            "intermediate_size": self._needed("llama.feed_forward_length", int),
            "max_position_embeddings": self._needed("llama.context_length", int),
            "num_attention_heads": heads,
            "num_hidden_layers": self._needed("llama.block_count", int),
            "num_key_value_heads": self._field("llama.attention.head_count_kv", int) or heads,
            "rms_norm_eps": _shortest(self._needed("llama.attention.layer_norm_rms_epsilon", float)),
            "rope_theta": self._field("llama.rope.freq_base", float) or 10000.0,
            "tie_word_embeddings": "lm_head.weight" not in shapes,
            "vocab_size": shapes.get("model.embed_tokens.weight", (0,))[0],
            "bos_token_id": self._field("tokenizer.ggml.bos_token_id", int),
            "eos_token_id": self._field("tokenizer.ggml.eos_token_id", int),
        }
        if (head_dim := self._field("llama.attention.key_length", int)) is not None:
            config["head_dim"] = head_dim
        if (scaling := self._rope_scaling(config)) is not None:
            config["rope_scaling"] = scaling
        return config

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """See `ModelSource.shapes`."""
        self._reader()
        return {name: _shape(tensor) for name, tensor in self._tensors.items() if name != _ROPE_FACTORS}

    def read(self, name: str) -> torch.Tensor:
        """See `ModelSource.read`."""
        import gguf
        import torch

        self._reader()
        tensor = self._tensors.get(name)
        if tensor is None:
            raise SplitError(f"{self._path}: parameter {name} is missing")
        try:
            values = gguf.dequantize(tensor.data, tensor.tensor_type)
        except (NotImplementedError, ValueError) as error:
            raise SplitError(f"{self._path}: parameter {name}: {error}") from error
        owned = values.astype("float32", copy=not values.flags.writeable)
        found = torch.from_numpy(owned).view(_shape(tensor))
        if ".q_proj." in name:
            return self._halves_apart(name, found, self._needed("llama.attention.head_count", int))
        if ".k_proj." in name:
            heads = self._field("llama.attention.head_count_kv", int)
            return self._halves_apart(name, found, heads or self._needed("llama.attention.head_count", int))
        return found

    def write_vocabulary(self, folder: Path) -> Vocabulary:
        """See `ModelSource.write_vocabulary`."""
        tokens = self._field("tokenizer.ggml.tokens", list)
        template = self._field("tokenizer.chat_template", str)
        if not tokens:
            return Vocabulary(chat_template=template or "")
        write_tokenizer(self._path, self._field, folder)
        ids = {
            key: self._token_id(word, len(tokens))
            for key, word in (
                ("bos_token", "bos"),
                ("eos_token", "eos"),
                ("unk_token", "unknown"),
                ("pad_token", "padding"),
            )
        }
        special = {key: tokens[number] for key, number in ids.items() if number is not None}
        ends = [ids["eos_token"], self._token_id("eot", len(tokens))]
        is_spm = self._field("tokenizer.ggml.model", str) == "llama"
        adds_bos = self._field("tokenizer.ggml.add_bos_token", int)
        return Vocabulary(
            file="tokenizer.json",
            chat_template=template or "",
            special_tokens=special,
            eos=tuple(dict.fromkeys(number for number in ends if number is not None)),
            bos=ids["bos_token"] if adds_bos or (adds_bos is None and is_spm) else None,
        )

    def _reader(self) -> gguf.GGUFReader:
        if self._opened is None:
            try:
                import gguf
            except ImportError as error:
                raise SplitError(f"{self._path}: reading GGUF needs: pip install gguf") from error
            try:
                gguf_check.check(self._path)
                self._opened = gguf.GGUFReader(self._path)
            except (ValueError, IndexError, KeyError, OverflowError, TypeError, OSError) as error:
                raise SplitError(f"{self._path}: truncated or no GGUF file: {error}") from error
            self._tensors = {_name(tensor.name): tensor for tensor in self._opened.tensors}
        return self._opened

    def _field(self, key: str, kind: type) -> Any:
        """Metadata of a type (a `float` may be whole), None: there is none."""
        field = self._reader().get_field(key)
        if field is None:
            return None
        try:
            value = field.contents()
        except (ValueError, IndexError, TypeError) as error:
            raise SplitError(f"{self._path}: metadata {key} cannot be read: {error}") from error
        if not isinstance(value, (int, float) if kind is float else kind):
            raise SplitError(f"{self._path}: metadata {key} is {shown(value)}, expected {kind.__name__}")
        return value

    def _token_id(self, word: str, tokens: int) -> int | None:
        number: int | None = self._field(f"tokenizer.ggml.{word}_token_id", int)
        if number is not None and not 0 <= number < tokens:
            raise SplitError(f"{self._path}: {word}_token_id is {number}, there are {tokens} tokens")
        return number

    def _needed(self, key: str, kind: type) -> Any:
        value = self._field(key, kind)
        if value is None:
            raise SplitError(f"{self._path}: metadata {key} is missing")
        return value

    def _halves_apart(self, name: str, weight: torch.Tensor, heads: int) -> torch.Tensor:
        """Undoes GGUF's row order: x_i and x_{i + d/2} of a head lie interleaved there."""
        rows, *rest = weight.shape
        if heads < 1 or rows % (2 * heads):
            raise SplitError(
                f"{self._path}: {name} has {rows} rows, no even number for each of {heads} heads"
            )
        return weight.view(heads, rows // heads // 2, 2, *rest).transpose(1, 2).reshape(weight.shape)

    def _rope_scaling(self, config: dict[str, Any]) -> dict[str, Any] | None:
        kind = self._field("llama.rope.scaling.type", str) or "none"
        if kind == "linear":
            return {"rope_type": "linear", "factor": self._needed("llama.rope.scaling.factor", float)}
        if kind != "none":
            raise SplitError(f"{self._path}: rope scaling {kind!r} is not supported: use none or linear")
        if _ROPE_FACTORS in self._tensors:
            return self._llama3_scaling(config)
        return None

    def _llama3_scaling(self, config: dict[str, Any]) -> dict[str, Any]:
        """The llama3 scaling whose frequency factors are those in the file."""
        import torch

        from keystage.models.decoder_config import RopeScaling
        from keystage.models.rope import frequencies

        stored = torch.from_numpy(self._tensors[_ROPE_FACTORS].data.copy()).to(torch.float32)
        theta = config["rope_theta"]
        plain = frequencies(2 * stored.numel(), theta, RopeScaling())
        for factor in _LLAMA3_FACTORS:
            scaling = RopeScaling("llama3", factor)
            scaled = frequencies(2 * stored.numel(), theta, scaling)
            if torch.allclose(plain / scaled, stored, rtol=1e-3):
                return {
                    "rope_type": "llama3",
                    "factor": factor,
                    "low_freq_factor": scaling.low_freq_factor,
                    "high_freq_factor": scaling.high_freq_factor,
                    "original_max_position_embeddings": scaling.original_context,
                }
        raise SplitError(f"{self._path}: {_ROPE_FACTORS} belongs to no known rope scaling")


def _name(stored: str) -> str:
    """GGUF tensor name to Hugging Face name; unknown names stay."""
    if stored in _GLOBAL_NAMES:
        return _GLOBAL_NAMES[stored]
    parts = stored.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _LAYER_NAMES:
        return f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.{parts[3]}"
    return stored


def _shape(tensor: gguf.ReaderTensor) -> tuple[int, ...]:
    """Rows first; GGUF states the fastest axis first."""
    return tuple(int(size) for size in reversed(tensor.shape.tolist()))


def _shortest(value: float) -> float:
    """A float32 as the decimal it was written from: 9.99999974e-06 is 1e-05."""
    rounded = float(f"{value:.6g}")
    return rounded if math.isclose(rounded, value, rel_tol=1e-6) else value
