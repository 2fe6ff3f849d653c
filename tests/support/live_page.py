"""The live page in a browser over reports that a test tells."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from support.browser import Page, browsing, need_chromium
from support.report_server import PASSWORD, USER, ReportServer, a_report, report_server

OUT = Path(__file__).parents[2] / "out"
Work = Callable[[ReportServer, Page], Awaitable[None]]


def run(tmp_path: Path, work: Work) -> None:
    """Does something with a server of reports and a page that has its credentials, 1280 pixels wide."""
    need_chromium()

    async def inside() -> None:
        async with report_server() as server, browsing(tmp_path, (USER, PASSWORD)) as page:
            await page.look(1280, 900)
            await work(server, page)

    asyncio.run(inside())


@asynccontextmanager
async def told(server: ReportServer, stages: int) -> AsyncIterator[None]:
    """Reports ten times a second, as long as the context lasts."""

    async def tell() -> None:
        for i in range(100_000):
            server.tell(a_report(stages, round_=i))
            await asyncio.sleep(0.1)

    task = asyncio.create_task(tell())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})


def state(name: str) -> str:
    """Whether the page is in a state (`live`, `stale`, `none`, `away`, `denied`)."""
    return f"document.body.dataset.state === '{name}'"


def shown(selector: str) -> str:
    """Whether an element is to be seen."""
    return f"document.querySelector('{selector}').checkVisibility()"


async def opened(server: ReportServer, page: Page) -> None:
    """Opens the page and waits until it shows a pipeline."""
    await page.goto(f"{server.url}/ui/")
    await page.until(shown("#full"))
