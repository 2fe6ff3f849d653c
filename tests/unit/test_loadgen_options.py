"""Flags that contradict each other, plans, targets, and the command's exit code for bad input."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest

from keystage.loadgen import app
from keystage.loadgen.monitor import Credentials
from keystage.loadgen.option_checks import check
from keystage.loadgen.options import LoadOptions, OptionError
from keystage.loadgen.plan import plan
from keystage.loadgen.target import Target, gateway_of

GOOD = LoadOptions(url="http://127.0.0.1:8080/function/p", rate_rps=2.0)
HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
TRACE = HEADER + "".join(f"2023-11-16 18:17:{s:02d}.0000000,{160 * (s + 1)},32\n" for s in (0, 1, 3, 10))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"url": "localhost:8080"}, "URL must be http"),
        ({"rate_rps": None}, "--rate is needed"),
        ({"rate_rps": 0.0}, "--rate must be finite and above 0, got 0.0"),
        ({"rate_rps": math.nan}, "--rate must be"),
        ({"rate_rps": 5000.0, "max_rate_rps": 2000.0}, "--rate 5000 is above --max-rate 2000"),
        ({"duration_s": -1.0}, "--duration must"),
        ({"rate_rps": 1000.0, "duration_s": 1e5}, "100000000 requests, at most 20000000"),
        ({"cv": -0.1}, "--cv must be in 0..100, got -0.1"),
        ({"cv": 1e200}, "--cv must be in 0..100, got 1e+200"),
        ({"cv": 4.0, "trace": Path("t.csv")}, "--cv and --trace contradict"),
        ({"speed": 2.0}, "--speed replays a trace"),
        ({"speed": 2.0, "trace": Path("t.csv")}, "--speed and --rate contradict"),
        ({"target": "raw", "slo_ttft_s": 1.0}, "--slo-ttft needs a streamed answer"),
        ({"target": "function", "slo_tpot_s": 1.0}, "--slo-tpot needs"),
        ({"slo_latency_s": 0.0}, "--slo-latency must"),
        ({"scale_lengths": 0.0}, "--scale-lengths must"),
        ({"context_tokens": 1}, "--context must be at least 2"),
        ({"body_bytes": 0}, "--body-bytes"),
        ({"mask": "a b"}, "--mask must be one word, got 'a b'"),
        ({"seed": -1}, "--seed must"),
        ({"timeout_s": 0.0}, "--timeout must"),
        ({"temperature": -1.0}, "--temperature must"),
        ({"agents": ("http://h:1",)}, "--agent and --agent-secret-file belong together"),
        ({"agents": ("h:1",), "agent_secret": Path("s")}, "--agent must be http(s)://host:port, got 'h:1'"),
        ({"agents": ("http://h:1",) * 2, "agent_secret": Path("s")}, "--agent names one twice"),
    ],
)
def test_bad_flags_are_named(
    changes: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    check(GOOD)
    options = dataclasses.replace(GOOD, **changes)
    with pytest.raises(OptionError) as caught:
        check(options)
    assert message in str(caught.value)
    assert app.load(options) == app.EXIT_BAD_INPUT
    assert capsys.readouterr().err.startswith("error: ")


def test_an_unusable_trace_is_exit_2_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "empty.csv"
    path.touch()
    options = dataclasses.replace(GOOD, trace=path, rate_rps=None, out=tmp_path / "out")
    assert app.load(options) == app.EXIT_BAD_INPUT
    told = capsys.readouterr().err.replace("\n", "")
    assert "empty.csv" in told
    assert "line 1" in told
    assert not (tmp_path / "out").exists()


def test_a_synthetic_plan() -> None:
    made = plan(dataclasses.replace(GOOD, cv=4.0, duration_s=30.0, seed=3), app.target_of(GOOD))
    assert len(made.times_s) == len(made.bodies) == len(made.lengths) == 60
    assert (made.asked_cv, made.asked_rate_rps, made.duration_s, made.times_s[-1]) == (4.0, 2.0, 30.0, 30.0)
    body = msgspec.json.decode(made.bodies[7])
    assert len(body["prompt"].split()) == made.lengths[7].prompt_tokens
    assert body["max_tokens"] == made.lengths[7].output_tokens
    assert body["stream"] is True
    assert "model" not in body


def test_plans_of_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(TRACE)
    own = dataclasses.replace(GOOD, trace=path, rate_rps=None)
    target = app.target_of(GOOD)
    assert plan(own, target).times_s.tolist() == [0.0, 1.0, 3.0, 10.0]
    # Half open, as every window.
    assert plan(dataclasses.replace(own, duration_s=3.0), target).times_s.tolist() == [0.0, 1.0]
    assert plan(dataclasses.replace(own, duration_s=3.1), target).times_s.tolist() == [0.0, 1.0, 3.0]
    assert plan(dataclasses.replace(own, speed=2.0), target).times_s.tolist() == [0.0, 0.5, 1.5, 5.0]
    assert plan(dataclasses.replace(own, rate_rps=0.2), target).times_s.tolist() == [0.0, 2.0, 6.0, 20.0]
    cut = plan(dataclasses.replace(own, rate_rps=0.5, duration_s=6.0), target)
    assert cut.times_s.tolist() == [0.0, 2.0, 6.0]
    assert [length.prompt_tokens for length in cut.lengths] == [10, 20, 40]
    with pytest.raises(OptionError, match="above --max-rate"):
        plan(dataclasses.replace(own, speed=1e5, max_rate_rps=2000.0), target)


def test_targets() -> None:
    assert Target("openai", "http://h/function/p").url == "http://h/function/p/v1/completions"
    assert Target("raw", "http://h/function/p").url == "http://h/function/p/"
    assert gateway_of("http://h:1/x/function/p") == ("http://h:1/x", "p")
    assert gateway_of("http://h:1/v1") is None


def test_credentials_do_not_show() -> None:
    login = Credentials("admin", "hunter2")
    assert "hunter2" not in repr(dataclasses.replace(GOOD, credentials=login))
    assert login.header == "Basic YWRtaW46aHVudGVyMg=="
