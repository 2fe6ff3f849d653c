"""The live page when things go wrong: a stage is down, credentials are refused, names are strange."""

from __future__ import annotations

import math
import time
from pathlib import Path

import msgspec
import pytest
from support.browser import Page
from support.live_page import OUT, opened, run, shown, state
from support.report_server import PASSWORD, USER, ReportServer, a_report

from keystage.gateway.backend import LogLine
from keystage.observability.api import (
    EVENTS_PATH,
    DecisionReport,
    FunctionReport,
    NodeReport,
    ReplicaReport,
    Report,
    StageReport,
)

pytestmark = pytest.mark.slow

HOSTILE = "<img src=x onerror=alert(1)>"
LONG = "a-function-whose-name-is-the-whole-title-of-a-paper-and-its-date-2026-11-29-second-version"
SIDEWAYS = """
[...document.querySelectorAll("header *, main *, footer *")]
  .filter((one) => one.getBoundingClientRect().right > innerWidth + 1 && !one.closest("#row, .scroll, svg"))
  .map((one) => `${one.tagName} ${one.id} ${one.className}`)
"""
CUT_OFF = """
[...document.querySelectorAll(".card .line, .card .head, button, dd")]
  .filter((one) => one.scrollWidth > one.clientWidth + 1 && one.checkVisibility())
  .map((one) => one.innerText)
"""
DETAIL = "document.querySelector('#detail h3').textContent"


def with_stages(report: Report, **changes: StageReport) -> Report:
    """The same with other stages, by `s` and index."""
    (pipeline,) = report.pipelines
    stages = [changes.get(f"s{stage.stage}", stage) for stage in pipeline.stages]
    return msgspec.structs.replace(
        report, pipelines=(msgspec.structs.replace(pipeline, stages=tuple(stages)),)
    )


def spoken(text: str) -> str:
    """Whether a screen reader was told it."""
    return f"document.getElementById('announcer').textContent.includes('{text}')"


async def tell_until(server: ReportServer, page: Page, report: Report, condition: str) -> None:
    """Tells it until something is true."""
    for _ in range(600):
        server.tell(report)
        await page.until(f"document.body.dataset.report === '{server.number}'")
        if await page.evaluate(condition):
            return
    pytest.fail(f"never: {condition}")


def test_a_stage_without_replicas_is_seen_and_its_output_says_why(tmp_path: Path) -> None:
    async def work(server: ReportServer, page: Page) -> None:
        server.backend.lines = [
            LogLine(time.time() - 1, "big-stage-2-7", f"stage-02.safetensors: truncated {HOSTILE}")
        ]
        down = StageReport(stage=2, function="big-stage-2", desired=1, queue=3.0, rank=2)
        report = with_stages(a_report(), s2=down)
        server.tell(report)
        await opened(server, page)
        await page.until(f"{DETAIL} === 'Stage 2: big-stage-2'")  # chosen before the key stage
        assert "none ready" in await page.text("#stage-2")
        assert "0 of 1 replica ready, requests wait" in await page.evaluate(
            "document.getElementById('stage-2').getAttribute('aria-label')"
        )
        await tell_until(server, page, report, shown("#down"))
        assert "Stage 2 has had no ready replica for" in await page.text("#down")
        assert "none is starting" in await page.text("#down")
        await page.until(spoken("Stage 2 has no ready replica"))
        await page.evaluate("document.getElementById('stage-0').click()")
        await page.evaluate("document.querySelector('#down button').click()")
        await page.until(f"{DETAIL} === 'Stage 2: big-stage-2'")
        await page.evaluate("document.querySelector('.its-output').click()")
        await page.until("/truncated/.test(document.querySelector('.output').textContent)")
        said = await page.text(".output")
        assert f"big-stage-2-7: stage-02.safetensors: truncated {HOSTILE}" in said
        assert await page.faults() == []
        await page.screenshot(OUT / "live-page-stage-down.png")
        # Another stage's output is another one.
        await page.evaluate("document.getElementById('stage-0').click()")
        await page.until(f"!{shown('.output')}")
        await page.evaluate("document.getElementById('as-table').click()")
        await page.until("document.querySelectorAll('#rows tr.is-down').length === 1")
        assert "0/1 none ready" in await page.text("#rows tr.is-down")
        places = await page.evaluate(
            "[...document.querySelectorAll('#rows tr')].map((one) => one.cells[1].innerText)"
        )
        assert places == ["2nd", "1st key", "3rd", "4th"]
        server.tell(a_report())
        await page.until(f"!{shown('#down')}")
        assert page.errors == []

    run(tmp_path, work)


