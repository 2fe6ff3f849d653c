"""Tiny random models of every decoder family, as transformers builds them."""

from __future__ import annotations

from typing import Any

import torch

VOCAB = 97
CONTEXT = 128
_ROTARY: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.2,
}
_OPT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "ffn_dim": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "max_position_embeddings": CONTEXT,
    "word_embed_proj_dim": 48,
    "init_std": 0.2,
}
_GPT2: dict[str, Any] = {
    "vocab_size": VOCAB,
    "n_embd": 48,
    "n_layer": 4,
    "n_head": 6,
    "n_positions": CONTEXT,
    "bos_token_id": 2,
    "eos_token_id": 2,
    "initializer_range": 0.2,
}
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral-window": ("Mistral", {"sliding_window": 8, "tie_word_embeddings": True}),
    "mistral-head-dim": ("Mistral", {"sliding_window": 1000, "head_dim": 12}),
    "qwen2": ("Qwen2", {}),
    "qwen2-tied": ("Qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 11, "max_window_layers": 0}),
    "qwen2-late-window": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 11, "max_window_layers": 4},
    ),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3-biased": ("Qwen3", {"head_dim": 6, "attention_bias": True, "tie_word_embeddings": True}),
    "opt": ("OPT", {}),
    "opt-untied": ("OPT", {"tie_word_embeddings": False, "activation_function": "gelu"}),
    "opt-without-bias": ("OPT", {"enable_bias": False}),
    "gpt2": ("GPT2", {}),
    "gpt2-untied": ("GPT2", {"tie_word_embeddings": False, "n_inner": 100, "layer_norm_epsilon": 1e-3}),
    "yarn": ("Llama", {"rope_parameters": _YARN}),
    "yarn-mscale": (
        "Qwen3",
        {
            "head_dim": 16,
            "rope_parameters": {**_YARN, "mscale": 0.7, "mscale_all_dim": 1.3, "truncate": False},
        },
    ),
    "yarn-betas": (
        "Qwen2",
        {"rope_parameters": {**_YARN, "attention_factor": 0.8, "beta_fast": 3.0, "beta_slow": 0.5}},
    ),
    "dynamic": (
        "Llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}},
    ),
}


def decoder(variant: str, **changes: Any) -> Any:
    """A random model in fp32; the same one for the same arguments."""
    import transformers

    torch.manual_seed(1)
    kind, own = VARIANTS[variant]
    base = {"OPT": _OPT, "GPT2": _GPT2}.get(kind, _ROTARY)
    name = "GPT2LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM"
    config = getattr(transformers, f"{kind}Config")(**{"architectures": [name], **base, **own, **changes})
    model = getattr(transformers, name)(config).eval()
    # Norms and biases begin as ones and zeros, which would hide that one is left out.
    for label, parameter in model.named_parameters():
        if label.endswith("bias"):
            torch.nn.init.normal_(parameter, 0.0, 0.2)
        elif parameter.dim() == 1:
            torch.nn.init.normal_(parameter, 1.0, 0.2)
    return model
