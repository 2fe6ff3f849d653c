"""Names, shapes and file order of Whisper's parameters.

Layers are counted encoder first, then decoder. q, k, v (of the encoder's and the tokens' attention)
and k, v (of the attention to frames) lie side by side, so that a loader views them as one matrix.
k has no bias.
"""

from __future__ import annotations

from keystage.models.base import StageRole, StageTensor
from keystage.models.whisper_config import WhisperConfig

EMBEDDING = "model.decoder.embed_tokens.weight"
TEXT_POSITIONS = "model.decoder.embed_positions.weight"
FRAME_POSITIONS = "model.encoder.embed_positions.weight"
CONVOLUTIONS = ("model.encoder.conv1", "model.encoder.conv2")
ENCODER_NORM = "model.encoder.layer_norm"
FINAL_NORM = "model.decoder.layer_norm"
HEAD = "proj_out.weight"

Shapes = list[tuple[str, tuple[int, ...]]]


def layer_prefix(config: WhisperConfig, layer: int) -> str:
    """What the names of a layer's parameters begin with, dot included."""
    if layer < config.encoder_layers:
        return f"model.encoder.layers.{layer}."
    return f"model.decoder.layers.{layer - config.encoder_layers}."


def layer_shapes(config: WhisperConfig, layer: int) -> Shapes:
    """Parameters of one layer in file order, names without the layer's prefix."""
    hidden = config.hidden_size
    is_encoder = layer < config.encoder_layers
    width = config.encoder_mlp_size if is_encoder else config.decoder_mlp_size
    shapes = [*_norm("self_attn_layer_norm", hidden), *_attention("self_attn", hidden, "qkv")]
    if not is_encoder:
        shapes += [*_norm("encoder_attn_layer_norm", hidden), *_attention("encoder_attn", hidden, "kv")]
        shapes += [("encoder_attn.q_proj.weight", (hidden, hidden)), ("encoder_attn.q_proj.bias", (hidden,))]
    shapes += _norm("final_layer_norm", hidden)
    shapes += [("fc1.weight", (width, hidden)), ("fc1.bias", (width,))]
    shapes += [("fc2.weight", (hidden, width)), ("fc2.bias", (hidden,))]
    return shapes


def stage_tensors(config: WhisperConfig, role: StageRole) -> list[StageTensor]:
    """Parameters of a stage, in file order.

    The first stage holds the convolutions, both tables of positions and the embedding; the stage
    with the encoder's last layer its norm; the last stage the decoder's norm and the embedding again
    as its head, unless it is the first one too.
    """
    hidden = config.hidden_size
    shapes: Shapes = []
    if role.is_first:
        for name, inputs in zip(CONVOLUTIONS, (config.mels, hidden), strict=True):
            shapes += [(f"{name}.weight", (hidden, inputs, 3)), (f"{name}.bias", (hidden,))]
        shapes += [(FRAME_POSITIONS, (config.frames, hidden))]
        shapes += [
            (EMBEDDING, (config.vocab_size, hidden)),
            (TEXT_POSITIONS, (config.token_positions, hidden)),
        ]
    for layer in range(role.first_layer, role.end_layer):
        prefix = layer_prefix(config, layer)
        shapes += [(prefix + name, shape) for name, shape in layer_shapes(config, layer)]
        if layer == config.encoder_layers - 1:
            shapes += _norm(ENCODER_NORM, hidden)
    if role.is_last:
        shapes += _norm(FINAL_NORM, hidden)
    tensors = [StageTensor(name, name, shape) for name, shape in shapes]
    if role.is_last and not role.is_first:
        tensors.append(StageTensor(HEAD, EMBEDDING, (config.vocab_size, hidden)))
    return tensors


def end_parameters(config: WhisperConfig) -> tuple[int, int]:
    """Parameters that the first and the last stage hold beside their layers."""
    hidden = config.hidden_size
    matrix = config.vocab_size * hidden
    convolutions = (config.mels + hidden) * hidden * 3 + 2 * hidden
    positions = (config.frames + config.token_positions) * hidden
    return matrix + convolutions + positions, matrix + 2 * hidden


def _norm(name: str, hidden: int) -> Shapes:
    return [(f"{name}.weight", (hidden,)), (f"{name}.bias", (hidden,))]


def _attention(name: str, hidden: int, parts: str) -> Shapes:
    shapes: Shapes = [(f"{name}.{part}_proj.weight", (hidden, hidden)) for part in parts]
    shapes += [(f"{name}.{part}_proj.bias", (hidden,)) for part in parts if part != "k"]
    return [*shapes, (f"{name}.out_proj.weight", (hidden, hidden)), (f"{name}.out_proj.bias", (hidden,))]
