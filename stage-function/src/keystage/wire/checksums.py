"""Checksums of tensors on their way from worker to worker, where the deployment wants them.

A producer with `KEYSTAGE_WIRE_CHECKSUM=on` puts one into each `TensorRef`; a consumer checks whatever has
one, so that either may be switched on first. A tensor that was changed on its way (memory, a bug that writes
into a slot that was given away, a network without encryption) fails its rows, which are computed again, and
is counted. CRC-32 finds every change of up to 32 bits in a row and misses one other in four billion; that of
the standard library takes 5 us for 16 KiB. Tensors that stay in a device's memory have none, and those that
have one are copied once more, so that nothing changes between the comparison and the use.
"""

from __future__ import annotations

import logging
import zlib

from keystage.wire.api import TensorRef
from keystage.wire.ring import RingError

log = logging.getLogger(__name__)

NONE = -1
"""Of a tensor whose producer gives none."""


class CorruptTensorError(RingError):
    """Bytes that are not those that their producer had: names it, the sizes and both checksums."""


def checksum_of(data: memoryview) -> int:
    """CRC-32 of a tensor's bytes."""
    return zlib.crc32(data)


class Checker:
    """Checks what arrives at one process.

    Attributes:
        corrupt: tensors that were not what their producer sent.
    """

    def __init__(self) -> None:
        self.corrupt = 0

    def checked(self, ref: TensorRef, data: memoryview, producer: str) -> memoryview:
        """A copy of a tensor's bytes, as its producer had them: what is compared is what is used.

        Raises:
            CorruptTensorError: they are not.
        """
        copy = memoryview(bytearray(data))
        self.check(ref, copy, producer)
        return copy

    def check(self, ref: TensorRef, data: memoryview, producer: str) -> None:
        """Compares a tensor's bytes with its reference.

        Raises:
            CorruptTensorError: they differ.
        """
        if ref.checksum == NONE:
            return
        found = checksum_of(data)
        if found == ref.checksum:
            return
        self.corrupt += 1
        reason = (
            f"tensor of {data.nbytes} bytes ({ref.dtype} {list(ref.shape)}) in slot {ref.slot} of {producer} "
            f"was changed on its way: checksum {found:08x}, not {ref.checksum:08x}"
        )
        log.error("%s (%d so far)", reason, self.corrupt)
        raise CorruptTensorError(reason)
