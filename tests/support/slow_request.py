"""The case of docs/slow-request.md: stage 2 starts cold while requests run, and who looks finds the cause.

Nothing is staged: a pipeline of four stages with gateway, router, workers, controller; a collector of traces;
a browser on the live page. Somebody sets stage 2 to no replica, requests go on, and the next ones pay for it.
The test plays it with emulated devices. `make pictures` plays it with SmolLM2 and writes the pictures of the
page anew, and what trace and commands said into out/slow-request.txt.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path

import aiohttp
import msgspec
from support.browser import Page, browsing, need_chromium
from support.collector import Collector, Seen, collector
from support.local_function import authorization

from keystage.bundle.store import load
from keystage.local.pipeline import deployments_for
from keystage.local.world import LocalWorld
from keystage.observability.api import REPORT_PATH
from keystage.router.api import RouterStats

ROOT = Path(__file__).parents[2]
SLOW = 2
"""The stage that starts cold."""
WAIT_S = 60.0
EVERY_S = 1.0
"""Between two requests that go on in the background."""
WIDTH = 880
"""Of the window, in CSS pixels: one panel beside none, so that pictures can be read."""
TOLD = ("cold_start", "stage", "replica", "steps")
"""Attributes `keystage.` that a line of a trace shows."""
REQUEST = """
[document.querySelector("#requests button").dataset.id,
 document.querySelector("#requests li").textContent.match(/trace (\\w+)/)[1]]
"""
CARD = f"document.getElementById('stage-{SLOW}')"


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """What led to the cause.

    Attributes:
        facts: what the playground said of the slow request, and a line for it and for the one before.
        stage: words of the stage's card while it starts, and what the page said of it below.
        verdict: the inspector's sentence about the slow request.
        causes: its table, the likeliest stage first.
        meanwhile: decisions beside it.
        elsewhere: the sentence about the slowest request of another client, found by its time.
        decisions: the page's decision log of the stage, the newest first.
        spans: the slow request's trace as the collector has it.
        commands: what each command printed, by how it is typed.
        errors: of the page's console.
    """

    facts: str
    stage: str
    verdict: str
    causes: str
    meanwhile: str
    elsewhere: str
    decisions: str
    spans: tuple[Seen, ...]
    commands: dict[str, str]
    errors: tuple[str, ...]


@dataclasses.dataclass(slots=True)
class Case:
    """The world while it is up.

    Attributes:
        asked: requests of other clients that were answered: seconds taken, and the answer's `X-Start-Time`.
    """

    world: LocalWorld
    pipeline: str
    place: Collector
    session: aiohttp.ClientSession
    asked: list[tuple[float, str]] = dataclasses.field(default_factory=list)

    @property
    def stage(self) -> str:
        return f"{self.pipeline}-stage-{SLOW}"

    async def ask(self) -> None:
        """One request as any client sends it."""
        body = {"model": self.pipeline, "prompt": "The capital of France is", "max_tokens": 8}
        url = f"{self.world.gateway_url}/function/{self.pipeline}/v1/completions"
        begun_s = time.monotonic()
        async with self.session.post(url, json=body) as answer:
            assert answer.status == 200, await answer.text()
            await answer.read()
            self.asked.append((time.monotonic() - begun_s, answer.headers["X-Start-Time"]))

    async def scale(self, replicas: int) -> None:
        """A person's wish, as `curl` states it."""
        url = f"{self.world.gateway_url}/system/scale-function/{self.stage}"
        headers = authorization(*self.world.credentials)
        async with self.session.post(url, json={"replicas": replicas}, headers=headers) as answer:
            assert answer.status == 202, await answer.text()

    async def reported(self) -> None:
        """Waits until a controller has reported: before it the page has nothing to show, and says so."""
        url = f"{self.world.gateway_url}{REPORT_PATH}"
        headers = authorization(*self.world.credentials)
        async with asyncio.timeout(WAIT_S):
            while True:
                async with self.session.get(url, headers=headers) as answer:
                    if answer.status == 200:
                        return
                await asyncio.sleep(0.1)

    async def none_ready(self) -> None:
        """Waits until the router has no worker of the stage: one that leaves takes sessions for a moment."""
        url = f"{self.world.gateway_url}/function/{self.pipeline}/_/stats"
        async with asyncio.timeout(WAIT_S):
            while True:
                async with self.session.get(url) as answer:
                    stats = msgspec.json.decode(await answer.read(), type=RouterStats)
                if not any(SLOW in one.stages and one.state == "ready" for one in stats.replicas):
                    return
                await asyncio.sleep(0.02)

    async def command(self, *words: str) -> str:
        """Standard output of a `keystage` command that asks the gateway."""
        password = self.world.home.credentials / "basic-auth-password"
        program = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "keystage.cli.main", *words,
            "--gateway", self.world.gateway_url, "--password-file", str(password),
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        async with asyncio.timeout(WAIT_S):
            out, problems = await program.communicate()
        assert program.returncode in (0, 1), problems.decode()
        return out.decode()


