"""The live page in a browser, over a pipeline that runs: what an operator sees, and when."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import msgspec
import pytest
from support.browser import Page, browsing, need_chromium
from support.local_function import authorization
from support.pipeline_world import Served, served

from keystage.bundle.api import emulated
from keystage.bundle.store import write
from keystage.observability.api import REPORT_PATH, Report

pytestmark = pytest.mark.slow

DEVICE = "emulated:alpha=0.005,beta=0.005"
STAGES = 3
OUT = Path(__file__).parents[2] / "out"
SHOWN_WITHIN_S = 2.0
"""What is promised; a report comes once a second."""
WATCH_STAGE_1 = r"""
(() => {
  const look = () => {
    const text = document.querySelector("#stage-1 .replica-text").textContent;
    if (/\/2( |$)/.test(text)) window.shownAtMs ??= Date.now();
  };
  new MutationObserver(look).observe(document.getElementById("row"), {
    subtree: true, childList: true, characterData: true,
  });
})()
"""
WATCH_ANSWER = """
(() => {
  window.lengths = [];
  new MutationObserver(() => lengths.push(document.getElementById("answer").textContent.length)).observe(
    document.getElementById("answer"), {subtree: true, childList: true, characterData: true});
})()
"""


async def report(pipeline: Served) -> Report | None:
    headers = authorization(*pipeline.world.credentials)
    async with pipeline.session.get(f"{pipeline.world.gateway_url}{REPORT_PATH}", headers=headers) as answer:
        return msgspec.json.decode(await answer.read(), type=Report) if answer.status == 200 else None


async def reported(pipeline: Served) -> None:
    """Waits until a report shows every stage ready."""
    end_s = time.monotonic() + 60.0
    while True:
        found = await report(pipeline)
        if found is not None and any(
            len(p.stages) == STAGES and all(s.ready for s in p.stages) for p in found.pipelines
        ):
            return
        assert time.monotonic() < end_s, f"not within 60 s: a report of {STAGES} ready stages; {found}"
        await asyncio.sleep(0.1)


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    need_chromium()
    folder = tmp_path / "bundle"
    folder.mkdir()
    write(folder, emulated("em", STAGES, execution="looping", activation_bytes=512))
    return folder


async def decided_at_s(pipeline: Served, function: str, replicas: int) -> float:
    """When it was first decided that a function shall have so many replicas."""
    found = await report(pipeline)
    assert found is not None
    times = [d.at_s for d in found.decisions if d.function == function and d.after == replicas]
    assert times, found.decisions
    return min(times)


async def scale(pipeline: Served, function: str, replicas: int) -> None:
    url = f"{pipeline.world.gateway_url}/system/scale-function/{function}"
    body = {"serviceName": function, "replicas": replicas}
    headers = authorization(*pipeline.world.credentials)
    async with pipeline.session.post(url, json=body, headers=headers) as answer:
        assert answer.status == 202, await answer.text()


async def see_the_change(pipeline: Served, page: Page) -> None:
    await page.evaluate(WATCH_STAGE_1)
    await scale(pipeline, "em-stage-1", 2)
    shown_at_s = await page.until("window.shownAtMs") / 1000
    assert shown_at_s - await decided_at_s(pipeline, "em-stage-1", 2) < SHOWN_WITHIN_S
    await page.until("document.querySelector('#stage-1 .replica-text').textContent === '2/2'")
    assert await page.evaluate("document.querySelectorAll('#stage-1 .dot.ready').length") == 2
    await page.until("/em-stage-1/.test(document.getElementById('decisions').textContent)")


async def play(page: Page) -> None:
    await page.evaluate(WATCH_ANSWER)
    await page.evaluate("document.querySelector('[name=max_tokens]').value = 60")
    await page.evaluate("document.querySelector('[name=prompt]').select()")
    await page.write("Stages")
    await page.evaluate("document.getElementById('send').click()")
    await page.until("/complete/i.test(document.getElementById('play-facts').textContent)")
    facts = await page.text("#play-facts")
    assert "first token after" in facts
    assert "60 tokens" in facts
    assert "X-Call-Id" in facts
    lengths = await page.evaluate("lengths.filter((n, i) => n && n !== lengths[i - 1])")
    assert len(lengths) >= 3, "the answer came at once"
    # It can be inspected.
    await page.evaluate("document.querySelector('#requests button').click()")
    await page.until("!document.getElementById('found').hidden")
    assert await page.text("#requests button") in await page.text("#found")


def test_a_running_pipeline_behind_credentials(bundle: Path, tmp_path: Path) -> None:
    async def run() -> None:
        async with served(bundle, tmp_path, controller=True, device=DEVICE) as pipeline:
            await reported(pipeline)
            url = pipeline.world.gateway_url
            async with browsing(tmp_path, pipeline.world.credentials) as page:
                await page.look(1280, 900)
                await page.goto(f"{url}/ui")
                assert page.asked >= 1
                await page.until("document.body.dataset.state === 'live'")
                await page.until(f"document.querySelectorAll('#row .card').length === {STAGES}")
                assert await page.text("#pipeline-title") == "em"
                await see_the_change(pipeline, page)
                await play(page)
                assert await page.faults() == []
                await page.screenshot(OUT / "live-page-1280.png")
                await page.look(360, 740)
                assert await page.evaluate("document.documentElement.scrollWidth") <= 360
                await page.screenshot(OUT / "live-page-360.png")
                await page.look(1280, 900, "dark")
                assert await page.faults() == []
                await page.screenshot(OUT / "live-page-dark.png")
                assert page.errors == []
                outside = [r for r in page.requests if not r.startswith((f"{url}/", "about:"))]
                assert outside == []

    asyncio.run(run())
