"""Emulated devices: how they are named, and tokens that depend on session and position only."""

from __future__ import annotations

import pytest

from keystage.wire.api import StepRows
from keystage.worker.executor import EmulatedDevice, EmulatedExecutor, emulated_token, parse_emulated


def test_a_device_is_read_from_its_name() -> None:
    assert parse_emulated("emulated") == EmulatedDevice()
    assert parse_emulated("emulated:alpha=0.001,load=2") == EmulatedDevice(alpha_s=0.001, load_s=2.0)


@pytest.mark.parametrize(
    "name", ["emulated:gamma=1", "emulated:alpha=x", "emulated:beta=-1", "emulated:load=nan"]
)
def test_a_wrong_name_is_refused_and_quoted(name: str) -> None:
    with pytest.raises(ValueError, match=name.split(":")[0]):
        parse_emulated(name)


def test_only_sampling_rows_get_a_token_and_batches_do_not_matter() -> None:
    executor = EmulatedExecutor(EmulatedDevice(), 2, 16, 256)
    rows = StepRows([3, 4], [1, 1], [0, 7], [5, 1], [False, True], [9, 0], [0.0] * 2, [1.0] * 2, [0, 0])
    first = executor.step(0, 0, list(range(6)), None, rows).activation
    assert first is not None
    assert (first.shape, first.data.nbytes) == ((6, 16), 96)
    assert executor.step(1, 1, [], first, rows).tokens == [-1, emulated_token(4, 8, 256)]


def test_tokens_spread_over_the_vocabulary() -> None:
    seen = {emulated_token(session, position, 64) for session in range(32) for position in range(32)}
    assert seen == set(range(64))