def test_a_pipeline_that_is_not_shown_is_said_to_be_down(tmp_path: Path) -> None:
    async def work(server: ReportServer, page: Page) -> None:
        down = StageReport(stage=2, function="big-stage-2", desired=1)
        (broken,) = with_stages(a_report(), s2=down).pipelines
        broken = msgspec.structs.replace(broken, pipeline=LONG)
        (well,) = a_report().pipelines
        report = msgspec.structs.replace(a_report(), pipelines=(well, broken))
        server.tell(report)
        await opened(server, page)
        assert await page.text("#pipeline-title") == "big"
        await tell_until(server, page, report, shown("#elsewhere"))
        assert f"{LONG}: stage 2 has no ready replica" in await page.text("#elsewhere")
        assert not await page.evaluate(shown("#down"))
        await page.look(360, 900)
        assert await page.evaluate("document.documentElement.scrollWidth") <= 360
        assert await page.faults() == []
        await page.evaluate("document.querySelector('#elsewhere button').click()")
        await page.until(f"document.getElementById('pipeline-title').textContent === '{LONG}'")
        await page.until(shown("#down"))
        assert not await page.evaluate(shown("#elsewhere"))
        assert LONG in await page.evaluate("location.search")
        assert page.errors == []

    run(tmp_path, work)


def test_refused_credentials_are_asked_for_when_a_person_says_so(tmp_path: Path) -> None:
    async def work(server: ReportServer, page: Page) -> None:
        server.tell(a_report())
        await opened(server, page)
        page.credentials = None  # the question is cancelled
        await server.stop()
        server.password = "another-one-9921"
        await server.start()
        await page.until(state("denied"))
        # Each try opens the browser's question: none by itself.
        notice = await page.text("#notice")
        assert "refused" in notice
        assert "again in" not in notice
        assert await page.evaluate(shown("#retry"))
        assert await page.faults() == []
        page.credentials = (USER, server.password)
        await page.evaluate("document.getElementById('retry').click()")
        await page.until(state("live"))
        assert server.password != PASSWORD

    run(tmp_path, work)


def strange() -> Report:
    """Names and numbers as they should not be."""
    report = a_report(12)
    busy = {"desired": 120, "ready": 100, "starting": 20, "draining": 15, "queue": 123456.0}
    stages = {
        "s0": msgspec.structs.replace(report.pipelines[0].stages[0], function=f"{LONG}-stage-0", **busy),
        "s1": StageReport(
            stage=1, function=HOSTILE, ready=2, desired=4, starting=2, draining=1, is_key=True, rank=0,
            reason=HOSTILE, replicas=(ReplicaReport(replica=HOSTILE, state="ready", node=HOSTILE),),
        ),
        "s2": StageReport(
            stage=2, function="numbers-that-are-none", ready=1, desired=1, queue=math.nan,
            utilisation_ratio=math.inf, arrival_cv=math.nan, service_s=-math.inf, wait_s=math.nan,
        ),
        "s3": StageReport(stage=3, function="nothing-told"),
    }  # fmt: skip
    report = with_stages(report, **stages)
    pipeline = msgspec.structs.replace(
        report.pipelines[0], pipeline=LONG, missing=HOSTILE, latency_s=math.nan, attainment_ratio=math.nan
    )
    now_s = time.time()
    decisions = (
        *report.decisions,
        DecisionReport(
            number=3, at_s=now_s, function=HOSTILE, kind="replicas", text=f"{HOSTILE} {LONG}",
            inputs={HOSTILE: math.nan, "wait_s": 0.1234567},
        ),
        DecisionReport(number=4, at_s=now_s, function=LONG, kind="hold", text=LONG * 4),
    )  # fmt: skip
    return msgspec.structs.replace(
        report,
        controller=HOSTILE,
        pipelines=(pipeline, msgspec.structs.replace(pipeline, pipeline="other")),
        decisions=decisions,
        functions=(FunctionReport(function=LONG, desired=1, reason=HOSTILE),),
        nodes=(*report.nodes, NodeReport(node=LONG, in_memory=tuple(f"{LONG}-{i}" for i in range(30)))),
        trouble=f"another controller leads {HOSTILE}",
    )


