"""A program's refusals carry the codes that the router's own have for the same status."""

from __future__ import annotations

import pytest

from keystage.router.engine import ProgramRefusal
from keystage.router.openai_errors import BodyTooLarge, UnsupportedMedia


@pytest.mark.parametrize(
    ("status", "seen", "code"),
    [
        (400, 400, "invalid_request_error"),
        (413, 413, BodyTooLarge.code),
        (415, 415, UnsupportedMedia.code),
        (422, 422, "invalid_request_error"),
        (503, 503, "stage_failed"),
        (200, 500, "stage_failed"),
    ],
)
def test_codes_follow_the_status(status: int, seen: int, code: str) -> None:
    refusal = ProgramRefusal("why", status)
    assert (refusal.status, refusal.code) == (seen, code)
