"""`helm uninstall` with functions still deployed leaves nothing. The last test: it takes the release away."""

from __future__ import annotations

import os
import time

import pytest
from support.e2e_world import FUNCTION_NAMESPACE, NAMESPACE, RELEASE, World, figure, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

KINDS = (
    "pods,services,deployments,daemonsets,replicasets,jobs,configmaps,secrets,serviceaccounts,roles,rolebindings,"
    "networkpolicies,poddisruptionbudgets,leases,endpointslices"
)
OF_EVERY_NAMESPACE = ("ca.crt", "serviceaccount/default")
"""Ends of the names of what the cluster itself puts into every namespace."""


def test_uninstall_leaves_nothing(world: World, emulated: str) -> None:
    if os.environ.get("KEYSTAGE_E2E_KEEP") == "1":
        pytest.skip("KEYSTAGE_E2E_KEEP=1")
    assert world.pods(f"{emulated}-stage-1")
    begun_s = time.monotonic()
    world.helm("uninstall", RELEASE, "--wait", "--timeout", "3m")
    figure("seconds of helm uninstall, functions still deployed", f"{time.monotonic() - begun_s:.1f}")
    wait_for(lambda: not _left(world), "nothing is left", 180)
    figure("seconds until nothing was left", f"{time.monotonic() - begun_s:.1f}")


def _left(world: World) -> list[str]:
    """Names of what there still is, as kubectl prints them."""
    found: list[str] = []
    for namespace in (NAMESPACE, FUNCTION_NAMESPACE):
        listed = world.kubectl("-n", namespace, "get", KINDS, "-o", "name", "--ignore-not-found", check=False)
        found += [
            name for name in listed.split() if not name.endswith((*OF_EVERY_NAMESPACE, "configmap/trace"))
        ]
    selector = f"app.kubernetes.io/instance={RELEASE}"
    cluster = "clusterroles,clusterrolebindings,namespaces"
    found += world.kubectl("get", cluster, "-l", selector, "-o", "name", check=False).split()
    if "crds.install=false" not in os.environ.get("KEYSTAGE_E2E_SET", ""):
        found += world.kubectl("get", "crds", "functions.keystage.dev", "-o", "name", check=False).split()
    return found
