"""Backend over a Kubernetes API server: functions are custom resources, replicas are pods.

Keeps a view of both by informers, so that reads cost nothing and a pod that leaves is out of the routing
within milliseconds; any number of gateways may run. It writes functions (server-side apply, all of `spec` but
`replicas`), a person's wish and the mark of a waiting request, never status: what becomes of them is the
controller's. A write returns once this gateway's own view has it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from keystage.gateway.backend import (
    BackendUnavailable,
    BadRequest,
    FunctionState,
    LogLine,
    UnknownFunction,
)
from keystage.gateway.kubernetes_errors import gateway_error, in_thread
from keystage.gateway.kubernetes_functions import KubernetesFunctions
from keystage.gateway.kubernetes_output import lines_of, merged, usage_of
from keystage.gateway.kubernetes_secrets import KubernetesSecrets
from keystage.gateway.kubernetes_view import KubernetesView
from keystage.gateway.names import check_name
from keystage.kubernetes.api import FUNCTION_LABEL
from keystage.kubernetes.checks import check, check_load, check_replicas
from keystage.kubernetes.client import FUNCTIONS, PODS, Cluster, Object, connect
from keystage.kubernetes.config import ClusterSettings
from keystage.kubernetes.errors import ClusterError, Forbidden
from keystage.kubernetes.informer import Informer, wait_all
from keystage.local.api import Deployment, Load, Usage
from keystage.observability.board import Board

START_S = 30.0
"""For a first view: an API server that starts anew takes that long."""
SEEN_S = 5.0
"""For a write to come back; the watch of a cluster that is well takes milliseconds."""
THREADS = 16
"""Exchanges at once; and as many reads of output, which wait for kubelets and hold up no write."""
_log = logging.getLogger(__name__)


class KubernetesBackend:
    """See `gateway.backend.Backend`.

    Args:
        cluster: the API server, in the functions' namespace.

    Attributes:
        reports: the newest report of the controller; it brings them itself (`gateway.internal`).
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._functions = Informer(cluster, FUNCTIONS, changed=self._stir)
        self._pods = Informer(cluster, PODS, labels=FUNCTION_LABEL, changed=self._stir)
        self._writes = KubernetesFunctions(cluster)
        self._secrets = KubernetesSecrets(cluster)
        self._executor = ThreadPoolExecutor(THREADS, "api-server")
        self._readers = ThreadPoolExecutor(THREADS, "output")
        self._view = KubernetesView()
        self.reports = Board()
        self._changed = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stirred = threading.Event()

    async def start(self) -> None:
        """Begins to follow the cluster and gets a first view."""
        self._loop = asyncio.get_running_loop()
        informers = {"functions": self._functions, "pods": self._pods}
        for informer in informers.values():
            informer.start()
        late = await self._loop.run_in_executor(self._executor, wait_all, informers, START_S)
        if late:
            await self.stop()
            raise BackendUnavailable(f"no view of the cluster within {START_S:g} s: {late}")
        self._refresh()

    async def stop(self) -> None:
        """Disconnects."""
        loop = asyncio.get_running_loop()
        informers = (self._functions, self._pods)
        await asyncio.gather(*(loop.run_in_executor(None, informer.stop) for informer in informers))
        for executor in (self._executor, self._readers):
            executor.shutdown(wait=False, cancel_futures=True)

    def functions(self) -> Sequence[FunctionState]:
        """All functions, by name."""
        return [self._view.states[name] for name in sorted(self._view.states)]

    def get(self, name: str) -> FunctionState:
        """One function."""
        try:
            return self._view.states[name]
        except KeyError:
            raise UnknownFunction(f"function {name} is not deployed") from None

    def view_age_s(self) -> float:
        """Seconds since the API server last said what there is, or that nothing changed."""
        return max(self._functions.age_s(), self._pods.age_s())

    @property
    def trouble(self) -> str:
        """Why the view cannot be brought up to date now, empty where it can."""
        return self._functions.trouble or self._pods.trouble

    async def changed(self, timeout_s: float) -> None:
        """Waits until the view changes, at most `timeout_s` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()

    async def put(self, deployment: Deployment) -> None:
        """Creates or replaces a function."""
        try:
            check(deployment)
        except ValueError as error:
            raise BadRequest(str(error)) from None
        name = deployment.service
        await in_thread(self._executor, self._secrets.check, name, deployment.secrets)
        written = await in_thread(self._executor, self._writes.put, deployment)
        await self._seen(name, lambda: is_as_new(self._functions.get(name), written))

    async def delete(self, name: str) -> None:
        """Removes a function; its pods are collected, and drain."""
        self.get(name)
        obj = self._functions.get(name)
        uid = "" if obj is None else obj["metadata"]["uid"]
        await in_thread(self._executor, self._writes.delete, name, uid)
        await self._seen(name, lambda: is_gone(self._functions.get(name), uid))

    async def override(self, name: str, replicas: int, expires_at_s: float) -> None:
        """Writes a person's wish."""
        self.get(name)
        try:
            check_replicas(name, replicas)
        except ValueError as error:
            raise BadRequest(str(error)) from None
        written = await in_thread(self._executor, self._writes.wish, name, replicas, expires_at_s)
        await self._seen(name, lambda: is_as_new(self._functions.get(name), written))

    async def wake(self, name: str) -> None:
        """Marks a function for which a request waits."""
        if not self.get(name).waking:
            await in_thread(self._executor, self._writes.wake, name, time.time())

    async def logs(self, name: str, *, tail: int | None, since_s: float) -> list[LogLine]:
        """Output of a function's pods in order of time, leaving ones among them."""
        self.get(name)
        loop = asyncio.get_running_loop()
        pods = [pod["metadata"]["name"] for pod in self._view.pods.get(name, [])]
        asked = [loop.run_in_executor(self._readers, self._lines, pod, tail, since_s) for pod in pods]
        parts = await asyncio.gather(*asked, return_exceptions=True)
        told: list[list[LogLine]] = []
        silent: list[ClusterError] = []
        for pod, part in zip(pods, parts, strict=True):
            if isinstance(part, ClusterError):
                _log.warning("output of pod %s cannot be read: %s", pod, part)
                silent.append(part)
            elif isinstance(part, BaseException):
                raise part
            else:
                told.append(part)
        if silent and (not told or isinstance(silent[0], Forbidden)):
            raise gateway_error(silent[0]) from silent[0]
        return merged(told, tail)

    async def usage(self, name: str) -> Usage:
        """What a function's pods use together, by the cluster's metrics; 0 where it serves none."""
        self.get(name)
        return await in_thread(self._readers, usage_of, self._cluster, name)

    async def tell_load(self, name: str, load: Load) -> None:
        """Takes this gateway's load; the controller comes for it (`gateway.internal`)."""
        check_name(name)
        if name not in self._view.states and name not in self._view.pods:
            raise UnknownFunction(f"function {name} is not deployed")
        try:
            check_load(name, load)
        except ValueError as error:
            raise BadRequest(str(error)) from None

    async def report(self, since: tuple[str, int] | None, wait_s: float) -> bytes | None:
        """The report that the controller told last."""
        return await self.reports.wait(since, wait_s)

    async def secrets(self) -> list[str]:
        """Names of all secrets, sorted."""
        return await in_thread(self._executor, self._secrets.names)

    async def put_secret(self, name: str, value: bytes, *, create: bool) -> None:
        """Creates or replaces a secret."""
        await in_thread(self._executor, self._secrets.put, name, value, create=create)

    async def delete_secret(self, name: str) -> None:
        """Removes a secret."""
        await in_thread(self._executor, self._secrets.delete, name)

    def _lines(self, pod: str, tail: int | None, since_s: float) -> list[LogLine]:
        return lines_of(self._cluster, pod, tail=tail, since_s=since_s)

    def _stir(self) -> None:
        """In an informer's thread: the view is to be read again, once however much changed."""
        if self._stirred.is_set() or self._loop is None:
            return
        self._stirred.set()
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._refresh)

    def _refresh(self) -> None:
        self._stirred.clear()  # first: what changes from here on stirs again
        self._view.update(self._functions.items(), self._pods.items(), time.time())
        self._changed.set()
        self._changed = asyncio.Event()

    async def _seen(self, name: str, condition: Callable[[], bool]) -> None:
        """Waits until what was written has come back."""
        until_s = time.monotonic() + SEEN_S
        while not condition():
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                _log.warning("function %s was written, but the view lags behind: %s", name, self.trouble)
                return
            await self.changed(left_s)
        self._refresh()


def is_as_new(held: Object | None, written: Object) -> bool:
    """Whether the view has a write, or something later.

    Versions grow within one kind of resource, whichever object of a name they are of: one that goes while its
    successor is written in the same second has a smaller one.
    """
    if held is None:
        return False
    one, other = held["metadata"]["resourceVersion"], written["metadata"]["resourceVersion"]
    try:
        return int(one) >= int(other)
    except ValueError:
        return bool(one == other)


def is_gone(held: Object | None, uid: str) -> bool:
    """Whether the view no longer has this object, or has it as one that goes."""
    return held is None or held["metadata"]["uid"] != uid or bool(held["metadata"].get("deletionTimestamp"))


def backend_for(settings: ClusterSettings) -> KubernetesBackend:
    """The backend over the cluster that the settings name.

    Raises:
        BackendUnavailable: there is none to be found.
    """
    try:
        api = connect(settings.kubeconfig)
    except ClusterError as error:
        raise gateway_error(error) from error
    return KubernetesBackend(Cluster(api, settings.functions_in))
