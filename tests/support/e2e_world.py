"""A real cluster for the opt-in tests: what the environment says of it, helm, faas-cli, and objects.

    KUBECONFIG                    the cluster, as somebody who may install
    KEYSTAGE_E2E_IMAGES           registry and tag that every node can have: `ghcr.io/keystage:0.1.0`
    KEYSTAGE_E2E_BUNDLE           folder that every node and this machine have; bundles are made in it
    KEYSTAGE_E2E_FAAS_CLI         the stock faas-cli (default: that on PATH)
    KEYSTAGE_E2E_TRACE            Azure LLM 2023 CSV; without it arrivals are drawn
    KEYSTAGE_E2E_SET              further `key=value` of the chart, by blanks (`crds.install=false`)
    KEYSTAGE_E2E_KEEP=1           leave the release there at the end
    KEYSTAGE_E2E_{KILL,START}_NODE, _KUBELET, _API_SERVER
                                  shell commands that break a part and mend it; `{node}` is replaced. How is a
                                  matter of the cluster; without them the tests that need them are skipped.

Everything that is measured is printed by `figure`, one line each.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import json
import os
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.helm import CHART, kubectl, run_helm

from keystage.kubernetes.client import (
    FUNCTIONS,
    NODES,
    PODS,
    SECRETS,
    SERVICES,
    Cluster,
    Object,
    connect,
)
from keystage.kubernetes.errors import ClusterUnavailable

RELEASE, NAMESPACE, FUNCTION_NAMESPACE = "keystage", "keystage-e2e", "keystage-e2e-fn"
WAIT_S = 240.0
COMMAND_S = 600.0
MOUNT = "/bundles"
FUNCTION_LABEL = "keystage.dev/function"

_KILL = """
import glob, os, sys
forms = (sys.argv[1], sys.argv[1].replace("-", "_"))
for file in glob.glob("/proc/[0-9]*/cgroup"):
    try:
        if any(form in open(file).read() for form in forms):
            os.kill(int(file.split("/")[2]), 9)
            print(file)
    except (OSError, PermissionError):  # it ended, or it is the sandbox's own process
        pass
