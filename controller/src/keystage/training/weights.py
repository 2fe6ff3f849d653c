"""The weights file: JSON to look at and hand on, or the module that a release ships.

Before it: `fit` gives weights. After it: `maths.attention` reads the module, people and tests the JSON. The
module holds the same JSON in a literal, because maths read no files.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from keystage.controller.maths.attention import Attention, Weights
from keystage.wire.unreadable import UNREADABLE

SUFFIXES = (".json", ".py")
_LINE = 96

_HEAD = '''"""Weights of the predictor `attention`, written by `keystage train-cv --out attention_weights.py`.

Generated: do not edit. Version {version}. {metrics}
"""

# fmt: off
SHIPPED = (
'''


def check_path(path: Path) -> None:
    """Refuses an output that cannot be.

    Raises:
        ValueError: neither .json nor .py, or no such folder.
    """
    if path.suffix not in SUFFIXES:
        raise ValueError(f"weights are written as .json or .py, got {path.name!r}")
    if not path.parent.is_dir():
        raise ValueError(f"there is no folder {path.parent} to write {path.name} into")


def save(weights: Weights, path: Path) -> None:
    """Writes weights in the format the suffix names.

    Raises:
        ValueError: see `check_path`.
        OSError: it cannot be written.
    """
    check_path(path)
    text = msgspec.json.encode(weights).decode()
    if path.suffix == ".py":
        text = _module(weights, text)
    else:
        text += "\n"
    path.write_text(text, encoding="utf-8")


def load(path: Path) -> Attention:
    """Reads a weights file in JSON.

    Raises:
        ValueError: it holds no weights this release takes.
        OSError: it cannot be read.
    """
    try:
        weights = msgspec.json.decode(path.read_bytes(), type=Weights)
    except UNREADABLE as error:
        raise ValueError(f"{path} holds no weights: {error}") from error
    return Attention(weights)


def _module(weights: Weights, text: str) -> str:
    m = weights.metrics
    metrics = (
        f"Mean |log error| of CV on {m.held_out} held-out\n"
        f"chains: {m.attention:.3f}; qna {m.qna:.3f}, same as upstream {m.guess:.3f}. "
        f"Trained on {m.chains} chains."
        if m is not None
        else "Not tested."
    )
    lines = [text[i : i + _LINE] for i in range(0, len(text), _LINE)]
    body = "\n".join(f"    b'{line}'" for line in lines)
    return _HEAD.format(version=weights.version, metrics=metrics) + body + "\n)\n"