@contextlib.asynccontextmanager
async def up(bundle: Path, folder: Path, device: str, keysmanager: bool) -> AsyncIterator[Case]:
    """The pipeline, with traces on."""
    made = load(bundle)
    with collector() as place:
        env = {"KEYSTAGE_TRACES": "on", "OTEL_EXPORTER_OTLP_ENDPOINT": place.url}
        async with LocalWorld(folder / "home", gateway_port=0, env=env, keysmanager=keysmanager) as world:
            functions = deployments_for(bundle, made, device=device, env=env)
            await world.deploy(*functions)
            for function in functions:
                await world.wait_ready(function.service, 1)
            async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2 * WAIT_S)) as session:
                yield Case(world, made.name, place, session)


@contextlib.asynccontextmanager
async def requests_go_on(case: Case) -> AsyncIterator[None]:
    """A request a second until the context ends; every one of them is answered."""

    async def send() -> None:
        async with asyncio.TaskGroup() as group:
            while not is_over.is_set():
                group.create_task(case.ask())
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(is_over.wait(), EVERY_S)

    is_over = asyncio.Event()
    task = asyncio.create_task(send())
    try:
        yield
    finally:
        is_over.set()
        await task


async def play(
    bundle: Path,
    folder: Path,
    pictures: Path,
    *,
    device: str = "cpu",
    keysmanager: bool = False,
    is_alone: bool = False,
) -> Found:
    """Plays the case and looks for the cause as an operator does.

    Args:
        bundle: a looping pipeline of at least three stages.
        folder: for what runs.
        pictures: folder for pictures of the page.
        device: of its stages.
        keysmanager: whether one keeps the stages in memory; without it a start reads the bundle.
        is_alone: no other request is there, so that it is this one which wakes the stage.

    Raises:
        AssertionError: a step did not come to its end, by name.
    """
    need_chromium()
    async with (
        up(bundle, folder, device, keysmanager) as case,
        browsing(folder, case.world.credentials) as page,
    ):
        await case.reported()
        await page.look(WIDTH, 900)
        await page.goto(f"{case.world.gateway_url}/ui/")
        await page.until("document.body.dataset.state === 'live'")
        await page.until(f"{CARD} !== null")
        async with contextlib.nullcontext() if is_alone else requests_go_on(case):
            await _send(page, 1)
            await case.scale(0)
            await case.none_ready()
            stage = asyncio.create_task(_look_at_stage(case, page, pictures))
            await _send(page, 2)
            shown, status = await stage
            facts = f"{await page.text('#play-facts')}\n{await page.text('#requests')}"
            await page.screenshot(pictures / "slow-request-playground.png", "#play")
            verdict = await _inspect(page, pictures)
            causes, meanwhile = await page.text("#found tbody"), await page.text("#found .meanwhile")
            elsewhere = "" if is_alone else await _inspect_by_time(page, *max(case.asked))
            decisions = await _decisions(page, pictures)
            explained = await case.command("explain", f"{case.pipeline}/{SLOW}")
        request, trace = await page.evaluate(REQUEST)
        spans = await asyncio.to_thread(case.place.wait, _whole(trace), f"the trace of {request}")
        return Found(
            facts,
            shown,
            verdict,
            causes,
            meanwhile,
            elsewhere,
            decisions,
            tuple(span for span in spans if span.trace_id == trace),
            {f"status {case.pipeline}": status, f"explain {case.pipeline}/{SLOW}": explained},
            tuple(page.errors),
        )


async def _send(page: Page, number: int) -> None:
    """The playground's request, to its end."""
    await page.evaluate("document.querySelector('#play-form [name=max_tokens]').value = 16")
    await page.evaluate("document.getElementById('send').click()")
    await page.until(f"document.querySelectorAll('#requests li').length === {number}", 2 * WAIT_S)


