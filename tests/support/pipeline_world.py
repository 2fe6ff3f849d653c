"""A pipeline on this machine for tests: deploy it, stream from it, read what its parts logged."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from keystage.bundle.store import load
from keystage.local.pipeline import deployments_for
from keystage.local.world import LocalWorld
from keystage.router.api import RouterStats

DEADLINE_S = 120.0


@dataclasses.dataclass(slots=True)
class Stream:
    """What one client has received so far."""

    tokens: list[int] = dataclasses.field(default_factory=list)
    times_s: list[float] = dataclasses.field(default_factory=list)
    finish_reason: str | None = None
    error: str | None = None

    @property
    def longest_pause_s(self) -> float:
        return max((b - a for a, b in zip(self.times_s, self.times_s[1:], strict=False)), default=0.0)


@dataclasses.dataclass(slots=True)
class Served:
    """A pipeline that is up."""

    world: LocalWorld
    name: str
    router: str
    events: Path
    session: aiohttp.ClientSession

    async def stream(self, into: Stream, prompt: Sequence[int], **fields: Any) -> None:
        """Streams one completion of token ids into `into`."""
        body = {
            "model": self.name, "prompt": list(prompt), "stream": True, "return_token_ids": True,
            "ignore_eos": True, **fields,
        }  # fmt: skip
        async with self.session.post(f"{self.router}/v1/completions", json=body) as answer:
            if answer.status != 200:
                into.error = f"{answer.status}: {await answer.text()}"
                return
            async for line in answer.content:
                if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    into.error = json.dumps(event["error"])
                    return
                for choice in event["choices"]:
                    ids = choice.get("token_ids") or []
                    into.tokens.extend(ids)
                    into.times_s.extend([time.monotonic()] * len(ids))
                    into.finish_reason = choice.get("finish_reason") or into.finish_reason

    async def stats(self) -> RouterStats:
        async with self.session.get(f"{self.router}/_/stats") as answer:
            return msgspec.json.decode(await answer.read(), type=RouterStats)

    def log(self, event: str, prefix: str = "") -> list[dict[str, Any]]:
        """Logged events of one kind, of processes whose name starts with `prefix`.

        A process that runs writes them with its heartbeats: wait for them with `until`.
        """
        lines = []
        for file in sorted(self.events.glob(f"{prefix}*.jsonl")):
            lines += [json.loads(line) for line in file.read_bytes().split(b"\n")[:-1]]
        return [line for line in lines if line["event"] == event]


@contextlib.asynccontextmanager
async def served(
    bundle: Path, home: Path, *, controller: bool = False, env: dict[str, str] | None = None, **options: Any
) -> AsyncIterator[Served]:
    """Brings a bundle's pipeline up and waits until every stage is ready."""
    pipeline = load(bundle)
    events = home / "events"
    environment = {"KEYSTAGE_EVENTS": str(events), **(env or {})}
    async with LocalWorld(home, gateway_port=0, controller=controller, keysmanager=True) as world:
        await world.deploy(*deployments_for(bundle, pipeline, env=environment, **options))
        router = (await world.wait_ready(pipeline.name, 1, DEADLINE_S))[0]
        for stage in range(len(pipeline.stages)):
            await world.wait_ready(f"{pipeline.name}-stage-{stage}", 1, DEADLINE_S)
        timeout = aiohttp.ClientTimeout(total=DEADLINE_S)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            yield Served(world, pipeline.name, f"http://{router.address}", events, session)


async def until(condition: Callable[[], bool], what: str, timeout_s: float = DEADLINE_S) -> None:
    """Waits for a condition; fails by name when it does not come true in time."""
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s, f"not within {timeout_s} s: {what}"
        await asyncio.sleep(0.01)
