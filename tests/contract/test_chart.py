"""The chart as a whole: Kubernetes accepts what it renders, and it refuses values that it does not know."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import kubernetes_validate
import pytest
import yaml
from support.helm import CHART, ROOT, ChartRefused, Object, named, of_kind, render, render_text, run_helm

from keystage.kubernetes import api
from keystage.kubernetes.manifests import WIRE_SECRET

CASES = sorted((CHART / "ci").glob("*-values.yaml"))
EVERYTHING = CHART / "ci" / "everything-values.yaml"
ONE_NAMESPACE = CHART / "ci" / "one-namespace-values.yaml"
OPENFAAS = CHART / "ci" / "openfaas-values.yaml"
EMULATED = CHART / "ci" / "emulated-gpus-values.yaml"
VERSIONS = ("1.33", "1.35", "1.37")
CLUSTER_WIDE = ("Namespace", "ClusterRole", "ClusterRoleBinding", "CustomResourceDefinition")
FOREIGN = ("ServiceMonitor", "PodMonitor", "PrometheusRule")


@pytest.fixture(params=[None, *CASES], ids=["defaults", *(c.stem for c in CASES)], scope="module")
def objects(request: pytest.FixtureRequest) -> list[Object]:
    """What the chart renders to, with its defaults and with every file of `ci/`."""
    return render(values=[request.param] if request.param else [])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.stem)
def test_lint(case: Any) -> None:
    answer = run_helm("lint", "--strict", str(CHART), "--values", str(case))
    assert answer.code == 0, answer.out + answer.err


@pytest.mark.parametrize("version", VERSIONS)
def test_kubernetes_accepts_every_object(objects: list[Object], version: str) -> None:
    for one in objects:
        if one["kind"] in FOREIGN:
            continue
        kubernetes_validate.validate(one, version, strict=True)


def test_monitors_find_ports_that_there_are() -> None:
    objects = render(values=[EVERYTHING])
    ports = {
        port["name"]
        for one in of_kind(objects, "Deployment", "DaemonSet")
        for container in one["spec"]["template"]["spec"]["containers"]
        for port in container.get("ports", [])
    }
    found = 0
    for monitor in of_kind(objects, "ServiceMonitor", "PodMonitor"):
        endpoints = monitor["spec"].get("endpoints") or monitor["spec"]["podMetricsEndpoints"]
        assert monitor["metadata"]["labels"]["release"] == "prometheus"
        for endpoint in endpoints:
            assert endpoint["port"] in ports
            found += 1
    assert found >= 3


def test_every_object_says_where_it_is_and_what_it_is_part_of(objects: list[Object]) -> None:
    seen: set[tuple[str, str, str]] = set()
    for one in objects:
        meta = one["metadata"]
        place = meta.get("namespace", "")
        assert bool(place) == (one["kind"] not in CLUSTER_WIDE), one["kind"]
        assert meta["labels"]["app.kubernetes.io/instance"] == "keystage"
        assert (one["kind"], place, meta["name"]) not in seen
        seen.add((one["kind"], place, meta["name"]))


REFUSED = {
    "gateway.replica=3": "replica",
    "gateway.replicas=-1": "/gateway/replicas",
    "gateway.replicas=many": "/gateway/replicas",
    "gateway.service.port=0": "/gateway/service/port",
    "gateway.service.type=Headless": "/gateway/service/type",
    "gateway.wakeSeconds=-1": "/gateway/wakeSeconds",
    "gateway.timeoutSeconds=0": "/gateway/timeoutSeconds",
    "gateway.resources.claims=x": "claims",
    "controller.budgetReplicas=0": "/controller/budgetReplicas",
    "controller.decisionsBytes=1": "/controller/decisionsBytes",
    "controllers.replicas=1": "controllers",
    "pods.parkedPerPipeline=-1": "/pods/parkedPerPipeline",
    "keysmanager.cache.bytes=-1": "/keysmanager/cache/bytes",
    "keysmanager.privileged=true": "privileged",
    "functions.namespace=Upper": "/functions/namespace",
    "wire.key=short": "/wire/key",
    "basicAuth.user=a:b": "/basicAuth/user",
    "bundles.hostPath=relative": "/bundles/hostPath",
    "bundles.hostPath=/a,bundles.persistentVolumeClaim=b": "/bundles",
    "gpu.emulated=80": "/gpu/emulated",
    "openfaas.gateway=gateway:8080": "/openfaas/gateway",
    "networkPolicy.outside={everybody}": "/networkPolicy/outside/0",
    "monitoring.interval=often": "/monitoring/interval",
    "loadgen.target=grpc": "/loadgen/target",
    "loadgen.rate=0": "/loadgen/rate",
    "loadgen.slo.ttft=0": "/loadgen/slo/ttft",
    "image.pullPolicy=Sometimes": "/image/pullPolicy",
    "image.registry=1": "/image/registry",
}


@pytest.mark.parametrize("pair", REFUSED, ids=str)
def test_values_that_make_no_sense_are_refused_by_name(pair: str) -> None:
    with pytest.raises(ChartRefused, match=re.escape(REFUSED[pair])):
        render_text(sets=[pair])


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        (["gateway.ingress.enabled=true"], "gateway.ingress.host is needed"),
        (["loadgen.enabled=true"], "loadgen.pipeline"),
        (["gateway.env.KEYSTAGE_WAKE_S=1"], "gateway.env: KEYSTAGE_WAKE_S is set by the chart itself"),
        (["controller.env.KEYSTAGE_HOME=/x"], "controller.env: KEYSTAGE_HOME"),
        (["keysmanager.env.KEYSTAGE_NODE=x"], "keysmanager.env: KEYSTAGE_NODE"),
        (
            [
                "loadgen.enabled=true",
                "loadgen.pipeline=p",
                "loadgen.trace.url=http://a/b",
                "loadgen.trace.configMap=c",
            ],
            "not several",
        ),
    ],
)
def test_values_that_do_not_fit_together_are_refused(sets: list[str], words: str) -> None:
    with pytest.raises(ChartRefused, match=re.escape(words)):
        render_text(sets=sets)


def _leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves(inner, (*path, key))
    else:
        yield path


def test_the_schema_knows_every_value_and_no_other() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())

    def compare(given: Any, known: Any, path: str) -> None:
        if "properties" not in known:
            return
        assert known["additionalProperties"] is False, path
        assert set(given) == set(known["properties"]) - {"global"}, path
        for key, inner in given.items():
            compare(inner, known["properties"][key], f"{path}/{key}")

    compare(values, schema, "")


def test_every_value_has_an_effect() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    text = "\n".join(p.read_text() for p in (CHART / "templates").iterdir() if p.name != "NOTES.txt")
    # Maps that are passed on as they are count by their own name.
    whole = ("resources", "pluginResources", "nodeSelector", "requests", "slo", "labels")
    for path in _leaves(values):
        last = next((part for part in path if part in whole), path[-1])
        assert re.search(rf"\.{last}\b", text), ".".join(path)


@pytest.mark.parametrize(
    "file", ["docs/kubernetes.md", "docs/environment.md", "docs/openfaas.md", "README.md"]
)
def test_values_named_in_the_docs_exist(file: str) -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    text = (ROOT / file).read_text()
    for path in re.findall(rf"(?:`|--set )(?!functions.keystage)((?:{'|'.join(values)})\.[A-Za-z.]+)", text):
        found: Any = values
        for part in path.rstrip(".").split("."):
            assert part in found, f"{file}: {path}"
            found = found[part]


def test_names_are_those_that_the_code_looks_for() -> None:
    objects = render(values=[EMULATED])
    gateway = named(objects, "Deployment", "keystage-gateway")["spec"]["template"]
    assert gateway["metadata"]["labels"][api.COMPONENT_LABEL] == "gateway"
    daemon = named(objects, "DaemonSet", "keystage-keysmanager")["spec"]["template"]
    assert daemon["metadata"]["labels"][api.COMPONENT_LABEL] == "keysmanager"
    keysmanager = daemon["spec"]["containers"][0]
    assert keysmanager["ports"] == [{"name": "http", "containerPort": api.KEYSMANAGER_PORT}]
    folder = next(v["hostPath"]["path"] for v in daemon["spec"]["volumes"] if v["name"] == "node")
    assert folder == "/run/keystage/keystage"
    sockets = {e["name"]: e.get("value", "") for e in keysmanager["env"]}
    mount = next(m["mountPath"] for m in keysmanager["volumeMounts"] if m["name"] == "node")
    assert sockets["KEYSTAGE_KEYSMANAGER_PODS"].startswith(mount)
    assert sockets["KEYSTAGE_KEYSMANAGER_PODS"].rpartition("/")[2] == api.PODS_SOCKET.rpartition("/")[2]
    for pod in (gateway, daemon):
        wire = next(v for v in pod["spec"]["volumes"] if v["name"] == "wire")
        assert wire["secret"]["secretName"] == WIRE_SECRET
        mounted = next(m for m in pod["spec"]["containers"][0]["volumeMounts"] if m["name"] == "wire")
        assert mounted["mountPath"] == api.WIRE_KEY_MOUNT
    assert {
        s["metadata"]["namespace"] for s in of_kind(objects, "Secret") if s["metadata"]["name"] == WIRE_SECRET
    } == {
        "keystage",
        "models",
    }


def test_secrets_are_equal_in_both_namespaces_and_as_given() -> None:
    made = [s for s in of_kind(render(), "Secret") if s["metadata"]["name"] == WIRE_SECRET]
    assert [s["metadata"]["namespace"] for s in made] == ["keystage", "keystage-fn"]
    assert made[0]["data"] == made[1]["data"]
    again = [s for s in of_kind(render(), "Secret") if s["metadata"]["name"] == WIRE_SECRET]
    assert again[0]["data"] != made[0]["data"], "a key that is the same everywhere is none"
    given = render(values=[EVERYTHING])
    assert named(given, "Secret", WIRE_SECRET, "models")["data"]["key"] == (
        "MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWYwMTIzNDU2Nzg5YWJjZGVmMDEyMzQ1Njc4OWFiY2RlZg=="
    )
    assert named(given, "Secret", "basic-auth")["data"]["basic-auth-user"] == "b3BlcmF0b3I="
    assert of_kind(render(values=[ONE_NAMESPACE]), "Secret", "Namespace") == []


def test_numbers_that_something_else_sets_are_left_out() -> None:
    def replicas(objects: list[Object]) -> Any:
        return named(objects, "Deployment", "keystage-gateway")["spec"].get("replicas", "left out")

    assert replicas(render()) == 2
    assert replicas(render(values=[EVERYTHING])) == "left out"
    assert replicas(render(values=[EMULATED])) == "left out"
    assert "spec" not in named(render(), "Lease", "keystage-controller"), "the leader's"


def test_an_upgrade_breaks_no_request() -> None:
    for objects in (render(), render(values=[EVERYTHING])):
        gateway = named(objects, "Deployment", "keystage-gateway")["spec"]
        assert gateway["strategy"]["rollingUpdate"] == {"maxUnavailable": 0, "maxSurge": 1}
        pod = gateway["template"]["spec"]
        container = pod["containers"][0]
        pause_s = container["lifecycle"]["preStop"]["sleep"]["seconds"]
        stop_s = int(next(e["value"] for e in container["env"] if e["name"] == "KEYSTAGE_STOP_S"))
        timeout_s = float(next(e["value"] for e in container["env"] if e["name"] == "KEYSTAGE_TIMEOUT_S"))
        assert stop_s >= timeout_s
        assert pod["terminationGracePeriodSeconds"] > pause_s + stop_s


def test_a_pause_of_no_length_is_none() -> None:
    gateway = named(render(sets=["gateway.preStopSeconds=0"]), "Deployment", "keystage-gateway")
    assert "lifecycle" not in gateway["spec"]["template"]["spec"]["containers"][0]


def test_behind_another_gateway_there_is_just_the_controller() -> None:
    objects = render(values=[OPENFAAS])
    assert {o["kind"] for o in objects} == {"Deployment", "ServiceAccount", "ConfigMap", "Job"}
    deployment = named(objects, "Deployment", "keystage-controller")["spec"]
    assert (deployment["replicas"], deployment["strategy"]) == (1, {"type": "Recreate"})
    env = {e["name"]: e["value"] for e in deployment["template"]["spec"]["containers"][0]["env"]}
    assert env["KEYSTAGE_GATEWAY"] == "http://gateway.openfaas:8080"
    assert env["KEYSTAGE_GATEWAY_NAMESPACE"] == "openfaas-fn"
    assert "KEYSTAGE_BACKEND" not in env


def test_gpu_nodes_have_one_keysmanager_like_all_others() -> None:
    objects = render(sets=["gpu.enabled=true"])
    gpu = named(objects, "DaemonSet", "keystage-keysmanager-gpu")["spec"]
    plain = named(objects, "DaemonSet", "keystage-keysmanager")["spec"]
    assert gpu["template"]["spec"]["nodeSelector"] == {"nvidia.com/gpu.present": "true"}
    assert gpu["template"]["spec"]["runtimeClassName"] == "nvidia"
    terms = plain["template"]["spec"]["affinity"]["nodeAffinity"][
        "requiredDuringSchedulingIgnoredDuringExecution"
    ]["nodeSelectorTerms"]
    assert terms == [
        {"matchExpressions": [{"key": "nvidia.com/gpu.present", "operator": "NotIn", "values": ["true"]}]}
    ]
    assert gpu["selector"] != plain["selector"]
    plugins = [len(d["template"]["spec"]["containers"]) for d in (gpu, plain)]
    assert plugins == [2, 1]


def test_the_replay_is_another_job_when_it_is_another_replay() -> None:
    def job(*sets: str) -> Object:
        [found] = of_kind(render(sets=["loadgen.enabled=true", "loadgen.pipeline=p", *sets]), "Job")
        return found

    assert job()["metadata"]["name"] == job()["metadata"]["name"]
    assert job()["metadata"]["name"] != job("loadgen.rate=3")["metadata"]["name"]
    container = job("loadgen.rate=3")["spec"]["template"]["spec"]["containers"][0]
    assert container["command"] == ["keystage", "load", "http://keystage-gateway.keystage:8080/function/p"]
    assert {"--rate=3", "--cv=4", "--duration=60"} <= set(container["args"])


def test_a_replay_is_never_begun_anew_and_has_a_folder_of_its_own() -> None:
    sets = ["loadgen.enabled=true", "loadgen.pipeline=p", "loadgen.outPersistentVolumeClaim=results"]
    [job] = of_kind(render(sets=sets), "Job")
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    assert (spec["backoffLimit"], spec["completions"], spec["parallelism"]) == (0, 1, 1)
    assert pod["restartPolicy"] == "Never"
    assert "ttlSecondsAfterFinished" not in spec, "helm would make a Job anew that is gone"
    [container] = pod["containers"]
    assert f"--out=/out/{job['metadata']['name']}" in container["args"]
    [out] = [volume for volume in pod["volumes"] if volume["name"] == "out"]
    assert out["persistentVolumeClaim"] == {"claimName": "results"}
    assert {"name": "out", "mountPath": "/out"} in container["volumeMounts"]


def _notes(*sets: str) -> str:
    arguments = [word for pair in sets for word in ("--set", pair)]
    answer = run_helm(
        "install",
        "keystage",
        str(CHART),
        "-n",
        "keystage",
        "--dry-run=client",
        *arguments,
        env={"KUBECONFIG": "/dev/null"},
    )
    assert answer.code == 0, answer.err
    return answer.out.partition("NOTES:")[2]


def test_notes_say_what_cannot_be_done_behind_another_gateway() -> None:
    notes = _notes("openfaas.gateway=http://gateway.openfaas:8080")
    for word in (
        "placement",
        "resize",
        "parked pods",
        "KeysManager",
        "15 functions",
        "keystage check-gateway",
    ):
        assert word in notes
    assert "parked pods" not in _notes()


def test_notes_say_what_is_left_to_do() -> None:
    assert "networkPolicy.outside has [router, stage]" in _notes()
    assert "networkPolicy.outside has" not in _notes("bundles.hostPath=/srv/bundles")
    assert "nvidia.com/gpu.deploy.device-plugin=false" in _notes("gpu.enabled=true")
    assert "both namespaces" in _notes("bundles.persistentVolumeClaim=bundles")
