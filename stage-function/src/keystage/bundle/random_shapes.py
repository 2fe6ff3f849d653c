"""Shapes of real models for random parameters: what stands behind `random:<shape>`.

Each shape is a config.json as the model's folder has it. The `-tiny` ones (and `whisper-mini`) are small
ones of each family, for tests and for `make run` in seconds. No shape names a token that ends a text, so
that answers have the length that was asked for. Vocabularies hold at least the 256 ids of raw bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from keystage.bundle.errors import SplitError

PREFIX = "random:"


def _llama(
    hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, vocab: int, context: int, **more: Any
) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        **more,
    }


def _opt(hidden: int, mlp: int, layers: int, heads: int, vocab: int, context: int) -> dict[str, Any]:
    return {
        "architectures": ["OPTForCausalLM"],
        "model_type": "opt",
        "activation_function": "relu",
        "do_layer_norm_before": True,
        "hidden_size": hidden,
        "word_embed_proj_dim": hidden,
        "ffn_dim": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "vocab_size": vocab,
        "max_position_embeddings": context,
        "tie_word_embeddings": True,
    }


def _gpt2(hidden: int, layers: int, heads: int, vocab: int, context: int) -> dict[str, Any]:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "n_embd": hidden,
        "n_layer": layers,
        "n_head": heads,
        "n_positions": context,
        "n_ctx": context,
        "vocab_size": vocab,
        "tie_word_embeddings": True,
    }


def _bert(hidden: int, mlp: int, layers: int, heads: int, vocab: int, context: int) -> dict[str, Any]:
    return {
        "architectures": ["BertModel"],
        "model_type": "bert",
        "hidden_act": "gelu",
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "vocab_size": vocab,
        "max_position_embeddings": context,
        "type_vocab_size": 2,
        "layer_norm_eps": 1e-12,
        "position_embedding_type": "absolute",
        "sentence_transformers": {"pooling": "mean", "normalize": True, "max_tokens": context},
    }


def _whisper(
    width: int, mlp: int, layers: int, heads: int, vocab: int = 51865, targets: int = 448
) -> dict[str, Any]:
    return {
        "architectures": ["WhisperForConditionalGeneration"],
        "model_type": "whisper",
        "activation_function": "gelu",
        "d_model": width,
        "encoder_layers": layers,
        "decoder_layers": layers,
        "encoder_attention_heads": heads,
        "decoder_attention_heads": heads,
        "encoder_ffn_dim": mlp,
        "decoder_ffn_dim": mlp,
        "num_mel_bins": 80,
        "max_source_positions": 1500,
        "max_target_positions": targets,
        "vocab_size": vocab,
        "scale_embedding": False,
        "tie_word_embeddings": True,
    }


def _wide_resnet(layers: list[int], width: int, classes: int) -> dict[str, Any]:
    return {
        "architectures": ["WideResNet"],
        "model_type": "wide_resnet",
        "layers": layers,
        "width_per_group": width,
        "num_classes": classes,
    }


SHAPES: Mapping[str, Mapping[str, Any]] = {
    "llama-tiny": _llama(64, 160, 4, 4, 2, 512, 512),
    "llama-7b": _llama(4096, 11008, 32, 32, 32, 32000, 8192),  # prompts of 4,096 can be continued
    "llama-13b": _llama(5120, 13824, 40, 40, 40, 32000, 4096),
    "mistral-tiny": _llama(
        64, 160, 4, 4, 2, 512, 512,
        architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=64,
    ),
    "qwen2-tiny": _llama(
        64, 160, 4, 4, 2, 512, 512, architectures=["Qwen2ForCausalLM"], model_type="qwen2"
    ),
    "qwen3-tiny": _llama(
        64, 160, 4, 4, 2, 512, 512, architectures=["Qwen3ForCausalLM"], model_type="qwen3", head_dim=32
    ),
    "opt-tiny": _opt(64, 256, 4, 4, 512, 512),
    "opt-125m": _opt(768, 3072, 12, 12, 50272, 2048),
    "opt-13b": _opt(5120, 20480, 40, 40, 50272, 2048),
    "opt-66b": _opt(9216, 36864, 64, 72, 50272, 2048),
    "gpt2-tiny": _gpt2(64, 4, 4, 512, 512),
    "gpt2": _gpt2(768, 12, 12, 50257, 1024),
    "bert-tiny": _bert(64, 256, 4, 4, 512, 512),
    "bert-large": _bert(1024, 4096, 24, 16, 30522, 512),
    "whisper-mini": _whisper(64, 256, 2, 4, vocab=2048),
    "whisper-tiny": _whisper(384, 1536, 4, 6),
    "whisper-large": _whisper(1280, 5120, 32, 20),
    "wide_resnet-tiny": _wide_resnet([1, 1, 1, 1], 16, 16),
    "wide_resnet50_2": _wide_resnet([3, 4, 6, 3], 128, 1000),
}  # fmt: skip
"""config.json by name of the shape."""


def shape_config(shape: str) -> dict[str, Any]:
    """The config.json of a shape.

    Raises:
        SplitError: unknown shape; names the known ones.
    """
    if shape not in SHAPES:
        raise SplitError(f"model {PREFIX + shape!r}: unknown shape, known are {', '.join(SHAPES)}")
    return dict(SHAPES[shape])