async def _look_at_stage(case: Case, page: Page, pictures: Path) -> tuple[str, str]:
    """The stage while it starts: in the page, and what `keystage status` prints then."""
    await page.evaluate(f"{CARD}.click()")
    is_over = "document.querySelectorAll('#requests li').length === 2"
    await page.until(f"{CARD}.querySelector('.dot.starting') !== null || {is_over}", 2 * WAIT_S)
    status = asyncio.create_task(case.command("status", case.pipeline))
    await page.screenshot(pictures / "slow-request-stage.png", "#full > .panel")
    label = await page.evaluate(f"{CARD}.getAttribute('aria-label')")
    return f"{label}; {await page.text('#detail .reason')}", await status


async def _inspect(page: Page, pictures: Path) -> str:
    """The inspector's sentence about the newest request, when reports of all its time have come."""
    number = await page.evaluate("Number(document.body.dataset.report)")
    await page.until(f"Number(document.body.dataset.report) >= {number + 2}")
    await page.evaluate("document.querySelector('#requests button').click()")
    await page.until("!document.querySelector('#found .causes').hidden")
    await page.screenshot(pictures / "slow-request-inspector.png", "#inspect")
    return await page.text("#found .verdict")


async def _inspect_by_time(page: Page, taken_s: float, start: str) -> str:
    """The inspector's sentence about a request that was not sent from the page."""
    form = "document.getElementById('inspect-form')"
    for field, value in (("id", ""), ("start", start), ("duration", f"{taken_s:.3f}")):
        await page.evaluate(f"{form}.elements.{field}.value = '{value}'")
    await page.evaluate(f"{form}.requestSubmit()")
    await page.until("/^the request took/.test(document.querySelector('#found .verdict').textContent)")
    return await page.text("#found .verdict")


async def _decisions(page: Page, pictures: Path) -> str:
    """The stage's own decisions, with the inputs of the newest two."""
    await page.evaluate("document.querySelector('#detail .its-decisions').click()")
    await page.until("/ of /.test(document.getElementById('log-note').textContent)")
    shown = await page.text("#decisions")
    await page.evaluate(
        "[...document.querySelectorAll('#decisions details')].slice(0, 2).forEach((d) => d.open = true)"
    )
    await page.screenshot(pictures / "slow-request-decisions.png", "#log")
    return shown


def _whole(trace: str) -> Callable[[Sequence[Seen]], bool]:
    """Whether both ends of a trace came: gateway and router send each their own."""
    ends = {"POST /function/{name}", "decode"}
    return lambda seen: ends <= {span.name for span in seen if span.trace_id == trace}


def tree(spans: Sequence[Seen]) -> str:
    """A trace as a collector draws it: who within whom, when after the first, for how long."""
    known = {span.span_id for span in spans}
    first_s = min(span.start_s for span in spans)

    def lines(parent: str, depth: int) -> Iterator[str]:
        inside = (span for span in spans if (span.parent_id if span.parent_id in known else "") == parent)
        for span in sorted(inside, key=lambda span: (span.start_s, -span.seconds)):
            told = {name: span.attributes.get(f"keystage.{name}") for name in TOLD}
            words = ", ".join(f"{name} {value}" for name, value in told.items() if value is not None)
            name = "  " * depth + span.name
            yield f"{name:<30} +{span.start_s - first_s:5.2f} s {span.seconds:6.2f} s  {words}".rstrip()
            yield from lines(span.span_id, depth + 1)

    return "\n".join(lines("", 0))


def main() -> None:
    """Writes the pictures, and what trace and commands said."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("pictures", type=Path, nargs="?", default=ROOT / "docs" / "images")
    parser.add_argument("--keysmanager", action="store_true", help="a KeysManager keeps the stages in memory")
    given = parser.parse_args()
    from keystage.bundle.split import split

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        split("smollm2", 4, "uniform", folder / "smollm2", "smollm2")
        found = asyncio.run(play(folder / "smollm2", folder, given.pictures, keysmanager=given.keysmanager))
    parts = {
        "the playground": found.facts,
        f"stage {SLOW} while it starts": found.stage,
        "the inspector": f"{found.verdict}\n{found.causes}\n{found.meanwhile}",
        "the trace": tree(found.spans),
        **{f"$ keystage {typed}": printed for typed, printed in found.commands.items()},
    }
    file = ROOT / "out" / "slow-request.txt"
    file.parent.mkdir(exist_ok=True)
    file.write_text("\n\n".join(f"{title}\n{text.rstrip()}" for title, text in parts.items()) + "\n")
    print(f"pictures in {given.pictures}, the rest in {file}")


if __name__ == "__main__":
    main()
