"""The load generator against a real HTTP server: parsing, open loop, failures, report and plots."""

from __future__ import annotations

import asyncio
import io
import json
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console
from support.asgi_server import serving

from keystage.loadgen import app, capacity, compare, requestlog, sender, table, validity
from keystage.loadgen.monitor import Credentials
from keystage.loadgen.options import LoadOptions
from keystage.loadgen.starts import ReplicaStart
from keystage.loadgen.target import Target, TargetKind
from keystage.router.api import ReplicaStats, RouterStats, StageCounters

Send = Callable[[dict[str, Any]], Awaitable[None]]
TOKEN = b'data: {"choices":[{"text":" a","finish_reason":null}]}\n\n'
LOGIN = Credentials("admin", "secret")


class Pipeline:
    """An ASGI server that streams as a router does, and misbehaves by path.

    `/function/ok` streams 4 tokens; `/function/stalled` answers nobody before `stall_until`
    requests have arrived; other names fail in the way their name says.
    """

    def __init__(self) -> None:
        self.stall_until = 0
        self.gap_s = 0.0
        self.arrived = 0
        self.in_flight = 0
        self.most_in_flight = 0
        self.sent_at_s: list[tuple[float, float]] = []
        self._all_here = asyncio.Event()

    async def __call__(self, scope: dict[str, Any], receive: Callable[[], Any], send: Send) -> None:
        if scope["type"] != "http":
            return
        path = scope["path"]
        if path.endswith("/_/stats"):
            await _answer(send, 200, msgspec.json.encode(self.stats()))
        elif path == "/system/functions":
            allowed = (b"authorization", LOGIN.header.encode()) in scope["headers"]
            functions = [{"name": f"ok-stage-{k}", "replicas": k + 2} for k in range(2)]
            await _answer(send, 200 if allowed else 401, msgspec.json.encode(functions))
        else:
            body = await _body(receive)
            self.arrived += 1
            self.in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
            try:
                await self.serve(path.split("/")[2], body, send)
            finally:
                self.in_flight -= 1

    async def serve(self, name: str, body: bytes, send: Send) -> None:
        if name == "stalled":
            if self.arrived >= self.stall_until:
                self._all_here.set()
            await self._all_here.wait()
        if name.startswith("status"):
            await _answer(send, int(name.removeprefix("status")), b'{"error":"said no"}')
        elif name == "hangs":
            await asyncio.Event().wait()
        elif name == "echo":
            await _answer(send, 200, body)
        elif name == "plain":
            await _answer(send, 200, b'{"text":"x","tokens":5,"prompt_tokens":3}')
        elif name == "embeds":
            await _answer(send, 200, b'{"data":[],"usage":{"prompt_tokens":3,"total_tokens":3}}')
        elif name == "hears":
            await _answer(
                send, 200, b'{"text":"x","segments":[{"tokens":[1,2]},{"tokens":[3]}],"usage":{"seconds":4}}'
            )
        elif name == "sees":
            await _answer(send, 200, b'{"classes":[{"index":1,"score":0.5}]}')
        else:
            await self.stream(name, body, send)

    async def stream(self, name: str, body: bytes, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        first_s = 0.0
        for number in range(4):
            if number:
                await asyncio.sleep(self.gap_s)
            first_s = first_s or time.monotonic()
            await _part(send, TOKEN)
            if name == "breaks":
                raise ConnectionError("the server gives up in mid-stream")
        last_s = time.monotonic()
        self.sent_at_s.append((first_s, last_s))
        if name == "poisoned":
            await _part(send, b'data: {"error":{"message":"stage 2 failed"}}\n\n')
        prompt = len(json.loads(body)["prompt"].split())
        usage = {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": 4}}
        await _part(send, b"data: " + msgspec.json.encode(usage) + b"\n\n")
        if name != "truncated":
            await _part(send, b"data: [DONE]\n\n")
        await send({"type": "http.response.body", "body": b""})

    def stats(self) -> RouterStats:
        now_s = time.monotonic()
        stages = [StageCounters(k, 0, 0, 0, 3 - k, 0, 0, 0, 0, 0, 0, 0) for k in range(2)]
        hosts = [ReplicaStats(f"w{k}", (k,), "ready", 0.0, 8, 1, [0.0], [0], [0]) for k in range(2)]
        return RouterStats("ok", "a", now_s, now_s, "looping", 0, 0, {}, 0, 0, stages, hosts)


async def _body(receive: Callable[[], Any]) -> bytes:
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            return body


async def _answer(send: Send, status: int, body: bytes) -> None:
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _part(send: Send, body: bytes) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": True})


@pytest.fixture
def pipeline() -> Pipeline:
    return Pipeline()


@pytest.fixture
def base_url(pipeline: Pipeline) -> Iterator[str]:
    with serving(pipeline) as address:
        yield address


def options(url: str, **changes: Any) -> LoadOptions:
    given: dict[str, Any] = {"rate_rps": 40.0, "duration_s": 0.5, "out": None, "timeout_s": 20.0}
    return LoadOptions(url=url, **(given | changes))


def test_first_and_last_token_are_where_the_server_sent_them(pipeline: Pipeline, base_url: str) -> None:
    pipeline.gap_s = 0.25

    async def one() -> tuple[float, sender.Row]:
        target = Target("openai", f"{base_url}/function/ok")
        body = b'{"prompt":"one two three","max_tokens":4}'
        async with sender.client(20.0) as session:
            start_s = time.monotonic()
            (row,) = await sender.send_all(session, target, [0.0], [body], start_s=start_s)
            return start_s, row

    start_s, row = asyncio.run(one())
    ((first_s, last_s),) = pipeline.sent_at_s
    assert row.first_s is not None
    # After the server sent it, and before the server sent what came 0.75 s later.
    assert first_s <= start_s + row.first_s < last_s <= start_s + row.last_s
    assert (row.status, row.prompt_tokens, row.output_tokens, row.error) == (200, 3, 4, "")


@pytest.mark.slow
def test_send_times_do_not_depend_on_answers(pipeline: Pipeline, base_url: str) -> None:
    """The server answers nobody until all have asked: a closed loop would wait for ever."""
    pipeline.stall_until = 20
    report = app.replay(options(f"{base_url}/function/stalled"))
    assert (report.requests.sent, report.requests.served) == (20, 20)
    assert pipeline.most_in_flight == 20
    last_sent_s = max(row.sent_s for row in report.rows)
    assert all(row.first_s is not None and row.first_s >= last_sent_s for row in report.rows)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "status", "error"),
    [
        ("status500", "500", "http_500"),
        ("status429", "429", "http_429"),
        ("truncated", "200", "truncated"),
        ("poisoned", "200", "stream_error"),
        ("breaks", "200", "disconnected"),
        ("hangs", "none", "timeout"),
    ],
)
def test_every_failure_is_a_row_of_its_class(
    base_url: str, pipeline: Pipeline, name: str, status: str, error: str
) -> None:
    asked = options(f"{base_url}/function/{name}", rate_rps=10.0, timeout_s=1.0, slo_ttft_s=100.0)
    report = app.replay(asked)
    counts = report.requests
    assert (counts.sent, counts.served, counts.failed) == (5, 0, 5)
    assert counts.by_status == {status: 5}
    assert counts.by_error == {error: 5}
    assert pipeline.arrived == 5, "nothing is tried twice"
    assert (report.latency_s.count, report.latency_s.failed, report.latency_s.p50) == (5, 5, None)
    assert [line.met for line in report.attainment] == [0, 0, 0, 0]


