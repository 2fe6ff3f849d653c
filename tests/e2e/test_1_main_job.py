"""The main job on a cluster: install, deploy a language model, ask it, load it from both sides, upgrade."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.e2e_load import Load, summary
from support.e2e_starts import Decisions, all_serve, phases, was_parked
from support.e2e_world import RELEASE, World, figure, wait_for
from support.helm import CHART

from keystage.kubernetes.client import DEPLOYMENTS, PODS

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1500)]

MODEL = "smollm2"
PROMPT = json.dumps({"prompt": "The capital of France is", "max_tokens": 5}).encode()
WINDOW_S = 40.0
SPEED = "1"
TRACE_ROWS = 4000
DRAWN = ("--rate", "0.6", "--cv", "2", "--duration", "30")


@pytest.fixture(scope="module")
def model(world: World) -> Iterator[str]:
    stack = world.stack(MODEL, env={"*": {"KEYSTAGE_THREADS": "1"}})
    figure(
        "seconds from faas-cli deploy to all stages Ready (SmolLM2-135M, 4 stages)",
        f"{world.deploy(stack):.1f}",
    )
    yield MODEL
    world.remove(stack)


@pytest.fixture(scope="module")
def window(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path | None:
    """First rows of the trace: what a ConfigMap can hold."""
    if world.settings.trace is None:
        return None
    file = tmp_path_factory.mktemp("trace") / "trace.csv"
    with world.settings.trace.open(newline="") as source, file.open("w", newline="") as sink:
        writer = csv.writer(sink)
        for number, row in enumerate(csv.reader(source)):
            if number > TRACE_ROWS:
                break
            writer.writerow(row)
    return file


def test_everything_is_ready(world: World) -> None:
    for part, least in (("gateway", 2), ("controller", 2), ("keysmanager", len(world.ready_nodes()))):
        assert len(world.release_pods(part)) == least
    wait_for(lambda: set(_units(world).values()) == {"80"}, "the emulated GPU is advertised")
    figure("GiB of the emulated GPU that the device plugin advertises", _units(world))


def _units(world: World) -> dict[str, str]:
    name = "keystage.dev/gpu0"
    return {n["metadata"]["name"]: n["status"]["allocatable"].get(name, "0") for n in world.ready_nodes()}


def test_a_completion_contains_paris(world: World, model: str) -> None:
    answer = json.loads(world.call(model, PROMPT))
    figure("completion", answer["text"])
    assert "Paris" in answer["text"]
    listed = world.faas("list")
    assert all(f"{MODEL}-stage-{stage}" in listed for stage in range(4))
    nodes = {pod["spec"]["nodeName"] for stage in range(4) for pod in world.pods(f"{MODEL}-stage-{stage}")}
    figure("nodes that run stages", sorted(nodes))


def test_the_load_generator_as_a_job(world: World, model: str, window: Path | None) -> None:
    values = {
        "loadgen.enabled": "true",
        "loadgen.pipeline": model,
        "loadgen.durationSeconds": f"{WINDOW_S:g}",
    }
    if window is not None:
        world.kubectl("-n", world.system.namespace, "create", "configmap", "trace", f"--from-file={window}")
        values |= {"loadgen.trace.configMap": "trace", "loadgen.trace.speed": SPEED}
    else:
        values |= {"loadgen.rate": "0.6", "loadgen.cv": "2"}
    world.helm("upgrade", RELEASE, str(CHART), "--reset-then-reuse-values", "--wait", *world.values(**values))

    def ended() -> object:
        (pod,) = world.system.list(PODS, labels="app.kubernetes.io/component=loadgen").items
        return pod if pod["status"].get("phase") in ("Succeeded", "Failed") else None

    pod = wait_for(ended, "the Job ends", 600.0)
    text = world.system.logs(pod["metadata"]["name"], "loadgen").decode()
    print(text)
    assert pod["status"]["phase"] == "Succeeded"
    assert "failed 0" in " ".join(text.split())
    world.helm("upgrade", RELEASE, str(CHART), "--reset-then-reuse-values", "--set", "loadgen.enabled=false")


def test_the_load_generator_from_outside(
    world: World, model: str, window: Path | None, tmp_path: Path
) -> None:
    arrivals = ("--trace", str(window), "--speed", SPEED, "--duration", f"{WINDOW_S:g}") if window else DRAWN
    command = [sys.executable, "-m", "keystage.cli.main", "load", f"{world.url}/function/{model}"]
    done = subprocess.run([*command, *arrivals, "--out", str(tmp_path)], timeout=900, check=False)
    assert done.returncode == 0
    report = json.loads((tmp_path / "report.json").read_text())
    figure(
        "load generator from outside",
        {key: report["requests"][key] for key in ("sent", "served", "failed")},
    )
    assert (tmp_path / "requests.jsonl").exists()


def test_a_real_stage_starts_in_a_parked_pod(world: World, model: str) -> None:
    """Its parameters are in its node's memory, packed and sealed; it computes tokens a moment later."""
    stage = f"{model}-stage-1"
    wait_for(lambda: len(world.parked()) >= 2, "two parked pods are prepared")
    body = json.dumps({"prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}).encode()
    before = {pod["metadata"]["name"] for pod in world.pods(stage)}
    url = f"{world.url}/function/{model}/v1/completions"

    def requests(rate_rps: float, most: int | None = None) -> Load:
        return Load(url, rate_rps, lambda _: body, lambda _, answer: b"Paris" in answer, most)

    with Decisions(world, stage) as decisions, requests(2.0) as load:
        load.wait(10)
        world.scale(stage, 3)
        wait_for(lambda: len(world.ready_pods(stage)) == 3 and all_serve(world, stage), "three replicas")
        new = [pod for pod in world.ready_pods(stage) if pod["metadata"]["name"] not in before]
        with requests(50.0, 12) as burst:  # a few requests at a time keep to the paths that they know
            burst.wait(12)
        for pod in new:
            name, notes = pod["metadata"]["name"], pod["metadata"].get("annotations", {})
            wait_for(lambda name=name: phases(world, name)["first_item_s"], f"{name} computes", 60)
            told = {key: f"{value - decisions.at(3):.3f}" for key, value in phases(world, name).items()}
            how = notes.get("keystage.dev/via", "a new pod")
            figure(f"stage of SmolLM2 in {name} ({how}), seconds from decision", told)
        load.stop()
    figure("completions meanwhile", summary(load))
    assert not load.failed
    assert not burst.failed
    assert any(was_parked(pod) for pod in new)


def test_an_upgrade_under_load_loses_nothing_and_keeps_numbers(world: World, emulated: str) -> None:
    world.scale(f"{emulated}-stage-1", 2)
    wait_for(lambda: len(world.ready_pods(f"{emulated}-stage-1")) == 2, "two replicas")
    before = {
        pod["metadata"]["uid"] for stage in range(3) for pod in world.ready_pods(f"{emulated}-stage-{stage}")
    }
    gateways = {pod["metadata"]["uid"] for pod in world.release_pods("gateway")}
    changes = {f"{part}.podAnnotations.upgrade": "1" for part in ("gateway", "controller", "keysmanager")}
    with Load(f"{world.url}/function/{emulated}", 12.0) as load:
        load.wait(40)
        world.helm(
            "upgrade",
            RELEASE,
            str(CHART),
            "--reset-then-reuse-values",
            "--wait",
            "--timeout",
            "5m",
            *world.values(**changes),
        )
        wait_for(
            lambda: not gateways & {pod["metadata"]["uid"] for pod in world.system.list(PODS).items},
            "old gateways are gone",
        )
        load.wait(40)
        load.stop()
    figure("helm upgrade under load (gateway, controller, KeysManager replaced)", summary(load))
    assert not load.failed
    after = {
        pod["metadata"]["uid"] for stage in range(3) for pod in world.ready_pods(f"{emulated}-stage-{stage}")
    }
    figure("replicas of stages kept by the upgrade", f"{len(before & after)} of {len(before)}")
    assert before <= after
    assert world.status(f"{emulated}-stage-1")["desired"] == 2
    assert world.system.get(DEPLOYMENTS, f"{RELEASE}-gateway")["status"]["readyReplicas"] == 2
