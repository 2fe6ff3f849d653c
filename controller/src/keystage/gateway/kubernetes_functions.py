"""Writes of functions: the deployment, a person's wish, the mark of a waiting request, removal.

Behind `gateway.kubernetes`. Synchronous, called in threads. Deployment and wish have a field manager each, so
that a deployment neither resets nor owns `spec.replicas`; the rest of `spec` is afterwards what was deployed,
whoever (`kubectl`, another tool) set a field before. It must not write status.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from keystage.gateway.backend import BackendUnavailable, UnknownFunction
from keystage.kubernetes.api import (
    API_VERSION,
    GATEWAY_MANAGER,
    KIND,
    OVERRIDE_UNTIL_ANNOTATION,
    SCALE_MANAGER,
    WAKE_ANNOTATION,
    spec_of,
)
from keystage.kubernetes.client import FUNCTIONS, Cluster, Object
from keystage.kubernetes.errors import Conflict, NotFound
from keystage.kubernetes.view import is_deleted
from keystage.local.api import Deployment

TRIES = 5
"""Against others who write the same function."""


class KubernetesFunctions:
    """Custom resources of one namespace.

    Args:
        cluster: the functions' namespace.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def put(self, deployment: Deployment) -> Object:
        """Creates or replaces a function.

        Returns:
            The resource as it is now.

        Raises:
            BackendUnavailable: it is being removed, or others write it at the same time.
        """
        name = deployment.service
        spec = msgspec.to_builtins(spec_of(deployment))
        body: Object = {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "metadata": {"name": name, "namespace": self._cluster.namespace},
            "spec": spec,
        }
        for _ in range(TRIES):
            try:
                written = self._cluster.apply(FUNCTIONS, name, body, manager=GATEWAY_MANAGER)
            except Conflict:
                continue  # made by somebody else at this moment
            if is_deleted(written):
                raise BackendUnavailable(f"function {name} is being removed: deploy it again once it is gone")
            surplus = surplus_of(written["spec"], {**spec, "replicas": None})
            if not surplus:
                return written
            version = written["metadata"]["resourceVersion"]
            rest: Object = {"metadata": {"resourceVersion": version}, "spec": surplus}
            try:
                return self._cluster.patch(FUNCTIONS, name, rest, manager=GATEWAY_MANAGER)
            except (Conflict, NotFound):
                continue
        raise BackendUnavailable(f"function {name} was changed by others {TRIES} times meanwhile; try again")

    def delete(self, name: str, uid: str) -> None:
        """Removes this function, and no later one of that name.

        Raises:
            UnknownFunction: it is gone, or another one by now.
        """
        try:
            self._cluster.delete(FUNCTIONS, name, uid=uid)
        except (NotFound, Conflict):
            raise UnknownFunction(f"function {name} is not deployed") from None

    def wish(self, name: str, replicas: int, until_s: float) -> Object:
        """Writes a person's wish, which ends at `until_s` (Unix seconds).

        Raises:
            UnknownFunction: it is gone.
        """
        annotations = {OVERRIDE_UNTIL_ANNOTATION: f"{until_s:.3f}"}
        body: Object = {"metadata": {"annotations": annotations}, "spec": {"replicas": replicas}}
        return self._patch(name, body, SCALE_MANAGER)

    def wake(self, name: str, now_s: float) -> None:
        """Marks a function for which a request waits since now (Unix seconds).

        Raises:
            UnknownFunction: it is gone.
        """
        body: Object = {"metadata": {"annotations": {WAKE_ANNOTATION: f"{now_s:.3f}"}}}
        self._patch(name, body, GATEWAY_MANAGER)

    def _patch(self, name: str, body: Object, manager: str) -> Object:
        try:
            return self._cluster.patch(FUNCTIONS, name, body, manager=manager)
        except NotFound:
            raise UnknownFunction(f"function {name} is not deployed") from None


def surplus_of(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> Object:
    """A merge patch that takes away what is not wanted; empty if that is nothing.

    Args:
        found: an object's part; empty values in it count as absent.
        wanted: what it is to have, and all that it may have.
    """
    patch: Object = {}
    for key, value in found.items():
        if key not in wanted:
            if value not in (None, "", False, [], {}):
                patch[key] = None
        elif isinstance(value, dict) and isinstance(wanted[key], dict):
            inner = surplus_of(value, wanted[key])
            if inner:
                patch[key] = inner
    return patch
