"""What the controller says of settings it cannot use: which and why, never what was given."""

from __future__ import annotations

import pytest

from keystage.controller import app


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"GATEWAY": "http://u:PASSWD@h"}, "controller: the gateway's address must not hold credentials"),
        (
            {"GATEWAY": "http://u:PASSWD@[::1"},
            "controller: gateway address (not shown, it holds an @) must be",
        ),
        ({"GATEWAY": "http://h", "CONTROL": "/PASSWD"}, "controller: set KEYSTAGE_CONTROL"),
        ({"CONTROL": "/s", "TICK_S": "PASSWD"}, "controller: KEYSTAGE_TICK_S: Input should be"),
    ],
)
def test_values_are_not_repeated(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], env: dict[str, str], said: str
) -> None:
    for name in ("GATEWAY", "CONTROL", "TICK_S"):
        monkeypatch.delenv(f"KEYSTAGE_{name}", raising=False)
    for name, value in env.items():
        monkeypatch.setenv(f"KEYSTAGE_{name}", value)
    assert app.main() == 2
    text = capsys.readouterr().err
    assert said in text.replace("Value error, ", "")
    assert "PASSWD" not in text
