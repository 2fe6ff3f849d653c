"""Names, shapes and file order of BERT's parameters.

q, k, v lie side by side, weights and then biases, so that a loader views them as one matrix.
"""

from __future__ import annotations

from keystage.models.base import StageRole, StageTensor
from keystage.models.bert_config import BertConfig

EMBEDDING = "embeddings.word_embeddings.weight"
POSITIONS = "embeddings.position_embeddings.weight"
TYPES = "embeddings.token_type_embeddings.weight"
EMBEDDING_NORM = "embeddings.LayerNorm"
TRANSFORM = "cls.predictions.transform.dense"
TRANSFORM_NORM = "cls.predictions.transform.LayerNorm"
HEAD = "cls.predictions.decoder.weight"
HEAD_BIAS = "cls.predictions.bias"
_UNTIED_BIAS = "cls.predictions.decoder.bias"
"""Where a head of its own has its bias; a tied one has it as `HEAD_BIAS`, and here again."""
_UNUSED = ("embeddings.position_ids", "pooler.dense.weight", "pooler.dense.bias", HEAD_BIAS, _UNTIED_BIAS)
"""Not parameters, not looked at by what is served here, or the other name of the head's bias."""
_UNUSED_PREFIX = "cls.seq_relationship."


def prefix(config: BertConfig) -> str:
    """What the encoder's names begin with."""
    return "bert." if config.fills_masks else ""


def layer_prefix(config: BertConfig, layer: int) -> str:
    """What the names of a layer's parameters begin with, dot included."""
    return f"{prefix(config)}encoder.layer.{layer}."


def layer_tensors(config: BertConfig, layer: int) -> list[StageTensor]:
    """Parameters of one layer, in file order."""
    hidden, width, start = config.hidden_size, config.mlp_size, layer_prefix(config, layer)
    attention = [f"{start}attention.self.{part}" for part in ("query", "key", "value")]
    return [
        *(_same(f"{name}.weight", hidden, hidden) for name in attention),
        *(_same(f"{name}.bias", hidden) for name in attention),
        *_dense(f"{start}attention.output.dense", hidden, hidden),
        *_norm(f"{start}attention.output.LayerNorm", hidden),
        *_dense(f"{start}intermediate.dense", width, hidden),
        *_dense(f"{start}output.dense", hidden, width),
        *_norm(f"{start}output.LayerNorm", hidden),
    ]


def first_tensors(config: BertConfig) -> list[StageTensor]:
    """Parameters of the embeddings, in file order."""
    hidden, start = config.hidden_size, prefix(config)
    return [
        _same(start + EMBEDDING, config.vocab_size, hidden),
        _same(start + POSITIONS, config.positions, hidden),
        _same(start + TYPES, config.token_types, hidden),
        *_norm(start + EMBEDDING_NORM, hidden),
    ]


def last_tensors(config: BertConfig, *, holds_embedding: bool) -> list[StageTensor]:
    """Parameters of the head, in file order: none for embeddings.

    Args:
        config: of the model.
        holds_embedding: whether the stage has the embedding's matrix already, which a tied head shares.
    """
    if not config.fills_masks:
        return []
    hidden, matrix = config.hidden_size, (config.vocab_size, config.hidden_size)
    tensors = [*_dense(TRANSFORM, hidden, hidden), *_norm(TRANSFORM_NORM, hidden)]
    bias = HEAD_BIAS if config.is_tied else _UNTIED_BIAS
    tensors.append(StageTensor(HEAD_BIAS, bias, (config.vocab_size,)))
    if not config.is_tied:
        tensors.append(StageTensor(HEAD, HEAD, matrix))
    elif not holds_embedding:
        tensors.append(StageTensor(HEAD, prefix(config) + EMBEDDING, matrix))
    return tensors


def stage_tensors(config: BertConfig, role: StageRole) -> list[StageTensor]:
    """Parameters of a stage, in file order; a tied matrix is held by both ends, once by a single stage."""
    tensors = first_tensors(config) if role.is_first else []
    for layer in range(role.first_layer, role.end_layer):
        tensors += layer_tensors(config, layer)
    return tensors + (last_tensors(config, holds_embedding=role.is_first) if role.is_last else [])


def is_derived(config: BertConfig, name: str) -> bool:
    """Whether a stored parameter may be left out: unused here, or a tied head's copy."""
    if config.is_tied and config.fills_masks and name == HEAD:
        return True
    return name.removeprefix(prefix(config)) in _UNUSED or name.startswith(_UNUSED_PREFIX)


def _same(name: str, *shape: int) -> StageTensor:
    return StageTensor(name, name, shape)


def _dense(name: str, outputs: int, inputs: int) -> list[StageTensor]:
    return [_same(f"{name}.weight", outputs, inputs), _same(f"{name}.bias", outputs)]


def _norm(name: str, width: int) -> list[StageTensor]:
    return [_same(f"{name}.weight", width), _same(f"{name}.bias", width)]
