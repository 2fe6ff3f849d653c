"""One message of several: what a join does with the parts of a request.

Called by `StreamModule.gather`. Parts come in the order of the module's inputs, so that a sum of floats is
the same whichever branch came first.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from keystage.streams.api import Merge, Message, ProgramError


def merge_messages(parts: Sequence[Message], merge: Merge, axis: int = 0) -> Message:
    """Joins messages of one request.

    Args:
        parts: at least one; of header fields that differ, the first part's stands.
        merge: `sum` or `max` of tensors of equal shape, `concat` along `axis`.
        axis: for `concat`.

    Raises:
        ProgramError: they belong to different requests, or tensors of one name do not fit.
    """
    requests = [part.request for part in parts]
    if len(set(requests)) != 1:
        raise ProgramError(f"a join of messages of different requests: {requests}", 500)
    header = {}
    for part in reversed(parts):
        header.update(part.header)
    names = dict.fromkeys(name for part in parts for name in part.data)
    return Message(header, {name: _merged(name, parts, merge, axis) for name in names})


def _merged(name: str, parts: Sequence[Message], merge: Merge, axis: int) -> torch.Tensor:
    tensors = [part.data[name] for part in parts if name in part.data]
    if len(tensors) == 1:
        return tensors[0]
    if merge != "concat" and len({tensor.shape for tensor in tensors}) > 1:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
        raise ProgramError(f"{merge} of tensors {name!r} of shapes {shapes}", 500)
    try:
        if merge == "concat":
            return torch.cat(tensors, axis)
        total = tensors[0]
        for tensor in tensors[1:]:
            total = total + tensor if merge == "sum" else torch.maximum(total, tensor)
    except (RuntimeError, IndexError) as error:
        raise ProgramError(f"{merge} of tensors {name!r}: {error}", 500) from error
    return total
