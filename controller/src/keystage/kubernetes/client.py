"""Every exchange with the Kubernetes API server, over the official client's transport.

Before it: `connect` finds the cluster (pod's service account, or KUBECONFIG). After it: `informer` follows
lists, the gateway's backend and the controller read and write objects. Objects are plain JSON, as they
travel: no models, so that a field that this version of the client does not know is not lost. It is
synchronous and may be used by several threads; it must not decide or retry.
"""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

import msgspec
import urllib3
from kubernetes import config as loading
from kubernetes.client import ApiClient, Configuration

from keystage.kubernetes.answers import error_of, lines, parameters, query_text
from keystage.kubernetes.api import API_VERSION, PLURAL
from keystage.kubernetes.cluster_clock import ClusterClock
from keystage.kubernetes.errors import ClusterUnavailable
from keystage.wire.unreadable import UNREADABLE

Object = dict[str, Any]
"""A Kubernetes object as JSON."""

TIMEOUT_S = 10.0
"""Of one exchange; watches have their own."""
CONNECT_S = 3.0
WATCH_S = 50.0
"""The server ends a watch after so long; it is then begun anew where it ended."""
WATCH_SILENCE_S = 20.0
"""Beyond `WATCH_S` the connection is taken for dead."""
MAX_OUTPUT_BYTES = 16 << 20
"""Of a pod's output in one answer; the newest of more is left out."""
POOL = 32
JSON = "application/json"
_METADATA = f"{JSON};as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
_METADATA_LIST = f"{JSON};as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"


@dataclasses.dataclass(frozen=True, slots=True)
class Kind:
    """A resource: `apiVersion`, plural name, and whether it lives in a namespace."""

    version: str
    plural: str
    is_namespaced: bool = True

    @property
    def prefix(self) -> str:
        """Path of its API."""
        return f"/apis/{self.version}" if "/" in self.version else f"/api/{self.version}"


FUNCTIONS = Kind(API_VERSION, PLURAL)
PODS = Kind("v1", "pods")
SERVICES = Kind("v1", "services")
SECRETS = Kind("v1", "secrets")
EVENTS = Kind("v1", "events")
NODES = Kind("v1", "nodes", is_namespaced=False)
DEPLOYMENTS = Kind("apps/v1", "deployments")
LEASES = Kind("coordination.k8s.io/v1", "leases")
POD_DISRUPTION_BUDGETS = Kind("policy/v1", "poddisruptionbudgets")
POD_METRICS = Kind("metrics.k8s.io/v1beta1", "pods")


@dataclasses.dataclass(frozen=True, slots=True)
class Listing:
    """Objects of one list, and the version to watch from."""

    items: list[Object]
    version: str


@dataclasses.dataclass(frozen=True, slots=True)
class Event:
    """One event of a watch; a bookmark's object has a version and nothing else."""

    type: Literal["ADDED", "MODIFIED", "DELETED", "BOOKMARK"]
    object: Object


def connect(kubeconfig: Path | None = None, context: str | None = None) -> ApiClient:
    """The cluster we are in, else that of KUBECONFIG.

    Args:
        kubeconfig: file to use in place of both.
        context: its context, None: the current one.

    Raises:
        ClusterUnavailable: there is neither, or the file cannot be used.
    """
    configuration = Configuration()
    try:
        if kubeconfig is None and context is None:
            try:
                loading.load_incluster_config(client_configuration=configuration)
            except loading.ConfigException:
                loading.load_kube_config(client_configuration=configuration)
        else:
            loading.load_kube_config(
                config_file=str(kubeconfig) if kubeconfig is not None else None,
                context=context,
                client_configuration=configuration,
            )
    except (loading.ConfigException, OSError) as error:
        raise ClusterUnavailable(f"no cluster to talk to: {error}") from error
    configuration.connection_pool_maxsize = POOL
    configuration.retries = False  # who calls knows whether to try again
    return ApiClient(configuration)


