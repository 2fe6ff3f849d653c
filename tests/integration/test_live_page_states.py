"""The live page in every state, with a thousand stages, by keyboard: over reports that a test tells."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import msgspec
import pytest
from support.browser import Page, browsing, need_chromium
from support.live_page import OUT, run, shown, state, told
from support.report_server import ReportServer, a_report, report_server

pytestmark = pytest.mark.slow

MOST_ELEMENTS = 6000
"""Of the page with a thousand stages; a card has twenty."""


def test_from_no_controller_to_a_pipeline_and_back(tmp_path: Path) -> None:
    async def work(server: ReportServer, page: Page) -> None:
        await page.goto(f"{server.url}/ui/")
        await page.until(state("none"))
        await page.until(shown("#none"))
        assert "keystage up" in await page.text("#none")
        assert await page.faults() == []
        report = a_report()
        server.tell(msgspec.structs.replace(report, pipelines=(), nodes=(), decisions=()))
        await page.until(shown("#empty"))
        assert f"faas-cli deploy --gateway {server.url}" in await page.text("#commands")
        assert "Nothing was decided" in await page.text("#log-note")
        assert await page.faults() == []
        server.tell(report)
        await page.until(shown("#full"))
        assert not await page.evaluate(shown("#empty"))
        assert "2 -> 4, predicted wait 310 ms > 80 ms" in await page.text("#decisions")
        await page.until("/2 -> 4/.test(document.getElementById('announcer').textContent)")
        server.tell(report, trouble="another controller leads")
        await page.until(shown("#trouble"))
        assert "another controller leads" in await page.text("#trouble")

    run(tmp_path, work)


def test_old_reports_and_a_gateway_that_is_away_are_said(tmp_path: Path) -> None:
    async def work(server: ReportServer, page: Page) -> None:
        server.tell(a_report(), at_s=time.time() - 60)
        await page.goto(f"{server.url}/ui/")
        await page.until(state("stale"))
        assert "controller may be gone" in await page.text("#notice")
        assert await page.faults() == []
        await page.screenshot(OUT / "live-page-stale.png")
        server.tell(a_report())
        await page.until(state("live"))
        assert not await page.evaluate(shown("#notice"))
        await server.stop()
        await page.until(state("away"))
        await page.until("/Trying again/.test(document.getElementById('notice').innerText)")
        assert await page.evaluate(shown("#full"))  # what was known stays to be seen
        await page.until("/away/.test(document.getElementById('announcer').textContent)")
        await server.start()
        server.tell(a_report())
        await page.evaluate("document.getElementById('retry').click()")
        await page.until(state("live"))

    run(tmp_path, work)


def test_a_thousand_stages_cost_what_a_screen_shows(tmp_path: Path) -> None:
    async def work(server: ReportServer, page: Page) -> None:
        async with told(server, 1000):
            await page.goto(f"{server.url}/ui/")
            await page.until("document.querySelectorAll('#row .card').length > 3")
            assert await page.evaluate(shown("#overview"))
            await page.evaluate("window.kept = document.getElementById('stage-0')")
            texts = set()
            end_s = time.monotonic() + 60
            while len(texts) < 5 and time.monotonic() < end_s:
                texts.add(await page.evaluate("kept.querySelector('.queue-text').textContent"))
            assert len(texts) == 5, "the first card changes with the reports"
            assert await page.evaluate("kept === document.getElementById('stage-0')")
            await page.evaluate("document.getElementById('row').focus()")
            await page.press("End")
            await page.until("document.getElementById('stage-999')?.checkVisibility()")
            active = "document.getElementById('row').getAttribute('aria-activedescendant')"
            assert await page.evaluate(active) == "stage-999"
            await page.until("document.querySelector('#detail h3').innerText === 'Stage 999: big-stage-999'")
            assert await page.evaluate("document.querySelectorAll('#row .card').length") < 40
            assert await page.evaluate("document.querySelectorAll('*').length") < MOST_ELEMENTS
            await page.evaluate("document.getElementById('as-table').click()")
            await page.until("document.querySelectorAll('#rows tr').length === 100")
            assert await page.evaluate("document.querySelectorAll('*').length") < MOST_ELEMENTS
            assert "stages 0 to 99 of 1000" in await page.text("#pager")
            await page.screenshot(OUT / "live-page-1000-stages.png")
            assert page.errors == []

    run(tmp_path, work)


def test_by_keyboard_and_by_ear(tmp_path: Path) -> None:
    async def work(server: ReportServer, page: Page) -> None:
        server.tell(a_report())
        await page.goto(f"{server.url}/ui/")
        await page.until(shown("#full"))
        await page.press("Tab")
        assert await page.evaluate("document.activeElement.className") == "skip"
        focused = set()
        for _ in range(60):
            await page.press("Tab")
            focused.add(await page.evaluate("document.activeElement.id"))
        assert {"row", "as-table", "log-text", "log-kind", "send", "answer"} <= focused
        # What is worth a look first is chosen: the key stage.
        await page.until("document.querySelector('#detail h3').textContent === 'Stage 1: big-stage-1'")
        await page.evaluate("document.getElementById('row').focus()")
        await page.press("Home")
        await page.until("document.querySelector('#detail h3').textContent === 'Stage 0: big-stage-0'")
        await page.press("ArrowRight")
        await page.until("document.querySelector('#detail h3').textContent === 'Stage 1: big-stage-1'")
        spoken = await page.evaluate("document.getElementById('stage-1').getAttribute('aria-label')")
        for part in (
            "1st key stage",
            "31 waiting",
            "2 of 4 replicas ready",
            "2 starting",
            "utilisation 97 %",
        ):
            assert part in spoken
        assert "predicted wait 310 ms" in await page.text("#detail .reason")
        await page.evaluate("document.getElementById('log-text').focus()")
        await page.write("stage-1")
        await page.until("document.querySelectorAll('.decision').length === 1")
        assert "1 of 2 decisions" in await page.text("#log-note")
        await page.evaluate("document.getElementById('as-table').click()")
        await page.until("document.querySelectorAll('#rows tr').length === 4")
        assert "97 %" in await page.text("#rows")
        assert await page.faults() == []

    run(tmp_path, work)


@pytest.mark.parametrize("width", [360, 768, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_serious_fault_of_accessibility_and_nothing_sticks_out(
    tmp_path: Path, width: int, scheme: str
) -> None:
    async def work(server: ReportServer, page: Page) -> None:
        await page.look(width, 900, scheme)
        async with told(server, 12):
            await page.goto(f"{server.url}/ui/")
            await page.until(shown("#full"))
            await page.until("document.querySelector('#charts path').getAttribute('d')?.length > 20")
            assert await page.faults() == []
            assert await page.evaluate("document.documentElement.scrollWidth") <= width
            paper = await page.evaluate("getComputedStyle(document.body).backgroundColor")
            await page.evaluate("document.querySelector('[data-theme-choice=dark]').click()")
            dark = await page.evaluate("getComputedStyle(document.body).backgroundColor")
            assert (paper == dark) is (scheme == "dark")
            await page.goto(f"{server.url}/ui/")  # the choice is kept
            assert await page.evaluate("getComputedStyle(document.body).backgroundColor") == dark
            await page.until(shown("#full"))
            await page.screenshot(OUT / f"live-page-told-{width}-{scheme}.png")
            assert page.errors == []

    run(tmp_path, work)


def test_a_slow_request_is_traced_to_a_cold_start(tmp_path: Path) -> None:
    async def work(server: ReportServer, page: Page) -> None:
        report = a_report()
        (pipeline,) = report.pipelines
        stages = list(pipeline.stages)
        stages[2] = msgspec.structs.replace(stages[2], ready=0, starting=1, desired=1, queue=3.0, wait_s=1.9)
        cold = msgspec.structs.replace(
            report, pipelines=(msgspec.structs.replace(pipeline, stages=tuple(stages)),)
        )
        # Two seconds of it an instant ago, as a page has seen them that was open then.
        began_s = time.time() - 6
        server.tell(report, at_s=began_s - 3)
        await page.goto(f"{server.url}/ui/")
        await page.until(shown("#full"))
        for i in range(4):
            # Each is a moment of its own: a page that is told late is told the newest only.
            server.tell(cold, at_s=began_s + i * 0.7)
            await page.until(f"document.body.dataset.report === '{server.number}'")
        server.tell(report, at_s=began_s + 5)
        await page.until(f"document.body.dataset.report === '{server.number}'")
        form = "document.getElementById('inspect-form').elements"
        await page.evaluate(f"{form}.start.value = '{int(began_s * 1e9)}'")
        await page.evaluate(f"{form}.duration.value = '2.1'")
        await page.evaluate("document.getElementById('inspect-form').requestSubmit()")
        await page.until("!document.getElementById('found').hidden")
        verdict = await page.text(".verdict")
        assert "stage 2, no replica was ready for about 2.1 s, cold start" in verdict
        assert (await page.text(".causes tbody tr")).startswith("2 big-stage-2")

    run(tmp_path, work)


def test_without_credentials_there_is_no_page(tmp_path: Path) -> None:
    need_chromium()

    async def inside() -> None:
        async with report_server() as server, browsing(tmp_path) as page:
            server.tell(a_report())
            await page.goto(f"{server.url}/ui/")
            assert page.asked == 1
            assert (await page.text("body")).strip() == "credentials are missing or wrong"

    asyncio.run(inside())