def test_nobody_listening_is_a_failure_not_a_crash(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    asked = options(f"http://127.0.0.1:{port}/function/ok", rate_rps=10.0)
    assert app.load(asked) == app.EXIT_NOTHING_SERVED
    shown = capsys.readouterr().out
    assert "connect" in shown
    assert "failed 5" in shown


def test_function_and_raw_targets(base_url: str) -> None:
    plain = app.replay(options(f"{base_url}/function/plain", target="function", slo_latency_s=60.0))
    assert (plain.requests.served, plain.requests.output_tokens, plain.requests.prompt_tokens) == (
        20,
        100,
        60,
    )
    assert (plain.ttft_s.count, plain.latency_s.count, plain.attainment[0].met) == (0, 20, 20)
    raw = app.replay(options(f"{base_url}/function/echo", target="raw", body_bytes=5000))
    assert (raw.requests.served, raw.requests.failed) == (20, 0)
    garbled = app.replay(options(f"{base_url}/function/ok", target="function", rate_rps=10.0))
    assert garbled.requests.by_error == {"bad_answer": 5}


@pytest.mark.parametrize(
    ("name", "target", "prompt_tokens", "output_tokens"),
    [("embeds", "embeddings", 15, 0), ("hears", "transcriptions", 0, 15), ("sees", "images", 0, 0)],
)
def test_pipelines_that_embed_hear_or_see(
    name: str, target: TargetKind, prompt_tokens: int, output_tokens: int, base_url: str
) -> None:
    report = app.replay(
        options(f"{base_url}/function/{name}", target=target, rate_rps=10.0, slo_latency_s=60.0)
    )
    asked = report.requests
    assert (asked.served, asked.prompt_tokens, asked.output_tokens) == (5, prompt_tokens, output_tokens)
    assert (asked.clipped, report.ttft_s.count, report.attainment[0].met) == (0, 0, 5)


@pytest.mark.slow
def test_report_files_and_stage_series(base_url: str, tmp_path: Path) -> None:
    asked = options(
        f"{base_url}/function/ok", cv=2.0, credentials=LOGIN, slo_ttft_s=60.0, out=tmp_path / "out"
    )
    report = app.replay(asked)
    saved = json.loads((tmp_path / "out" / "report.json").read_bytes())
    assert saved["requests"]["served"] == 20
    assert saved["arrivals"]["achieved_cv"] == report.arrivals.achieved_cv
    assert saved["slo"]["source"] == "given"
    assert "rows" not in saved
    assert "secret" not in json.dumps(saved)
    assert {sample["desired"] for sample in saved["samples"]} == {2, 3}
    assert [(line["stage"], line["queue_max"]) for line in saved["stages"]] == [(0, 3), (1, 2)]
    assert (saved["version"], saved["plan"]["requests"]) == (2, 20)
    rows, notes = requestlog.read(tmp_path / "out" / "requests.jsonl")
    assert (rows, notes) == (report.rows, [])
    assert "http://127.0.0.1" in (tmp_path / "out" / "report.html").read_text()
    for name in ("latency", "arrivals", "slo", "stages"):
        assert (tmp_path / "out" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    out = io.StringIO()
    table.show(report, Console(file=out, width=120, markup=False))
    assert "served 20" in out.getvalue()


def test_a_late_generator_is_told_by_table_report_and_exit_code(
    base_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A bound that no generator keeps."""
    monkeypatch.setattr(validity, "LAG_SHARE", 0.0)
    monkeypatch.setattr(validity, "LAG_FLOOR_S", 0.0)
    assert app.load(options(f"{base_url}/function/ok", out=tmp_path)) == app.EXIT_INVALID == 3
    shown = capsys.readouterr().out
    assert "INVALID: send lag p99 is" in shown
    assert "served 20, failed 0, p50" in shown
    saved = json.loads((tmp_path / "report.json").read_bytes())
    assert saved["valid"] is False
    assert "above 0.0 ms" in saved["invalid_because"][0]
    assert "Not valid." in (tmp_path / "report.html").read_text()
    with pytest.raises(compare.CompareError, match="A is not valid"):
        compare.compare(tmp_path, tmp_path)


@pytest.mark.slow
def test_two_runs_of_one_plan_can_be_compared(base_url: str, tmp_path: Path) -> None:
    for name in ("a", "b"):
        app.replay(options(f"{base_url}/function/ok", rate_rps=80.0, duration_s=1.0, out=tmp_path / name))
    found = compare.compare(tmp_path / "a", tmp_path / "b", is_forced=True, block_s=0.05)
    assert found.blocks.is_paired
    assert found.requests == (80, 80)
    lines = {line.metric: line for line in found.lines}
    assert lines["latency_p99"].because == "80 requests, at least 1000"
    assert lines["failure_share"].verdict == "no difference"


def test_a_folder_that_cannot_be_written_is_found_before_anything_is_sent(
    pipeline: Pipeline, base_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    taken = tmp_path / "file"
    taken.write_text("")
    assert app.load(options(f"{base_url}/function/ok", out=taken / "out")) == app.EXIT_BAD_INPUT
    assert f"--out {taken / 'out'} cannot be written" in capsys.readouterr().err
    assert pipeline.arrived == 0


def test_wrong_credentials_cost_the_desired_numbers_only(base_url: str) -> None:
    asked = options(f"{base_url}/function/ok", credentials=Credentials("admin", "wrong"))
    report = app.replay(asked)
    assert report.watching.missed == 0
    assert "401" in report.watching.last_error
    assert {sample.desired for sample in report.samples} == {None}
    assert {sample.ready for sample in report.samples} == {1}


def test_capacity_is_a_closed_loop(pipeline: Pipeline, base_url: str) -> None:
    pipeline.gap_s = 0.005
    target = Target("openai", f"{base_url}/function/ok")
    body = b'{"prompt":"x","max_tokens":4}'

    async def measure() -> capacity.Capacity:
        async with sender.client(20.0) as session:
            rows = await capacity.unloaded(session, target, [body] * 3)
            assert len(rows) == 2
            assert pipeline.most_in_flight == 1
            return await capacity.capacity(session, target, [body], concurrency=4, duration_s=1.0)

    able = asyncio.run(measure())
    assert pipeline.most_in_flight == 4
    assert 0 < able.completed <= pipeline.arrived
    assert able.requests_per_s == able.completed / able.window_s


def test_a_target_that_does_not_serve_is_named(base_url: str) -> None:
    with pytest.raises(capacity.TargetError, match=r"does not serve: request 1 of 13: http_503: .*said no"):
        app.demo(base_url, "status503")


@pytest.mark.slow
def test_demo_measures_replays_and_reports(
    base_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(app, "CAPACITY_S", 1.0)
    monkeypatch.setattr(app, "DEMO_LOAD_RATIO", 0.1)
    begun_s = time.time()
    since: list[float] = []

    def starts(since_s: float) -> list[ReplicaStart]:
        since.append(since_s)
        return [ReplicaStart("ok-0", "ok", "holder", "memory", "", 0.5, 0.1, 0.1, 0.2, 0.25, 0.375)]

    report = app.demo(base_url, "ok", None, 2.0, 1, credentials=LOGIN, out=tmp_path, starts=starts)
    assert begun_s <= since[0] <= time.time() - report.duration_s  # asked once, for the capacity run too
    assert len(since) == 1
    assert [(s.via, s.first_item_median_s) for s in report.start_times] == [("holder", 0.375)]
    assert report.capacity is not None
    assert report.arrivals.asked_rate_rps == pytest.approx(0.1 * report.capacity.requests_per_s)
    assert report.arrivals.asked_cv == 4.0
    assert report.requests.served == report.requests.sent >= app.DEMO_MIN_REQUESTS
    assert "one at a time" in report.slo.source
    shown = capsys.readouterr().out
    assert "CV of arrivals" in shown
    assert "send lag" in shown
    assert "first item median" in shown
    written = json.loads((tmp_path / "report.json").read_bytes())
    assert written["capacity"]["concurrency"] == app.CAPACITY_CLIENTS
    assert written["starts"][0]["ready_s"] == 0.25
