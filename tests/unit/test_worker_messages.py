"""Messages of stream programs as bytes and back."""

from __future__ import annotations

import pytest
import torch

from keystage.streams.api import Message, ProgramError
from keystage.worker.messages import MOST_META_BYTES, pack, unpack


def test_every_type_and_shape_comes_back_in_memory_of_its_own() -> None:
    tensors = {
        "f": torch.randn(3, 5), "h": torch.randn(7).half(), "b": torch.randn(2, 2).bfloat16(),
        "i": torch.arange(9).view(3, 3).t(), "flag": torch.tensor([True, False]), "one": torch.tensor(4.5),
        "none": torch.empty(0, 4), "bytes": torch.arange(5, dtype=torch.uint8),
    }  # fmt: skip
    messages = [
        Message({"request": 1, "a": [1, 2], "x": 0.5, "s": "é"}, tensors),
        Message({"request": 2}, {}),
    ]
    (meta, data), (bare, nothing) = pack("m", messages)  # type: ignore[misc]
    assert nothing is None
    block = bytearray(data)
    found = unpack(meta, memoryview(block))
    block[:] = bytes(len(block))  # the ring's slot is used again
    assert found.header == messages[0].header
    assert list(found.data) == list(tensors)
    for name, tensor in tensors.items():
        assert found.data[name].dtype == tensor.dtype
        assert torch.equal(found.data[name], tensor)
    assert unpack(bare, None) == Message({"request": 2}, {})


def test_one_that_cannot_travel_leaves_the_others_alone() -> None:
    good = Message({"request": 1}, {"x": torch.ones(3)})
    packed = pack(
        "m",
        [
            Message({"request": 0, "big": 2**70}),
            good,
            Message({"request": 2, "text": "x" * MOST_META_BYTES}),
            Message({"request": 3}, {"x": [1, 2]}),  # type: ignore[dict-item]
            good,
        ],
    )
    assert [isinstance(entry, ProgramError) for entry in packed] == [True, False, True, True, False]
    assert "at most 65536" in str(packed[2])
    for entry in (packed[1], packed[4]):
        assert torch.equal(unpack(*entry).data["x"], torch.ones(3))  # type: ignore[misc]


@pytest.mark.parametrize("cut", [0, 5, 64])
def test_bytes_that_are_not_as_described_are_refused(cut: int) -> None:
    ((meta, data),) = pack("m", [Message({"request": 1}, {"x": torch.ones(40)})])  # type: ignore[misc]
    with pytest.raises(ProgramError, match="a message of"):
        unpack(meta, data[:cut])
    with pytest.raises(ProgramError, match="a message of"):
        unpack(meta[:-3], data)