class Cluster:
    """The API server, as one namespace's user.

    Args:
        api: from `connect`.
        namespace: of everything that is namespaced.
        timeout_s: bound of one exchange, in seconds.
        clock: of the server, as heard so far.
    """

    def __init__(
        self,
        api: ApiClient,
        namespace: str,
        *,
        timeout_s: float = TIMEOUT_S,
        clock: ClusterClock | None = None,
    ) -> None:
        self._api = api
        self.clock = clock or ClusterClock()
        self.namespace = namespace
        self._timeout_s = timeout_s

    def within(self, namespace: str, *, timeout_s: float | None = None) -> Cluster:
        """The same API server, another namespace, and another bound of one exchange if one is given."""
        return Cluster(self._api, namespace, timeout_s=timeout_s or self._timeout_s, clock=self.clock)

    def close(self) -> None:
        """Closes the connections."""
        self._api.close()

    def list(
        self, kind: Kind, *, labels: str = "", fields: str = "", is_metadata_only: bool = False
    ) -> Listing:
        """All objects of a kind that match the selectors.

        Args:
            kind: what.
            labels: label selector.
            fields: field selector.
            is_metadata_only: neither spec nor status nor data are sent.

        Raises:
            ClusterError: see the module `errors`; so for every method.
        """
        query = parameters(labelSelector=labels, fieldSelector=fields)
        accept = _METADATA_LIST if is_metadata_only else JSON
        body = self._json("GET", self._path(kind), query=query, accept=accept)
        return Listing(body.get("items") or [], body.get("metadata", {}).get("resourceVersion", ""))

    def get(self, kind: Kind, name: str, *, is_metadata_only: bool = False) -> Object:
        """One object, or its metadata."""
        return self._json("GET", self._path(kind, name), accept=_METADATA if is_metadata_only else JSON)

    def create(self, kind: Kind, body: Object, *, manager: str) -> Object:
        """Makes an object."""
        return self._json("POST", self._path(kind), body=body, query=parameters(fieldManager=manager))

    def replace(self, kind: Kind, name: str, body: Object, *, manager: str) -> Object:
        """Replaces an object; with a `resourceVersion` in it only if nobody changed it since."""
        return self._json("PUT", self._path(kind, name), body=body, query=parameters(fieldManager=manager))

    def apply(
        self, kind: Kind, name: str, body: Object, *, manager: str, force: bool = True, subresource: str = ""
    ) -> Object:
        """Server-side apply: this manager's fields are exactly those of `body`."""
        return self._json(
            "PATCH",
            self._path(kind, name, subresource),
            body=body,
            query=parameters(fieldManager=manager, force="true" if force else "false"),
            content="application/apply-patch+yaml",
        )

    def patch(self, kind: Kind, name: str, body: Object, *, manager: str, subresource: str = "") -> Object:
        """Merge patch; a `resourceVersion` or `uid` in the metadata is a condition (409)."""
        return self._json(
            "PATCH",
            self._path(kind, name, subresource),
            body=body,
            query=parameters(fieldManager=manager),
            content="application/merge-patch+json",
        )

    def patch_strategic(
        self, kind: Kind, name: str, body: Object, *, manager: str, subresource: str = ""
    ) -> Object:
        """Strategic merge patch, in which containers are found by name; not for custom resources."""
        return self._json(
            "PATCH",
            self._path(kind, name, subresource),
            body=body,
            query=parameters(fieldManager=manager),
            content="application/strategic-merge-patch+json",
        )

    def delete(self, kind: Kind, name: str, *, uid: str = "", grace_s: int | None = None) -> None:
        """Deletes an object, its dependents in the background.

        Args:
            kind: its kind.
            name: its name.
            uid: only if it is this one (409), empty: whichever it is.
            grace_s: seconds that a pod gets, None: as it says itself.
        """
        body: Object = {"kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": "Background"}
        if uid:
            body["preconditions"] = {"uid": uid}
        if grace_s is not None:
            body["gracePeriodSeconds"] = grace_s
        self._json("DELETE", self._path(kind, name), body=body)

    def watch(
        self,
        kind: Kind,
        version: str,
        *,
        labels: str = "",
        fields: str = "",
        timeout_s: float = WATCH_S,
        silence_s: float = WATCH_SILENCE_S,
        opened: Callable[[Callable[[], None]], None] | None = None,
    ) -> Iterator[Event]:
        """Changes after a version, until the server ends the watch.

        Args:
            kind: what.
            version: of the list, or of the last event or bookmark.
            labels: label selector.
            fields: field selector.
            timeout_s: seconds after which the server ends it.
            silence_s: seconds beyond that after which the connection counts as dead.
            opened: told, once it is begun, how another thread can break it off.

        Raises:
            Gone: the version is too old.
            ClusterUnavailable: the connection broke.
        """
        query = parameters(
            watch="true",
            resourceVersion=version,
            allowWatchBookmarks="true",
            timeoutSeconds=str(max(1, int(timeout_s))),
            labelSelector=labels,
            fieldSelector=fields,
        )
        answer = self._send(
            "GET", self._path(kind), query=query, timeout_s=timeout_s + silence_s, is_stream=True
        )
        try:
            if opened is not None:
                opened(lambda: _break_off(answer))
            for line in lines(answer.stream(None, decode_content=True)):
                event = msgspec.json.decode(line, type=dict[str, Any])
                if event["type"] == "ERROR":
                    raise error_of(event["object"].get("code", 0), event["object"], f"watch of {kind.plural}")
                yield Event(event["type"], event["object"])
        except (urllib3.exceptions.HTTPError, OSError, http.client.HTTPException) as error:
            raise ClusterUnavailable(f"watch of {kind.plural} broke: {error}") from error
        except (KeyError, *UNREADABLE) as error:
            raise ClusterUnavailable(f"watch of {kind.plural} is garbled: {error}") from error
        finally:
            answer.close()

    def logs(
        self, pod: str, container: str, *, tail: int | None = None, since_s: float | None = None
    ) -> bytes:
        """Output of a pod's container with time-stamps.

        Args:
            pod: its name.
            container: its container's.
            tail: newest lines at most, None: all.
            since_s: nothing older (Unix seconds; whole ones count), None: however old.
        """
        since = "" if since_s is None else time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(max(0.0, since_s)))
        query = parameters(
            container=container,
            timestamps="true",
            tailLines="" if tail is None else str(tail),
            sinceTime=since,
            limitBytes=str(MAX_OUTPUT_BYTES),
        )
        return self._send("GET", self._path(PODS, pod, "log"), query=query, accept="*/*").data

    def raw(self, path: str) -> bytes:
        """GET of a path outside any resource (`/version`)."""
        return self._send("GET", path).data

    def _path(self, kind: Kind, name: str = "", subresource: str = "") -> str:
        where = f"/namespaces/{quote(self.namespace, safe='')}" if kind.is_namespaced else ""
        parts = [kind.prefix + where, kind.plural]
        parts += [quote(part, safe="") for part in (name, subresource) if part]
        return "/".join(parts)

    def _json(
        self,
        method: str,
        path: str,
        *,
        body: Object | None = None,
        query: Mapping[str, str] | None = None,
        content: str = JSON,
        accept: str = JSON,
    ) -> Object:
        answer = self._send(method, path, body=body, query=query, content=content, accept=accept)
        try:
            return msgspec.json.decode(answer.data, type=dict[str, Any])
        except UNREADABLE as error:
            raise ClusterUnavailable(f"{method} {path}: the answer is no JSON: {error}") from error

    def _send(
        self,
        method: str,
        path: str,
        *,
        body: Object | None = None,
        query: Mapping[str, str] | None = None,
        content: str = JSON,
        accept: str = JSON,
        timeout_s: float | None = None,
        is_stream: bool = False,
    ) -> urllib3.BaseHTTPResponse:
        settings = self._api.configuration
        headers = {"Accept": accept, "User-Agent": "keystage", **self._api.default_headers}
        headers |= self._credentials()
        encoded = None
        if body is not None:
            encoded = msgspec.json.encode(body)
            headers["Content-Type"] = content
        timeout = urllib3.Timeout(connect=CONNECT_S, read=timeout_s or self._timeout_s)
        what, sent_s = f"{method} {path}", time.monotonic()
        try:
            answer: urllib3.BaseHTTPResponse = self._api.rest_client.pool_manager.request(
                method,
                settings.host + path + query_text(query or {}),
                body=encoded,
                headers=headers,
                timeout=timeout,
                preload_content=not is_stream,
                retries=False,
            )
            self.clock.hear(answer.headers.get("Date"), sent_s, time.monotonic())
            data = answer.data if answer.status >= http.client.MULTIPLE_CHOICES else b""
        except (urllib3.exceptions.HTTPError, OSError, http.client.HTTPException) as error:
            raise ClusterUnavailable(f"{what}: {error}") from error
        if answer.status >= http.client.MULTIPLE_CHOICES:
            try:
                told = msgspec.json.decode(data, type=dict[str, Any])
            except UNREADABLE:
                told = {"message": data[:200].decode("utf-8", "replace")}
            raise error_of(answer.status, told, what)
        return answer

    def _credentials(self) -> dict[str, str]:
        """Bearer token as it stands now: the kubelet renews it, the client's hook reads it anew."""
        settings = self._api.configuration
        try:
            found = settings.auth_settings()
        except (loading.ConfigException, OSError) as error:
            raise ClusterUnavailable(f"the service account's token cannot be read: {error}") from error
        headers: dict[str, str] = {}
        for setting in found.values():
            if setting["in"] == "header" and setting["value"]:
                headers[setting["key"]] = setting["value"]
        return headers


def _break_off(answer: urllib3.BaseHTTPResponse) -> None:
    """Has whoever reads it see its end."""
    with contextlib.suppress(ValueError, RuntimeError, OSError):  # it is over already
        answer.shutdown()
