"""Whether a device still computes after something failed on it.

After an illegal access a CUDA context answers every call with an error: a worker that stayed would fail all
that comes, and would look ready. Used by `cuda_executor` and `torch_program` where they meet an error.
"""

from __future__ import annotations

import torch


class DeviceLostError(Exception):
    """The device's context is broken: the process must end, and does."""


def room(device: torch.device, what: str, error: BaseException) -> str:
    """How full a device is, in words for a message; empty on a CPU.

    Args:
        device: on which something failed.
        what: what that was.
        error: how it failed.

    Raises:
        DeviceLostError: nothing can be computed on the device any more.
    """
    if device.type != "cuda":
        return ""
    try:
        torch.cuda.synchronize(device)
        free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    except RuntimeError as lost:
        raise DeviceLostError(f"{what}: {type(error).__name__}: {error}; then {lost}") from error
    return f"{free_bytes} of {total_bytes} bytes free, {torch.cuda.memory_allocated(device)} of ours"
