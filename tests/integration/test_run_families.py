"""The main job's traffic for every family: split, serve on this machine, replay through the gateway."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from support.pipeline_world import DEADLINE_S

from keystage.bundle import store
from keystage.bundle.source import pipeline_name
from keystage.bundle.split import split
from keystage.loadgen import app
from keystage.loadgen.options import LoadOptions
from keystage.loadgen.report import Report
from keystage.local.pipeline import deployments_for
from keystage.local.traffic import traffic_of
from keystage.local.world import LocalWorld

pytestmark = pytest.mark.timeout(300)

SHAPES = ("llama-tiny", "opt-tiny", "gpt2-tiny", "bert-tiny", "wide_resnet-tiny", "whisper-mini")


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Report]:
    """One replay of each family, all pipelines side by side in one world."""
    folder = tmp_path_factory.mktemp("families")
    bundles = {
        shape: split(f"random:{shape}", 2, "parameters", folder / shape, pipeline_name(f"random:{shape}"))
        for shape in SHAPES
    }

    async def run() -> dict[str, Report]:
        found: dict[str, Report] = {}
        async with LocalWorld(folder / "home", gateway_port=0, controller=False, keysmanager=True) as world:
            pipelines = {shape: store.load(bundle) for shape, bundle in bundles.items()}
            for shape, pipeline in pipelines.items():
                await world.deploy(*deployments_for(bundles[shape], pipeline))
            for pipeline in pipelines.values():
                for service in (pipeline.name, *(f"{pipeline.name}-stage-{k}" for k in range(2))):
                    await world.wait_ready(service, 1, DEADLINE_S)
            for shape, pipeline in pipelines.items():
                url = f"{world.gateway_url}/function/{pipeline.name}"
                found[shape] = await asyncio.to_thread(_replay, url, bundles[shape])
        return found

    return asyncio.run(run())


def _replay(url: str, bundle: Path) -> Report:
    traffic = traffic_of(store.load(bundle))
    options = LoadOptions(
        url=url,
        target=traffic.kind,
        rate_rps=4.0,
        duration_s=2.0,
        seed=3,
        context_tokens=traffic.context_tokens,
        byte_tokens=traffic.byte_tokens,
        scale_lengths=64.0,
        timeout_s=DEADLINE_S,
        out=None,
    )
    return app.replay(options)


@pytest.mark.parametrize("shape", SHAPES)
def test_everything_sent_is_served(shape: str, reports: dict[str, Report]) -> None:
    requests = reports[shape].requests
    assert requests.examples == {}
    assert requests.served == requests.sent >= 4


@pytest.mark.parametrize(
    ("shape", "has_prompts", "has_outputs"),
    [
        ("llama-tiny", True, True),
        ("opt-tiny", True, True),
        ("gpt2-tiny", True, True),
        ("bert-tiny", True, False),
        ("wide_resnet-tiny", False, False),
        ("whisper-mini", False, True),
    ],
)
def test_tokens_are_counted_where_there_are_any(
    shape: str, has_prompts: bool, has_outputs: bool, reports: dict[str, Report]
) -> None:
    requests = reports[shape].requests
    assert (requests.prompt_tokens > 0) is has_prompts
    assert (requests.output_tokens > 0) is has_outputs
    streams = shape in ("llama-tiny", "opt-tiny", "gpt2-tiny")
    assert (reports[shape].ttft_s.count > 0) is streams


def test_the_stages_of_every_family_are_watched(reports: dict[str, Report]) -> None:
    for shape, report in reports.items():
        assert [line.stage for line in report.stages] == [0, 1], shape
        assert report.stages[0].arrivals >= 1, shape
