"""Secrets of functions as Secrets of a cluster; those without Keystage's label are nobody's business here.

Behind `gateway.kubernetes`; the controller mounts them into pods by name. A value goes in and never comes
out: only metadata is asked for. Synchronous, called in threads; a value must not reach a message or a log.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable

from keystage.gateway.backend import AlreadyDeployed, BackendUnavailable, BadRequest, UnknownSecret
from keystage.gateway.names import check_secret_name
from keystage.kubernetes.api import GATEWAY_MANAGER, SECRET_LABEL
from keystage.kubernetes.client import SECRETS, Cluster, Object
from keystage.kubernetes.errors import Conflict, NotFound
from keystage.local.api import MAX_SECRET_BYTES

TRIES = 5
"""Against others who write the same one."""


class KubernetesSecrets:
    """All secrets of functions.

    Args:
        cluster: the functions' namespace.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def names(self) -> list[str]:
        """Names of all, sorted."""
        listing = self._cluster.list(SECRETS, labels=SECRET_LABEL, is_metadata_only=True)
        return sorted(obj["metadata"]["name"] for obj in listing.items)

    def check(self, function: str, wanted: Iterable[str]) -> None:
        """Refuses secrets that are not there.

        Raises:
            BadRequest: names function and secrets.
        """
        wanted = set(wanted)
        absent = sorted(wanted - set(self.names())) if wanted else []
        if absent:
            raise BadRequest(
                f"function {function}: secret {', '.join(absent)} does not exist: create it first (one that "
                f"was made otherwise needs the label {SECRET_LABEL})"
            )

    def put(self, name: str, value: bytes, *, create: bool) -> None:
        """Creates or replaces one.

        Raises:
            BadRequest: name or size is out of bounds.
            AlreadyDeployed: it was to be created and exists.
            UnknownSecret: it was to be replaced, and there is none of functions.
        """
        check_secret_name(name)
        if not 1 <= len(value) <= MAX_SECRET_BYTES:
            raise BadRequest(f"secret {name} must have 1..{MAX_SECRET_BYTES} bytes, not {len(value)}")
        data = {name: base64.b64encode(value).decode()}
        if create:
            self._create(name, data)
        else:
            self._replace(name, data)

    def delete(self, name: str) -> None:
        """Removes one; pods that have it keep what they have.

        Raises:
            BadRequest: it is no name.
            UnknownSecret: there is none of functions.
        """
        check_secret_name(name)
        uid = self._ours(name)["uid"]
        try:
            self._cluster.delete(SECRETS, name, uid=uid)
        except (NotFound, Conflict):  # gone, or another one by now
            raise UnknownSecret(f"secret {name} does not exist") from None

    def _create(self, name: str, data: dict[str, str]) -> None:
        body: Object = {
            "apiVersion": SECRETS.version,
            "kind": "Secret",
            "metadata": {"name": name, "labels": {SECRET_LABEL: "true"}},
            "type": "Opaque",
            "data": data,
        }
        try:
            self._cluster.create(SECRETS, body, manager=GATEWAY_MANAGER)
        except Conflict:
            raise AlreadyDeployed(f"secret {name} exists already: update it instead") from None

    def _replace(self, name: str, data: dict[str, str]) -> None:
        for _ in range(TRIES):
            version = self._ours(name)["resourceVersion"]
            body: Object = {"metadata": {"resourceVersion": version}, "data": data}
            try:
                self._cluster.patch(SECRETS, name, body, manager=GATEWAY_MANAGER)
            except Conflict:
                continue
            except NotFound:
                raise UnknownSecret(f"secret {name} does not exist") from None
            return
        raise BackendUnavailable(f"secret {name} was changed by others {TRIES} times meanwhile; try again")

    def _ours(self, name: str) -> Object:
        """Its metadata."""
        try:
            metadata: Object = self._cluster.get(SECRETS, name, is_metadata_only=True)["metadata"]
        except NotFound:
            raise UnknownSecret(f"secret {name} does not exist") from None
        if SECRET_LABEL not in (metadata.get("labels") or {}):
            raise UnknownSecret(f"secret {name} is none of functions: it lacks the label {SECRET_LABEL}")
        return metadata