@pytest.mark.parametrize("width", [320, 360, 640, 768, 1280])
def test_strange_names_and_numbers_stay_in_their_places(tmp_path: Path, width: int) -> None:
    """640 is 1280 at a zoom of 200 %, 320 the narrowest that must do."""

    async def work(server: ReportServer, page: Page) -> None:
        await page.look(width, 900, "dark" if width == 768 else "light")
        server.tell(strange())
        await opened(server, page)
        for _ in range(3):
            server.tell(strange())
            await page.until(f"document.body.dataset.report === '{server.number}'")
        assert await page.evaluate("document.querySelectorAll('.decision').length") == 4
        assert await page.evaluate("document.images.length") == 1  # the page's own
        assert await page.evaluate("document.documentElement.scrollWidth") <= width
        assert await page.evaluate(SIDEWAYS) == []
        assert await page.evaluate(CUT_OFF) == []
        assert await page.faults() == []
        assert not await page.evaluate("/NaN|undefined|null|Infinity/.test(document.body.innerText)")
        assert len([one for one in page.requests if one.endswith(EVENTS_PATH)]) == 1
        assert page.errors == []
        await page.screenshot(OUT / f"live-page-strange-{width}.png")

    run(tmp_path, work)


def test_another_pipeline_starts_at_its_own_key_stage(tmp_path: Path) -> None:
    async def work(server: ReportServer, page: Page) -> None:
        (first,) = a_report(40, key=33).pipelines
        (second,) = a_report(3, key=2).pipelines
        second = msgspec.structs.replace(second, pipeline="small", execution="looping")
        first = msgspec.structs.replace(first, latency_s=0.9)
        server.tell(msgspec.structs.replace(a_report(), pipelines=(first, second)))
        await opened(server, page)
        await page.until(f"{DETAIL} === 'Stage 33: big-stage-33'")
        in_sight = "(({left, right}) => left >= 0 && right <= innerWidth)(%s.getBoundingClientRect())"
        assert await page.evaluate(in_sight % "document.getElementById('stage-33')")
        assert await page.text("#stage-33 .key") == "1st key stage"
        assert "900 ms of 500 ms" in await page.text("#summary .is-bad")
        assert "service41 ms" in (await page.text("#stage-33")).replace("\n", "")
        await page.evaluate("document.getElementById('row').focus()")
        await page.press("Home")
        await page.until(f"{DETAIL} === 'Stage 0: big-stage-0'")
        assert await page.text("#to-key") == "Go to key stage 33"
        await page.evaluate("document.getElementById('to-key').click()")
        await page.until(f"{DETAIL} === 'Stage 33: big-stage-33'")
        # The browser's own keys stay its own.
        await page.evaluate(
            "window.taken = !document.getElementById('row').dispatchEvent("
            "new KeyboardEvent('keydown', {key: 'ArrowLeft', altKey: true, bubbles: true, cancelable: true}))"
        )
        assert await page.evaluate("taken") is False
        await page.evaluate(
            "(({pipelines}) => { pipelines.value = 'small'; pipelines.dispatchEvent(new Event('change')); })"
            "({pipelines: document.getElementById('pipelines')})"
        )
        await page.until(f"{DETAIL} === 'Stage 2: big-stage-2'")
        assert await page.evaluate("document.querySelectorAll('#summary .is-bad').length") == 0
        assert await page.evaluate("document.getElementById('row').scrollLeft") == 0
        # Sessions of a looping pipeline are measured as a whole.
        assert "session41 ms" in (await page.text("#stage-2")).replace("\n", "")
        assert "service time of a session" in await page.text("#detail .facts")
        assert page.errors == []

    run(tmp_path, work)


