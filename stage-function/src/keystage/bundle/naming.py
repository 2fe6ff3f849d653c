"""Gives stored parameters the names that the model's class has, where a checkpoint uses others.

Checkpoints are written by different classes: by the bare model (`h.0.attn...`) or by the one with a head
(`transformer.h.0.attn...`), and BERT's early ones call gain and shift of a norm `gamma` and `beta`. The
loaders people know accept all of these, so `bundle.split` does too: before the plan is checked, a source
whose names do not fit is seen through `Renamed`. Shapes and values stay; what fits nowhere keeps its name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keystage.bundle.source import ModelSource, Vocabulary

if TYPE_CHECKING:
    import torch

_OLD_NORMS = {"gamma": "weight", "beta": "bias"}


class Renamed:
    """A source under other names; see `keystage.bundle.source.ModelSource`."""

    def __init__(self, source: ModelSource, stored: Mapping[str, str]) -> None:
        """Takes the stored name of each name."""
        self._source = source
        self._stored = stored
        self.words = source.words

    def config(self) -> dict[str, Any]:
        """See `ModelSource.config`."""
        return self._source.config()

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """See `ModelSource.shapes`."""
        shapes = self._source.shapes()
        return {name: shapes[stored] for name, stored in self._stored.items()}

    def read(self, name: str) -> torch.Tensor:
        """See `ModelSource.read`."""
        return self._source.read(self._stored.get(name, name))

    def write_vocabulary(self, folder: Path) -> Vocabulary:
        """See `ModelSource.write_vocabulary`."""
        return self._source.write_vocabulary(folder)


def aligned(source: ModelSource, wanted: Collection[str]) -> ModelSource:
    """The source, renamed where more of the wanted names are then found.

    Args:
        source: a model.
        wanted: names that the plan reads.
    """
    found = source.shapes()
    stored = alignment(list(found), set(wanted))
    return source if all(name == old for name, old in stored.items()) else Renamed(source, stored)


def alignment(found: Collection[str], wanted: Collection[str]) -> dict[str, str]:
    """Stored name by the name it should have.

    The prefix to add or to drop is the one by which most wanted names are found. A name becomes another
    only where that is a wanted one and not stored itself; a prefix to drop goes from all names.

    Args:
        found: stored names.
        wanted: names that are read.
    """
    modern = {name: _modern(name) for name in found}
    missing = set(wanted) - set(found)
    votes: Counter[tuple[str, str]] = Counter()
    endings = {name.partition(".")[2]: name.partition(".")[0] + "." for name in missing}
    for name in modern.values():
        if name in endings:
            votes[endings[name], ""] += 1
        prefix, _, rest = name.partition(".")
        if rest in missing:
            votes["", prefix + "."] += 1
    added, dropped = max(votes, key=lambda pair: votes[pair], default=("", ""))
    names: dict[str, str] = {}
    for stored, name in modern.items():
        fitting = added + name.removeprefix(dropped)
        chosen = next((n for n in (fitting, name) if n in missing and n not in names), stored)
        if chosen == stored and dropped and name.startswith(dropped) and fitting not in {*found, *names}:
            chosen = fitting  # nobody reads it, but it is told apart by its name without the prefix
        names[chosen] = stored
    return names


def _modern(name: str) -> str:
    """`LayerNorm.gamma` is `LayerNorm.weight` today."""
    head, _, last = name.rpartition(".")
    return f"{head}.{_OLD_NORMS[last]}" if last in _OLD_NORMS and "norm" in head.lower() else name
