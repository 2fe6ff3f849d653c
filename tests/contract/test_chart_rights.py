"""What the chart's pods may do: each right has its reason, and there are no others."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from support.helm import CHART, Object, named, of_kind, render, render_text

from keystage.kubernetes.api import ROLE_LABEL

CASES = sorted((CHART / "ci").glob("*-values.yaml"))
WITHOUT_FOLDERS = CHART / "ci" / "without-node-folders-values.yaml"
ONE_NAMESPACE = CHART / "ci" / "one-namespace-values.yaml"
EVERYTHING = CHART / "ci" / "everything-values.yaml"
ROOT_CONTAINERS = {"folder": ["CHOWN", "FOWNER"], "device-plugin": []}
HOST_PATHS = {"node", "bundles", "state", "device-plugins"}


@pytest.fixture(params=[None, *CASES], ids=["defaults", *(c.stem for c in CASES)], scope="module")
def objects(request: pytest.FixtureRequest) -> list[Object]:
    """What the chart renders to, with its defaults and with every file of `ci/`."""
    return render(values=[request.param] if request.param else [])


def pods(objects: list[Object]) -> Iterator[tuple[str, Any]]:
    """(name, pod spec) of everything that makes pods."""
    for one in of_kind(objects, "Deployment", "DaemonSet", "Job"):
        yield one["metadata"]["name"], one["spec"]["template"]["spec"]


def containers(pod: Any) -> list[Any]:
    return [*pod.get("initContainers", []), *pod["containers"]]


def test_no_container_is_privileged(objects: list[Object]) -> None:
    for _, pod in pods(objects):
        assert "hostNetwork" not in pod
        assert "hostIPC" not in pod
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in containers(pod):
            security = container["securityContext"]
            assert "privileged" not in security
            assert security["allowPrivilegeEscalation"] is False
            assert security["readOnlyRootFilesystem"] is True
            assert security["capabilities"]["drop"] == ["ALL"]
            added = security["capabilities"].get("add", [])
            if container["name"] in ROOT_CONTAINERS:
                assert added == ROOT_CONTAINERS[container["name"]]
            else:
                assert not added
                assert "runAsUser" not in security


def test_the_node_is_touched_where_it_must_be_and_nowhere_else(objects: list[Object]) -> None:
    for name, pod in pods(objects):
        assert pod.get("hostPID", False) == ("keysmanager" in name)
        mounted = {v["name"] for v in pod["volumes"] if "hostPath" in v}
        assert mounted <= (HOST_PATHS if "keysmanager" in name else {"bundles"})


def test_folders_of_the_node_that_a_keysmanager_writes_are_given_to_its_user(objects: list[Object]) -> None:
    for daemon in of_kind(objects, "DaemonSet"):
        pod = daemon["spec"]["template"]["spec"]
        [init], keysmanager = pod["initContainers"], pod["containers"][0]
        of_node = {v["name"] for v in pod["volumes"] if "hostPath" in v}
        written = {
            m["mountPath"]
            for m in keysmanager["volumeMounts"]
            if m["name"] in of_node and not m.get("readOnly")
        }
        assert written == set(init["command"][3:]) == {m["mountPath"] for m in init["volumeMounts"]}


def test_only_who_talks_to_the_api_server_has_a_token(objects: list[Object]) -> None:
    has_api = any(o["kind"] == "Role" for o in objects)
    for name, pod in pods(objects):
        talks = has_api and name in ("keystage-gateway", "keystage-controller")
        assert pod["automountServiceAccountToken"] is talks, name
        # A Service `keystage-gateway` would be KEYSTAGE_GATEWAY_PORT=tcp://... in the environment.
        assert pod["enableServiceLinks"] is False
    for account in of_kind(objects, "ServiceAccount"):
        assert account["automountServiceAccountToken"] is False


def test_every_container_has_requests_and_a_memory_limit(objects: list[Object]) -> None:
    for _, pod in pods(objects):
        for container in containers(pod):
            assert {"cpu", "memory"} <= set(container["resources"]["requests"])
            assert "memory" in container["resources"]["limits"]


def _rules_with_comments(text: str) -> Iterator[tuple[str, dict[str, list[str]]]]:
    """(comment above it, rule) of every rule in rendered roles."""
    comment: list[str] = []
    lines = text.splitlines()
    for number, line in enumerate(lines):
        if line.strip().startswith("#"):
            comment.append(line.strip())
        elif line.strip().startswith("- apiGroups:"):
            end = next(
                (n for n in range(number + 1, len(lines)) if not lines[n].startswith("    ")), len(lines)
            )
            block = "\n".join(lines[number:end])
            yield "\n".join(comment), yaml.safe_load(block)[0]
            comment = []
        elif not line.startswith("    "):
            comment = []


def test_every_rule_says_what_each_verb_is_for() -> None:
    text = render_text(extra=["--show-only", "templates/rbac.yaml"])
    rules = list(_rules_with_comments(text))
    assert len(rules) == sum(len(r["rules"]) for r in of_kind(render(), "Role", "ClusterRole"))
    for comment, rule in rules:
        verbs = {
            verb.strip()
            for line in re.findall(r"^#   ([a-z, ]+):", comment, re.MULTILINE)
            for verb in line.split(",")
        }
        assert verbs == set(rule["verbs"]), comment
        for resource in rule["resources"]:
            assert re.search(rf"^# {re.escape(resource)}\b", comment, re.MULTILINE), comment


def test_rights_are_the_least() -> None:
    objects = render()
    for role in of_kind(objects, "Role", "ClusterRole"):
        for rule in role["rules"]:
            every = [*rule["apiGroups"], *rule["resources"], *rule["verbs"]]
            assert "*" not in every
            assert not {"escalate", "bind", "impersonate", "deletecollection"} & set(rule["verbs"])
            assert not {"pods/exec", "pods/attach", "roles", "rolebindings"} & set(rule["resources"])
    for sets, resources in (([], ["nodes", "pods"]), (["controller.seesAllPods=false"], ["nodes"])):
        [wide] = of_kind(render(sets=sets), "ClusterRole")
        assert [r["resources"] for r in wide["rules"]] == [[name] for name in resources]
        assert all(r["verbs"] == ["list", "watch"] for r in wide["rules"])
    # Secrets: the gateway's, in the functions' namespace.
    readers = {
        (role["metadata"]["name"], role["metadata"]["namespace"])
        for role in of_kind(objects, "Role")
        for rule in role["rules"]
        if "secrets" in rule["resources"]
    }
    assert readers == {("keystage-gateway", "keystage-fn")}
    accounts = {a["metadata"]["name"] for a in of_kind(objects, "ServiceAccount")}
    for binding in of_kind(objects, "RoleBinding", "ClusterRoleBinding"):
        for subject in binding["subjects"]:
            assert subject["name"] in accounts
            assert subject["namespace"] == "keystage"


def test_two_releases_do_not_share_what_belongs_to_no_namespace() -> None:
    here = {o["metadata"]["name"] for o in of_kind(render(), "ClusterRole", "ClusterRoleBinding")}
    there = {
        o["metadata"]["name"]
        for o in of_kind(render(extra=["--namespace", "other"]), "ClusterRole", "ClusterRoleBinding")
    }
    assert here
    assert not here & there


def test_pod_security_is_as_strict_as_it_can_be() -> None:
    level = "pod-security.kubernetes.io/enforce"
    with_folder = named(render(), "Namespace", "keystage-fn")["metadata"]["labels"]
    assert with_folder[level] == "privileged"
    own = named(render(values=[WITHOUT_FOLDERS], sets=["pods.user=0"]), "Namespace", "keystage-fn")
    assert own["metadata"]["labels"][level] == "baseline"
    without = render(values=[WITHOUT_FOLDERS])
    assert named(without, "Namespace", "keystage-fn")["metadata"]["labels"][level] == "restricted"
    # Then the release's own pods would meet it too.
    for _, pod in pods(without):
        assert "hostPID" not in pod
        assert not [v for v in pod["volumes"] if "hostPath" in v]


def _policies(objects: list[Object]) -> dict[str, Any]:
    return {o["metadata"]["name"].removeprefix("keystage-"): o for o in of_kind(objects, "NetworkPolicy")}


def test_functions_are_closed_but_for_what_they_need() -> None:
    policies = _policies(render())
    closed = policies["functions-closed"]
    assert closed["metadata"]["namespace"] == "keystage-fn"
    assert closed["spec"] == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    called = policies["functions-called"]["spec"]["ingress"]
    assert [
        peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"] for peer in called[0]["from"]
    ] == [
        "gateway",
        "controller",
    ]
    assert called[0]["ports"] == [{"protocol": "TCP", "port": 8080}]
    assert {p["port"] for p in policies["functions-dns"]["spec"]["egress"][0]["ports"]} == {53, 5353}
    wire = policies["functions-wire"]["spec"]
    assert wire["ingress"][0]["from"] == wire["egress"][0]["to"] == [{"podSelector": wire["podSelector"]}]
    assert policies["functions-gateway"]["spec"]["podSelector"]["matchLabels"] == {ROLE_LABEL: "function"}
    assert "functions-outside" not in policies
    assert policies["controller"]["spec"]["ingress"] == []
    peers = policies["keysmanager"]["spec"]["ingress"][0]
    assert len(peers["from"]) == 2
    assert peers["ports"] == [{"protocol": "TCP", "port": 7810}]


def test_what_is_opened_is_what_was_asked_for() -> None:
    policies = _policies(render(values=[EVERYTHING]))
    outside = policies["functions-outside"]["spec"]
    assert outside["podSelector"]["matchExpressions"][0]["values"] == ["router", "stage", "function"]
    assert outside["egress"][0]["to"][0]["ipBlock"]["except"] == ["169.254.169.254/32"]
    traces = _policies(render(sets=["networkPolicy.traces.namespace=tracing"]))["functions-traces"]["spec"]
    assert traces["podSelector"]["matchLabels"] == {ROLE_LABEL: "router"}
    assert traces["egress"][0]["ports"] == [{"protocol": "TCP", "port": 4318}]
    assert "functions-traces" not in policies
    called = policies["functions-called"]["spec"]["ingress"][0]["from"]
    names = [p["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"] for p in called]
    assert names == ["keystage", "keystage", "monitoring", "clients"]
    assert _policies(render(sets=["networkPolicy.enabled=false"])) == {}


def test_in_one_namespace_policies_mean_functions_alone() -> None:
    policies = _policies(render(values=[ONE_NAMESPACE]))
    for name in ("functions-closed", "functions-called", "functions-dns"):
        assert policies[name]["metadata"]["namespace"] == "keystage"
        assert policies[name]["spec"]["podSelector"] == {
            "matchExpressions": [{"key": "keystage.dev/role", "operator": "Exists"}]
        }