def test_many_decisions_at_once_are_not_read_out_one_by_one(tmp_path: Path) -> None:
    async def work(server: ReportServer, page: Page) -> None:
        server.tell(a_report())
        await opened(server, page)
        await page.until("document.getElementById('announcer').textContent === 'The page is live.'")
        many = tuple(
            DecisionReport(number=10 + i, at_s=time.time(), function="big", kind="replicas", text=f"said {i}")
            for i in range(10)
        )
        report = msgspec.structs.replace(a_report(), decisions=many)
        await tell_until(server, page, report, spoken("said"))
        assert await page.text("#announcer") == "said 7. said 8. said 9. And 7 more."

    run(tmp_path, work)


NONE = "\N{EN DASH}"
TICKS = """
[...document.querySelectorAll("#charts .chart:nth-of-type(3) .tick")]
  .map((one) => one.textContent).filter((text) => /^[0-9.]+$/.test(text))
"""
MODULES = """
(async () => {
  const [{ Track, WINDOW_S }, { eventsOf }, format] =
    await Promise.all(["history", "sse", "format"].map((name) => import(`${location.origin}/ui/${name}.js`)));
  const track = new Track();
  const stage = (ready) => ({ function: "a", ready, desired: 1 });
  track.push(1, { stages: [stage(1), { function: "gone", ready: 1 }] });
  for (const atS of [2, 3, 4]) track.push(atS, { stages: [stage(0)] });
  const outSinceS = track.outSince("a");
  track.push(5, { stages: [stage(1)] });
  const known = track.functions;
  for (let i = 1; i <= WINDOW_S; i += 1) track.push(5 + i, { stages: [stage(1)] });
  const text =
    "event: report\\r\\ndata: {\\"a\\": 1}\\r\\n\\r\\n: nothing\\n\\ndata: x\\ndata: y\\n\\ndata: cut off";
  const bytes = new TextEncoder().encode(text);
  const heard = [];
  for (const size of [1, 7, 1000]) {
    const body = new ReadableStream({
      start(controller) {
        for (let i = 0; i < bytes.length; i += size) controller.enqueue(bytes.slice(i, i + size));
        controller.close();
      },
    });
    for await (const { event, data } of eventsOf(body)) heard.push([event, data]);
  }
  return {
    outSinceS, isOutNow: track.outSince("a"), unknown: track.outSince("never"),
    known, left: track.functions, heard,
    ordinals: [1, 2, 3, 4, 11, 12, 13, 21, 102, 111].map(format.ordinal),
    durations: [0, 0.0004, 0.0412, 0.31, 1.25, 95, 600, 7200, NaN, null].map(format.seconds),
  };
})()
"""


def test_what_the_page_remembers_and_how_it_reads_and_writes(tmp_path: Path) -> None:
    async def work(server: ReportServer, page: Page) -> None:
        server.tell(a_report())
        await opened(server, page)
        found = await page.evaluate(MODULES)
        assert (found["outSinceS"], found["isOutNow"], found["unknown"]) == (2, None, None)
        assert (found["known"], found["left"]) == (["a", "gone"], ["a"])
        assert found["heard"] == [["report", '{"a": 1}'], ["message", "x\ny"]] * 3
        assert found["ordinals"] == [
            "1st", "2nd", "3rd", "4th", "11th", "12th", "13th", "21st", "102nd", "111th",
        ]  # fmt: skip
        assert found["durations"] == [
            "0 ms", "< 1 ms", "41.2 ms", "310 ms", "1.25 s", "95 s", "10 min", "2 h", NONE, NONE,
        ]  # fmt: skip
        # Half of a scale that counts things is a whole number too.
        assert await page.evaluate(TICKS) == ["0", "5", "10"]

    run(tmp_path, work)
