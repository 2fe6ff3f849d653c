"""The part of `pipeline.json` that a holder needs, small enough for one message.

Between the daemon, which sends `Hold`, and `holder`. Chunk hashes make up nearly all of a large
pipeline's description (160 KiB for 40 GB), and a holder never hashes: its segment was checked when
it was loaded.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from keystage.bundle import store

_NAME = Path("pipeline.json")


def trimmed(pipeline: bytes) -> bytes:
    """The same description without chunk hashes, tokenizer names and chat template.

    Args:
        pipeline: content of `pipeline.json`.

    Raises:
        BundleError: no pipeline description.
    """
    parsed = store.decode(pipeline, _NAME)
    stages = [msgspec.structs.replace(stage, chunks=[]) for stage in parsed.stages]
    return msgspec.json.encode(
        msgspec.structs.replace(parsed, stages=stages, chat_template="", special_tokens={})
    )
