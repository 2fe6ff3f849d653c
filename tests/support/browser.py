"""Headless Chromium driven by its DevTools protocol, for tests of pages; without it they skip and say so.

https://chromedevtools.github.io/devtools-protocol/. One browser, one page, nothing fetched from outside: what
the page asks for is kept, so that a test can hold that it asks nobody but its own server.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import itertools
import json
import os
import shutil
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from support.servers import need_program

WAIT_S = 60.0
NAMES = ("chromium", "chromium-browser", "google-chrome")
OPTIONS = (
    "--headless=new",
    "--no-sandbox",  # tests run as root in containers; the pages are our own
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-breakpad",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-extensions",
    "--disable-features=OptimizationHints,MediaRouter,Translate",
    "--disable-sync",
    "--hide-scrollbars",
    "--metrics-recording-only",
    "--mute-audio",
    "--no-first-run",
    "--no-default-browser-check",
    "--remote-debugging-port=0",
)


def need_chromium() -> str:
    """Path of Chromium; skips the test without it, or fails it under KEYSTAGE_REQUIRE_ALL=1."""
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    return found or need_program(NAMES[0])


def axe_source() -> str:
    """The accessibility engine axe-core, out of a package that carries it; skips or fails without."""
    import importlib.util

    for name in ("axe_playwright_python", "axe_core_python", "axe_selenium_python"):
        spec = importlib.util.find_spec(name)
        for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
            for file in sorted(Path(folder).rglob("axe.min.js")):
                return file.read_text()
    if os.environ.get("KEYSTAGE_REQUIRE_ALL") == "1":
        pytest.fail("no package carries axe.min.js (axe-playwright-python) and KEYSTAGE_REQUIRE_ALL=1")
    pytest.skip("no package carries axe.min.js (axe-playwright-python)")


@dataclasses.dataclass(slots=True)
class Page:
    """One page.

    Attributes:
        credentials: user and password, given where a server asks for them; None: the question is cancelled.
        errors: what went to the console as an error or a warning, and what was thrown.
        requests: address of everything that was asked for.
        asked: how often a server asked for credentials.
    """

    socket: aiohttp.ClientWebSocketResponse
    credentials: tuple[str, str] | None = None
    errors: list[str] = dataclasses.field(default_factory=list)
    requests: list[str] = dataclasses.field(default_factory=list)
    asked: int = 0
    target: str = ""
    _numbers: Any = dataclasses.field(default_factory=lambda: itertools.count(1))
    _answers: dict[int, asyncio.Future[Any]] = dataclasses.field(default_factory=dict)
    _loaded: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    _tasks: set[asyncio.Task[Any]] = dataclasses.field(default_factory=set)

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Calls a method of the protocol.

        Raises:
            AssertionError: the browser refused it.
        """
        number = next(self._numbers)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        message = {"id": number, "method": method, "params": parameters}
        if self.target:
            message["sessionId"] = self.target
        await self.socket.send_json(message)
        async with asyncio.timeout(WAIT_S):
            found = await answer
        assert "error" not in found, f"{method}: {found.get('error')}"
        result: dict[str, Any] = found["result"]
        return result

    async def read(self) -> None:
        """Takes what the browser says, until it ends."""
        async for message in self.socket:
            event = json.loads(message.data)
            if "id" in event:
                self._answers.pop(event["id"]).set_result(event)
            else:
                self._heard(event["method"], event.get("params", {}))

    def _heard(self, method: str, said: dict[str, Any]) -> None:
        if method == "Runtime.consoleAPICalled" and said["type"] in ("error", "warning", "assert"):
            self.errors.append(" ".join(str(a.get("value", a.get("description"))) for a in said["args"]))
        elif method == "Runtime.exceptionThrown":
            detail = said["exceptionDetails"]
            self.errors.append(detail.get("exception", {}).get("description") or detail["text"])
        elif method == "Log.entryAdded" and said["entry"]["level"] in ("error", "warning"):
            self.errors.append(f"{said['entry']['text']} {said['entry'].get('url', '')}")
        elif method == "Network.requestWillBeSent":
            self.requests.append(said["request"]["url"])
        elif method == "Page.loadEventFired":
            self._loaded.set()
        elif method == "Fetch.requestPaused":
            self._soon(self.call("Fetch.continueRequest", requestId=said["requestId"]))
        elif method == "Fetch.authRequired":
            self.asked += 1
            answer: dict[str, Any] = {"response": "CancelAuth"}
            if self.credentials is not None:
                user, password = self.credentials
                answer = {"response": "ProvideCredentials", "username": user, "password": password}
            self._soon(
                self.call("Fetch.continueWithAuth", requestId=said["requestId"], authChallengeResponse=answer)
            )

    def _soon(self, work: Any) -> None:
        async def quiet() -> None:
            with contextlib.suppress(AssertionError):  # the request was given up meanwhile
                await work

        task = asyncio.create_task(quiet())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def goto(self, url: str) -> None:
        """Opens an address and waits until it is loaded."""
        self._loaded.clear()
        found = await self.call("Page.navigate", url=url)
        assert not found.get("errorText"), f"{url}: {found['errorText']}"
        async with asyncio.timeout(WAIT_S):
            await self._loaded.wait()

    async def evaluate(self, expression: str) -> Any:
        """Value of an expression in the page; a promise is awaited.

        Raises:
            AssertionError: it threw.
        """
        found = await self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in found, f"{expression[:200]}: {found['exceptionDetails']}"
        return found["result"].get("value")

    async def until(self, expression: str, timeout_s: float = WAIT_S) -> Any:
        """Waits until an expression is true, and gives its value; fails by name when it never is."""
        end_s = time.monotonic() + timeout_s
        while not (value := await self.evaluate(expression)):
            assert time.monotonic() < end_s, f"not within {timeout_s:g} s: {expression}; {self.errors}"
            await asyncio.sleep(0.05)
        return value

    async def text(self, selector: str) -> str:
        """What an element shows."""
        return str(await self.evaluate(f"document.querySelector({json.dumps(selector)}).innerText"))

    async def look(self, width: int, height: int, scheme: str = "light") -> None:
        """Sets the window's size in CSS pixels, and the colour scheme the system asks for."""
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=False,
        )  # fmt: skip
        await self.call(
            "Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}]
        )

    async def press(self, key: str) -> None:
        """Presses and releases a key that is not a character (`ArrowRight`, `End`, `Tab`)."""
        codes = {"ArrowLeft": 37, "ArrowRight": 39, "Home": 36, "End": 35, "Tab": 9}
        for kind in ("rawKeyDown", "keyUp"):
            await self.call(
                "Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=codes[key]
            )

    async def write(self, text: str) -> None:
        """Writes into what has the focus."""
        await self.call("Input.insertText", text=text)

    async def screenshot(self, file: Path, selector: str | None = None) -> None:
        """Keeps the whole page as PNG, or one element of it."""
        await self.evaluate("scrollTo(0, 0)")
        box = (await self.call("Page.getLayoutMetrics"))["cssContentSize"]
        if selector is not None:
            box = await self.evaluate(
                "(({x, y, width, height}) => ({x: x + scrollX, y: y + scrollY, width, height}))"
                f"(document.querySelector({json.dumps(selector)}).getBoundingClientRect())"
            )
        clip = {**box, "height": min(box["height"], 6000), "scale": 1}
        found = await self.call("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(base64.b64decode(found["data"]))

    async def faults(self) -> list[str]:
        """Serious and critical faults that axe-core finds in the page as it is."""
        await self.evaluate(axe_source() + "\n;true")
        found = await self.evaluate(
            "axe.run(document, {resultTypes: ['violations']}).then(({violations}) => violations"
            ".filter(({impact}) => impact === 'serious' || impact === 'critical')"
            ".map(({id, nodes}) => `${id}: ${nodes.slice(0, 3).map(({html, failureSummary}) => "
            "`${html.slice(0, 160)} (${failureSummary.slice(0, 200)})`).join(' | ')}`))"
        )
        return list(found)


@contextlib.asynccontextmanager
async def browsing(folder: Path, credentials: tuple[str, str] | None = None) -> AsyncIterator[Page]:
    """A page of a browser of its own, with an empty profile; both end with the context."""
    profile = folder / "chromium"
    log = (folder / "chromium.log").open("wb")
    program = await asyncio.create_subprocess_exec(
        need_chromium(), *OPTIONS, f"--user-data-dir={profile}", "about:blank",
        stdout=log, stderr=log, env={**os.environ, "HOME": str(folder)},
    )  # fmt: skip
    try:
        address = await _address(program, profile / "DevToolsActivePort", folder / "chromium.log")
        async with (
            aiohttp.ClientSession() as session,
            session.ws_connect(address, max_msg_size=0, autoping=True) as socket,
        ):
            page = Page(socket, credentials)
            reading = asyncio.create_task(page.read())
            try:
                target = (await page.call("Target.createTarget", url="about:blank"))["targetId"]
                attached = await page.call("Target.attachToTarget", targetId=target, flatten=True)
                page.target = attached["sessionId"]
                for part in ("Page", "Runtime", "Log", "Network"):
                    await page.call(f"{part}.enable")
                await page.call("Fetch.enable", handleAuthRequests=True)
                await page.call("Emulation.setFocusEmulationEnabled", enabled=True)
                yield page
            finally:
                reading.cancel()
                await asyncio.wait({reading})
    finally:
        if program.returncode is None:
            program.terminate()
            try:
                await asyncio.wait_for(program.wait(), 10.0)
            except TimeoutError:
                program.kill()
                await program.wait()
        log.close()


async def _address(program: asyncio.subprocess.Process, file: Path, log: Path) -> str:
    end_s = time.monotonic() + WAIT_S
    while True:
        with contextlib.suppress(OSError, ValueError):
            port, path = file.read_text().splitlines()[:2]
            return f"ws://127.0.0.1:{int(port)}{path}"
        assert program.returncode is None, log.read_text(errors="replace")[-2000:]
        assert time.monotonic() < end_s, f"Chromium did not begin to listen within {WAIT_S:g} s"
        await asyncio.sleep(0.05)
