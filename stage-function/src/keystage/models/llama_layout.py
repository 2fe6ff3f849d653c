"""Names, shapes and file order of a Llama model's parameters.

The order in a stage's file is chosen so that q, k, v (and gate, up) lie side by side: a loader
views them as one matrix, without a copy, and runs one multiplication for them.
"""

from __future__ import annotations

from keystage.models.base import StageRole, StageTensor
from keystage.models.llama_config import LlamaConfig

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"


def layer_tensors(config: LlamaConfig, layer: int) -> list[StageTensor]:
    """Parameters of one layer, in file order."""
    hidden, width = config.hidden_size, config.intermediate_size
    query, keyed = config.heads * config.head_dim, config.kv_heads * config.head_dim
    shapes: list[tuple[str, tuple[int, ...]]] = [("input_layernorm.weight", (hidden,))]
    attention = [("q_proj", query), ("k_proj", keyed), ("v_proj", keyed)]
    shapes += [(f"self_attn.{part}.weight", (rows, hidden)) for part, rows in attention]
    shapes.append(("self_attn.o_proj.weight", (hidden, query)))
    if config.has_attention_bias:
        shapes += [(f"self_attn.{part}.bias", (rows,)) for part, rows in attention]
        shapes.append(("self_attn.o_proj.bias", (hidden,)))
    shapes.append(("post_attention_layernorm.weight", (hidden,)))
    shapes += [("mlp.gate_proj.weight", (width, hidden)), ("mlp.up_proj.weight", (width, hidden))]
    shapes.append(("mlp.down_proj.weight", (hidden, width)))
    if config.has_mlp_bias:
        shapes += [("mlp.gate_proj.bias", (width,)), ("mlp.up_proj.bias", (width,))]
        shapes.append(("mlp.down_proj.bias", (hidden,)))
    names = [(f"model.layers.{layer}.{name}", shape) for name, shape in shapes]
    return [StageTensor(name, name, shape) for name, shape in names]


def stage_tensors(config: LlamaConfig, role: StageRole) -> list[StageTensor]:
    """Parameters of a stage, in file order.

    With tied embeddings the first and the last stage both hold the matrix, the last one under the
    head's name; a single stage that is both holds it once.
    """
    matrix = (config.vocab_size, config.hidden_size)
    tensors: list[StageTensor] = []
    if role.is_first:
        tensors.append(StageTensor(EMBEDDING, EMBEDDING, matrix))
    for layer in range(role.first_layer, role.end_layer):
        tensors += layer_tensors(config, layer)
    if role.is_last:
        tensors.append(StageTensor(FINAL_NORM, FINAL_NORM, (config.hidden_size,)))
        if not config.is_tied:
            tensors.append(StageTensor(HEAD, HEAD, matrix))
        elif not role.is_first:
            tensors.append(StageTensor(HEAD, EMBEDDING, matrix))
    return tensors


def is_derived(config: LlamaConfig, name: str) -> bool:
    """Whether a stored parameter holds nothing of its own: rotary tables, a tied head's copy."""
    return name.endswith(".rotary_emb.inv_freq") or (config.is_tied and name == HEAD)
