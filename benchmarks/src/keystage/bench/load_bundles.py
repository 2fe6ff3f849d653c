"""Bundles of random parameters for `keystage bench load`: the middle stage of a Llama, of a size asked.

Only the stage that is loaded has a file; the ones around it are described. One block of random numbers
is repeated over all matrices, so that gigabytes are written as fast as the disk takes them; the norms
differ from bundle to bundle and from layer to layer, so that outputs do, too. All values are finite.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from keystage.bundle import store
from keystage.bundle.api import BUNDLE_VERSION, Pipeline, StageSpec
from keystage.bundle.dtypes import ITEM_BYTES
from keystage.bundle.hashing import file_chunks, identity
from keystage.bundle.safetensors_file import header_bytes
from keystage.models.base import StageRole

STAGE = 1
"""Index of the stage that has parameters; 0 and 2 are its neighbours."""
_BLOCK_ITEMS = 8 * 1024 * 1024 - 3
"""Odd, so that no two rows of a matrix are equal."""
_STD = 0.02
_GIB = 1 << 30
_WIDTHS = ((4.0, 4096, 11008, 128), (0.5, 2048, 5632, 128), (0.0, 512, 1408, 64))
"""Least GiB, hidden size, width of the MLP, head size: Llama's proportions."""


def write_bundle(folder: Path, name: str, gib: float, dtype: str, seed: int) -> Pipeline:
    """Writes one bundle.

    Args:
        folder: for the bundle.
        name: pipeline name.
        gib: size of its stage, reached to within half a layer.
        dtype: `float32`, `bfloat16` or `float16`.
        seed: bundles of different seeds compute differently.
    """
    from keystage.models.families import family_named

    _, hidden, width, head = next(w for w in _WIDTHS if gib >= w[0])
    heads = hidden // head
    kv_heads = max(1, heads // 4)
    layer_items = 2 * hidden * (hidden + kv_heads * head) + 3 * hidden * width + 2 * hidden
    layers = max(1, round(gib * _GIB / ITEM_BYTES[dtype] / layer_items))
    config = _config(hidden, width, heads, kv_heads, layers + 2)
    role = StageRole(1, 1 + layers, is_first=False, is_last=False)
    tensors = family_named("llama").stage_tensors(config, role)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"stage-{STAGE:02d}.safetensors"
    block = _block(dtype, seed)
    with path.open("wb") as file:
        file.write(header_bytes({t.name: t.shape for t in tensors}, dtype))
        for number, tensor in enumerate(tensors):
            count = int(np.prod(tensor.shape))
            if len(tensor.shape) == 1:
                file.write(_norm(count, dtype, 1000 * seed + number).data)
                continue
            while count:
                part = block[:count]
                file.write(part.data)
                count -= len(part)
    chunks = file_chunks(path)
    nbytes = path.stat().st_size
    spec = StageSpec(
        STAGE, path.name, (1, 1 + layers), nbytes // ITEM_BYTES[dtype], nbytes, chunks,
        identity(chunks, dtype), hidden * ITEM_BYTES[dtype],
    )  # fmt: skip
    pipeline = _pipeline(name, config, dtype, spec)
    store.write(folder, pipeline)
    return pipeline


def _config(hidden: int, width: int, heads: int, kv_heads: int, layers: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "num_hidden_layers": layers,
        "vocab_size": 1024,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    }


def _pipeline(name: str, config: dict[str, Any], dtype: str, spec: StageSpec) -> Pipeline:
    end = spec.layers[1]
    around = [
        StageSpec(0, "", (0, 1), 0, 0, [], f"{name}-0", spec.activation_bytes),
        spec,
        StageSpec(2, "", (end, end + 1), 0, 0, [], f"{name}-2", spec.activation_bytes),
    ]
    return Pipeline(
        version=BUNDLE_VERSION, name=name, family="llama", execution="looping", dtype=dtype, config=config,
        stages=around, edges=[(0, 1), (1, 2), (2, 0)], context_length=config["max_position_embeddings"],
        vocab_size=config["vocab_size"], hidden_size=config["hidden_size"], eos=[],
        source="random parameters of bench load",
    )  # fmt: skip


def _block(dtype: str, seed: int) -> np.ndarray:
    values = np.random.default_rng(seed).standard_normal(_BLOCK_ITEMS, dtype=np.float32) * _STD
    return _stored(values, dtype)


def _norm(count: int, dtype: str, seed: int) -> np.ndarray:
    values = 1 + 0.1 * np.random.default_rng(seed).standard_normal(count, dtype=np.float32)
    return _stored(values, dtype)


def _stored(values: np.ndarray, dtype: str) -> np.ndarray:
    """Numbers as the file has them; bfloat16 is the upper half of float32."""
    if dtype == "bfloat16":
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(dtype)
