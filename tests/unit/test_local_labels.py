"""Scale labels: read exactly, or refused with label, bound and value."""

from __future__ import annotations

import pytest

from keystage.local import labels
from keystage.local.labels import ScaleLabels, parse

P = "com.openfaas.scale."


def test_without_labels_the_defaults_of_openfaas_hold() -> None:
    assert parse({"other": "x"}, "function") == ScaleLabels()
    assert ScaleLabels() == ScaleLabels(1, 20, False, 900.0, None, 0.9, "rps", None)


@pytest.mark.parametrize(
    ("given", "role", "expected"),
    [
        ({"min": "0"}, "stage", ScaleLabels(min=0)),
        ({"min": "30"}, "function", ScaleLabels(min=30, max=30)),
        ({"min": "1", "max": "1"}, "router", ScaleLabels(min=1, max=1)),
        ({"zero": "true", "zero-duration": "1h2m"}, "stage", ScaleLabels(zero=True, zero_duration_s=3720.0)),
        ({"zero": "true"}, "function", ScaleLabels(zero=True)),
        ({"zero": "false"}, "router", ScaleLabels()),
        ({"target": "10"}, "function", ScaleLabels(target=10.0, type="rps")),
        ({"type": "rps"}, "function", ScaleLabels(target=50.0)),
        (
            {"type": "capacity", "target": "2.5", "target-proportion": "0.5"},
            "function",
            ScaleLabels(target=2.5, target_proportion=0.5, type="capacity"),
        ),
        ({"target-proportion": "1"}, "function", ScaleLabels(target=50.0, target_proportion=1.0)),
        ({"factor": "0"}, "stage", ScaleLabels(factor=0)),
        ({"factor": "0"}, "function", ScaleLabels(factor=0)),
        ({"factor": "20", "target": "5"}, "function", ScaleLabels(target=5.0, factor=20)),
    ],
)
def test_labels_are_read(given: dict[str, str], role: str, expected: ScaleLabels) -> None:
    assert parse({P + name: value for name, value in given.items()}, role) == expected


@pytest.mark.parametrize(
    ("given", "role", "text"),
    [
        ({"min": "-1"}, "stage", r"scale\.min must be an integer in 0\.\.1000, not '-1'"),
        ({"min": "1001"}, "stage", "not '1001'"),
        ({"min": "²"}, "stage", "not '²'"),
        ({"min": ""}, "stage", "not ''"),
        ({"max": "0"}, "function", r"scale\.max must be an integer in 1\.\.1000, not '0'"),
        (
            {"min": "3", "max": "2"},
            "function",
            r"scale\.max must be at least com\.openfaas\.scale\.min",
        ),
        ({"zero": "yes"}, "function", r"scale\.zero must be true or false, not 'yes'"),
        ({"zero-duration": "15"}, "function", r"scale\.zero-duration: '15' is no duration"),
        (
            {"min": "0", "zero-duration": "10m"},
            "stage",
            r"scale\.zero-duration has no effect without com\.openfaas\.scale\.zero=true, not '10m'",
        ),
        ({"zero": "false", "zero-duration": "10m"}, "function", "no effect without .*zero=true"),
        ({"zero-duration": "10m"}, "router", "no effect without .*zero=true"),
        ({"zero": "true", "zero-duration": "10m"}, "router", r"scale\.zero of a router must be false"),
        ({"zero": "true", "zero-duration": "0s"}, "function", "must be at least 2 s, not '0s'"),
        (
            {"zero": "true", "zero-duration": "1999ms"},
            "stage",
            "must be at least 2 s, not '1999ms'",
        ),
        ({"target": "0"}, "function", r"scale\.target must be a number above 0 and at most 1e\+09, not '0'"),
        ({"target": "nan"}, "function", "not 'nan'"),
        ({"target-proportion": "1.1"}, "function", "above 0 and at most 1, not '1.1'"),
        ({"type": "cpu"}, "function", r"scale\.type must be capacity or rps, not 'cpu': a busy CPU"),
        ({"type": "queue"}, "function", "not 'queue': no queue"),
        ({"type": "custom"}, "function", "not 'custom': there is no"),
        ({"type": "speed"}, "function", "must be capacity or rps, not 'speed'$"),
        ({"factor": "101"}, "function", r"in 0\.\.100, not '101'"),
        ({"factor": "10"}, "stage", r"scale\.factor of a stage must be 0: a stage is sized by"),
        ({"factor": "20"}, "function", r"scale\.factor above 0 has no effect without one of .*, not '20'"),
        ({"min": "3"}, "router", r"scale\.min of a router must be 1: a router is one process .*, not '3'"),
        ({"min": "0"}, "router", r"scale\.min of a router must be 1: .*, not '0'"),
        ({"max": "20"}, "router", r"scale\.max of a router must be 1: .*, not '20'"),
        ({"target": "10"}, "stage", r"scale\.target is not honoured for a stage: .*queueing model.*'10'"),
        ({"type": "rps"}, "router", r"scale\.type is not honoured for a router: a router is one process"),
        ({"zero": "true"}, "router", "a router wakes the stages"),
        ({"down.window": "5m"}, "function", r"scale\.down\.window is not known here: known are"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(given: dict[str, str], role: str, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        parse({P + name: value for name, value in given.items()}, role)


def test_a_long_value_is_cut() -> None:
    with pytest.raises(ValueError, match=r"not '9{80}'"):
        parse({labels.MIN: "9" * 500}, "function")
