"""What a sentence-transformers folder says about making one vector of a text: pooling, norm, length.

Such a folder is that of a bare encoder plus `modules.json`, which lists what follows the encoder. The split
carries it in the config under `sentence_transformers`, so that stages and router need no further file.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from keystage.bundle.errors import SplitError
from keystage.wire.unreadable import UNREADABLE

_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}


def pooling(folder: Path, read_json: Callable[[str], Any]) -> dict[str, Any] | None:
    """What a folder says: `{"pooling": mode, "normalize": bool, "max_tokens": int}`, or None if nothing.

    Args:
        folder: the model's folder.
        read_json: reads a JSON file of the folder by its name.

    Raises:
        SplitError: a file is garbled, or asks for what is not known here.
    """
    path = folder / "modules.json"
    if not path.exists():
        return None
    modules = _modules(path)
    mode, normalize = "", False
    for kind, place in modules:
        if kind == "Pooling":
            mode = _mode(path, read_json(f"{place}/config.json"))
        elif kind == "Normalize":
            normalize = True
        elif kind != "Transformer":
            raise SplitError(
                f"{path}: module {kind} is not supported: known are Transformer, Pooling, Normalize"
            )
    if not mode:
        return None
    limits = read_json("sentence_bert_config.json") if (folder / "sentence_bert_config.json").exists() else {}
    length = limits.get("max_seq_length")
    return {"pooling": mode, "normalize": normalize, "max_tokens": length if isinstance(length, int) else 0}


def _modules(path: Path) -> list[tuple[str, str]]:
    """Class name and folder of each module, in order."""
    try:
        listed = msgspec.json.decode(path.read_bytes(), type=list[dict[str, Any]])
        return [(str(entry["type"]).rpartition(".")[2], str(entry.get("path", ""))) for entry in listed]
    except (OSError, KeyError, *UNREADABLE) as error:
        raise SplitError(f"{path}: garbled list of modules: {error}") from error


def _mode(path: Path, config: dict[str, Any]) -> str:
    modes = [mode for key, mode in _MODES.items() if config.get(key)]
    if len(modes) != 1:
        raise SplitError(f"{path}: exactly one kind of pooling is supported, asked for are {modes}")
    return modes[0]