"""


def figure(name: str, value: object) -> None:
    """One line of the report."""
    print(f"FIGURE {name}: {value}", flush=True)


def wait_for(condition: Callable[[], Any], what: str, within_s: float = WAIT_S, every_s: float = 0.2) -> Any:
    """The first true value of `condition`; an API server that is away is asked again."""
    until_s = time.monotonic() + within_s
    seen: object = None
    while time.monotonic() < until_s:
        try:
            seen = condition()
        except ClusterUnavailable as error:
            seen = error
        else:
            if seen:
                return seen
        time.sleep(every_s)
    raise AssertionError(f"{what}: not within {within_s:g} s; last seen {seen!r}")


@dataclasses.dataclass(frozen=True, slots=True)
class Settings:
    """What the environment says."""

    registry: str
    tag: str
    bundles: Path
    faas_cli: str
    trace: Path | None

    @classmethod
    def read(cls) -> Settings:
        """Skips where the cluster or something to run on it is not named."""
        needed = ("KUBECONFIG", "KEYSTAGE_E2E_IMAGES", "KEYSTAGE_E2E_BUNDLE")
        missing = [name for name in needed if not os.environ.get(name)]
        if missing:
            pytest.skip(f"{', '.join(missing)} not set (see tests/support/e2e_world.py)")
        registry, _, tag = os.environ["KEYSTAGE_E2E_IMAGES"].rpartition(":")
        faas_cli = os.environ.get("KEYSTAGE_E2E_FAAS_CLI") or shutil.which("faas-cli") or ""
        if not faas_cli:
            pytest.skip("no faas-cli: set KEYSTAGE_E2E_FAAS_CLI")
        trace = os.environ.get("KEYSTAGE_E2E_TRACE")
        bundles = Path(os.environ["KEYSTAGE_E2E_BUNDLE"])
        return cls(registry, tag, bundles, faas_cli, Path(trace) if trace else None)


def broken(what: str, node: str = "") -> None:
    """Runs a command of the environment (`KILL_NODE`, ...)."""
    command = os.environ.get(f"KEYSTAGE_E2E_{what}")
    if not command:
        pytest.skip(f"KEYSTAGE_E2E_{what} is not set: how to do it differs per cluster")
    done = subprocess.run(command.replace("{node}", node), shell=True, timeout=COMMAND_S, check=False)
    assert done.returncode == 0, f"{command}: {done.returncode}"


def need(*what: str) -> None:
    """Skips before anything is begun where a command is not told."""
    missing = [f"KEYSTAGE_E2E_{name}" for name in what if not os.environ.get(f"KEYSTAGE_E2E_{name}")]
    if missing:
        pytest.skip(f"{', '.join(missing)} not set: how to do it differs per cluster")


class World:
    """The cluster, and the release on it.

    Attributes:
        settings: of the environment.
        system: objects of the release's namespace.
        functions: objects of the functions' namespace.
    """

    def __init__(self, settings: Settings, folder: Path) -> None:
        self.settings = settings
        self.folder = folder
        self.system = Cluster(connect(), NAMESPACE)
        self.functions = self.system.within(FUNCTION_NAMESPACE)
        self._environment = {"OPENFAAS_CONFIG": str(folder / "faas")}

    # ------------------------------------------------------------ programs

    def kubectl(self, *arguments: str, body: str | None = None, check: bool = True) -> str:
        """Output of kubectl."""
        done = subprocess.run(
            [kubectl(), *arguments],
            input=body,
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
            check=False,
        )
        assert not check or done.returncode == 0, f"kubectl {' '.join(arguments)}: {done.stderr}"
        return done.stdout

    def execute(
        self, pod: str, *command: str, check: bool = True, namespace: str = FUNCTION_NAMESPACE
    ) -> str:
        """Output of a command in a pod."""
        return self.kubectl("-n", namespace, "exec", pod, "--", *command, check=check)

    def python(self, pod: str, code: str, *arguments: str, namespace: str = FUNCTION_NAMESPACE) -> str:
        """Output of a Python program in a pod."""
        return self.execute(pod, "python", "-c", code, *arguments, namespace=namespace).strip()

    def helm(self, *arguments: str) -> str:
        """Output of helm, in the release's namespace."""
        answer = run_helm(*arguments, "--namespace", NAMESPACE, timeout_s=COMMAND_S)
        assert answer.code == 0, f"helm {' '.join(arguments)}: {answer.err}"
        return answer.out

    def faas(self, *arguments: str, body: str | None = None, check: bool = True) -> str:
        """Output of the stock faas-cli against the gateway."""
        done = subprocess.run(
            [self.settings.faas_cli, *arguments, "--gateway", self.url],
            input=body,
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
            check=False,
            env={**os.environ, **self._environment},
        )
        assert not check or done.returncode == 0, (
            f"faas-cli {' '.join(arguments)}: {done.stdout}{done.stderr}"
        )
        return done.stdout

    # ------------------------------------------------------------ the release

    def values(self, **more: str) -> list[str]:
        """Arguments of `helm install` and `helm upgrade`."""
        pairs = {
            "image.registry": self.settings.registry,
            "image.tag": self.settings.tag,
            "image.pullPolicy": "IfNotPresent",
            "bundles.hostPath": str(self.settings.bundles),
            "gateway.service.type": "NodePort",
            "gpu.emulated": "1x80",
            **dict(pair.split("=", 1) for pair in os.environ.get("KEYSTAGE_E2E_SET", "").split()),
            **more,
        }
        return [
            text
            for key, value in pairs.items()
            for text in ("--set-string" if _is_text(key) else "--set", f"{key}={value}")
        ]

    def install(self) -> float:
        """Installs; returns seconds until everything is Ready."""
        begun_s = time.monotonic()
        self.helm(
            "install", RELEASE, str(CHART), "--create-namespace", "--wait", "--timeout", "5m", *self.values()
        )
        took_s = time.monotonic() - begun_s
        self.login()
        return took_s

    def login(self) -> None:
        """faas-cli gets the password that the chart made."""
        secret = self.system.get(SECRETS, "basic-auth")["data"]
        password = base64.b64decode(secret["basic-auth-password"]).decode()
        self.faas("login", "--password-stdin", body=password)

    @functools.cached_property
    def url(self) -> str:
        """The gateway's address from outside."""
        service = self.system.get(SERVICES, f"{RELEASE}-gateway")
        (port,) = service["spec"]["ports"]
        return f"http://{self._node_address()}:{port['nodePort']}"

    def _node_address(self) -> str:
        node = self.ready_nodes()[-1]  # nodes are broken from the first on
        return next(a["address"] for a in node["status"]["addresses"] if a["type"] == "InternalIP")

    @property
    def authorization(self) -> dict[str, str]:
        """Header with the gateway's credentials."""
        data = self.system.get(SECRETS, "basic-auth")["data"]
        user, password = (
            base64.b64decode(data[f"basic-auth-{part}"]).decode() for part in ("user", "password")
        )
        return {"Authorization": "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()}

    # ------------------------------------------------------------ pipelines

    def stack(
        self,
        bundle: str,
        *,
        env: Mapping[str, Mapping[str, str]] = {},
        labels: Mapping[str, Mapping[str, str]] = {},
        resources: Mapping[str, Mapping[str, Any]] = {},
    ) -> Path:
        """stack.yml of a bundle as nodes see it.

        Args:
            bundle: folder below the bundles' folder.
            env: further variables by function, `*`: all.
            labels: likewise.
            resources: `limits` and `requests` by function.
        """
        stack = yaml.safe_load((self.settings.bundles / bundle / "stack.yml").read_text())
        stack["provider"]["gateway"] = self.url
        for name, function in stack["functions"].items():
            image = function["image"].rsplit("/", 1)[1].split(":")[0]
            function["image"] = f"{self.settings.registry}/{image}:{self.settings.tag}"
            function["environment"]["KEYSTAGE_BUNDLE"] = f"file://{MOUNT}/{bundle}"
            function["environment"] |= {**env.get("*", {}), **env.get(name, {})}
            function["labels"] |= {**labels.get("*", {}), **labels.get(name, {})}
            function |= resources.get(name, {})
        file = self.folder / f"{bundle}.yml"
        file.write_text(yaml.safe_dump(stack))
        return file

    def deploy(self, stack: Path) -> float:
        """`faas-cli deploy`; returns seconds until every function has a ready replica."""
        begun_s = time.monotonic()
        self.faas("deploy", "-f", str(stack))
        names = list(yaml.safe_load(stack.read_text())["functions"])
        wait_for(lambda: all(self.status(name).get("ready", 0) >= 1 for name in names), f"{names} ready")
        return time.monotonic() - begun_s

    def remove(self, stack: Path) -> None:
        """`faas-cli remove`, and until the pods are gone."""
        names = list(yaml.safe_load(stack.read_text())["functions"])
        self.faas("remove", "-f", str(stack))
        wait_for(lambda: not any(self.pods(name) for name in names), f"pods of {names} gone")

    def scale(self, name: str, replicas: int) -> float:
        """A person's wish; returns `time.time` when it was taken."""
        body = json.dumps({"serviceName": name, "replicas": replicas}).encode()
        request = urllib.request.Request(
            f"{self.url}/system/scale-function/{name}", data=body, headers=self.authorization, method="POST"
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            assert answer.status == 202
        return time.time()

    def call(self, name: str, body: bytes, path: str = "") -> bytes:
        """One request through the gateway."""
        request = urllib.request.Request(f"{self.url}/function/{name}{path}", data=body, method="POST")
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return bytes(answer.read())
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{name} answered {error.code}: {error.read()[:500]!r}") from error

    # ------------------------------------------------------------ objects

    def function(self, name: str) -> Object:
        """The custom resource."""
        return self.functions.get(FUNCTIONS, name)

    def status(self, name: str) -> dict[str, Any]:
        """Its status."""
        return dict(self.function(name).get("status", {}))

    def pods(self, name: str) -> list[Object]:
        """A function's pods, leaving ones too."""
        return self.functions.list(PODS, labels=f"{FUNCTION_LABEL}={name}").items

    def ready_pods(self, name: str) -> list[Object]:
        """Those that are Ready and stay."""
        return [pod for pod in self.pods(name) if is_ready(pod)]

    def parked(self) -> list[Object]:
        """Parked pods that are prepared."""
        found = self.functions.list(PODS, labels=f"keystage.dev/pool,!{FUNCTION_LABEL}").items
        return [pod for pod in found if is_ready(pod)]

    def nodes(self) -> list[Object]:
        """Real nodes, in order of their names."""
        nodes = [
            n
            for n in self.system.list(NODES).items
            if "keystage.dev/played" not in n["metadata"].get("labels", {})
        ]
        return sorted(nodes, key=lambda n: str(n["metadata"]["name"]))

    def ready_nodes(self) -> list[Object]:
        """Those of them that are Ready."""
        return [n for n in self.nodes() if is_ready(n)]

    def release_pods(self, component: str) -> list[Object]:
        """Ready pods of one of Keystage's own parts."""
        found = self.system.list(PODS, labels=f"app.kubernetes.io/component={component}").items
        return [pod for pod in found if is_ready(pod)]

    def kill(self, pod: Object) -> None:
        """kill -9 of all processes of a pod of user 12000, by a KeysManager, which sees the node."""
        managers = self.release_pods("keysmanager")
        (manager,) = [m for m in managers if m["spec"]["nodeName"] == pod["spec"]["nodeName"]]
        name, uid = manager["metadata"]["name"], pod["metadata"]["uid"]
        command = ("exec", name, "-c", "keysmanager", "--", "python", "-c", _KILL, uid)
        assert self.kubectl("-n", NAMESPACE, *command).strip(), f"no process of {pod['metadata']['name']}"

    def delete_pod(self, cluster: Cluster, pod: Object, grace_s: int | None = None) -> None:
        """Deletes one pod."""
        cluster.delete(PODS, pod["metadata"]["name"], uid=pod["metadata"]["uid"], grace_s=grace_s)


def is_ready(value: Object) -> bool:
    """Condition Ready, and not being deleted."""
    conditions = value.get("status", {}).get("conditions") or ()
    good = any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)
    return good and "deletionTimestamp" not in value["metadata"]


def _is_text(key: str) -> bool:
    return key.startswith(("image.", "gpu.")) or "Annotations" in key
