"""The OpenFaaS REST API as a client: one method for each thing that can be asked of a gateway.

Used by the controller's platform and the command line, against Keystage's own gateway and stock ones.
It knows how providers differ in what a success means: writes are answered 200, 201 or 202, and 200 to
an update may hide a refusal, so an update is looked at afterwards. It must not decide anything.
"""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Callable
from typing import Literal, TypeVar
from urllib.parse import quote, urlencode

import msgspec

from keystage.local.api import Deployment
from keystage.local.labels import MIN, whole
from keystage.openfaas.errors import BadAnswer, Failed, NotFound, Unverified, answered
from keystage.openfaas.exchange import Wire
from keystage.openfaas.provider import kind_of
from keystage.openfaas.types import FunctionStatus, GatewayInfo, LogMessage, Secret, decoded
from keystage.wire.unreadable import UNREADABLE

VERIFY_S = 3.0
"""How long an update that was answered 200 may take to show: what is read comes from a cache."""
VERIFY_EVERY_S = 0.1
T = TypeVar("T")


class Client:
    """One gateway.

    Args:
        wire: how it is reached.
        namespace: of the functions, empty for the gateway's default.
    """

    def __init__(self, wire: Wire, namespace: str = "") -> None:
        self.wire = wire
        self._namespace = namespace

    # ------------------------------------------------------------ reading

    def info(self) -> GatewayInfo:
        """Who the gateway and its provider are."""
        return self._read("/system/info", GatewayInfo)

    def namespaces(self) -> list[str]:
        """Namespaces of functions."""
        return self._read("/system/namespaces", list[str])

    def functions(self) -> list[FunctionStatus]:
        """All functions."""
        return self._read("/system/functions" + self._query(), list[FunctionStatus])

    def describe(self, name: str) -> FunctionStatus:
        """One function.

        Raises:
            NotFound: it is not deployed.
        """
        return self._read(f"/system/function/{quote(name, safe='')}{self._query(usage='1')}", FunctionStatus)

    def secrets(self) -> list[Secret]:
        """All secrets, without their values."""
        return self._read("/system/secrets" + self._query(), list[Secret])

    def logs(
        self, name: str, *, tail: int | None = None, since: dt.datetime | None = None
    ) -> list[LogMessage]:
        """What a function wrote so far.

        Args:
            name: function.
            tail: newest lines at most, None for all that are kept.
            since: only later lines; with a zone.

        Raises:
            NotFound: it is not deployed (a stock gateway answers with no lines instead).
        """
        fields = {"name": name, "follow": "false"}
        if tail is not None:
            fields["tail"] = str(tail)
        if since is not None:
            fields["since"] = since.isoformat()
        path = "/system/logs" + self._query(**fields)
        lines = self._ask("GET", path).splitlines()
        return [self._decode(path, line, LogMessage) for line in lines if line.strip()]

    # ------------------------------------------------------------ writing

    def deploy(self, deployment: Deployment) -> Literal["created", "updated"]:
        """Updates a function with PUT, or creates it with POST where there is none.

        Where the provider's update sets replicas back to the label `com.openfaas.scale.min`, they are stated
        again as they were. Our own gateway is left alone: there a scale request is a person's wish.

        Raises:
            Refused: the provider does not take it, in its own words.
            Unverified: it was answered with success, and the function is still as before.
        """
        name = deployment.service
        body = msgspec.json.encode(self._placed(deployment))
        try:
            before = self.describe(name)
            status = self._write("PUT", "/system/functions", body, f"function {name}")
        except NotFound:
            self._write("POST", "/system/functions", body, f"function {name}")
            return "created"
        if status == 200:
            self._verify(deployment)
        least = whole(deployment.labels.get(MIN, ""))
        if least is not None and before.replicas > least and kind_of(self.info()) != "keystage":
            self.scale(name, before.replicas)
        return "updated"

    def delete(self, name: str) -> None:
        """Removes a function.

        Raises:
            NotFound: it is not deployed.
        """
        body = {"functionName": name, **self._here()}
        self._write(
            "DELETE", "/system/functions" + self._query(), msgspec.json.encode(body), f"function {name}"
        )

    def scale(self, name: str, replicas: int) -> None:
        """States how many replicas a function shall have; a gateway may take fewer or more without a word.

        Raises:
            NotFound: it is not deployed; some providers call that a failure (500), so that is looked into.
        """
        body = {"serviceName": name, "replicas": replicas, **self._here()}
        path = f"/system/scale-function/{quote(name, safe='')}{self._query()}"
        try:
            self._write("POST", path, msgspec.json.encode(body), f"{replicas} replicas")
        except Failed as error:
            self._tell_whether_gone(name, error)
            raise

    def put_secret(self, name: str, value: str) -> Literal["created", "updated"]:
        """Replaces a secret, or creates it where there is none."""
        body = msgspec.json.encode({"name": name, "value": value, **self._here()})
        if any(secret.name == name for secret in self.secrets()):
            self._write("PUT", "/system/secrets", body, f"secret {name}")
            return "updated"
        self._write("POST", "/system/secrets", body, f"secret {name}")
        return "created"

    def delete_secret(self, name: str) -> None:
        """Removes a secret.

        Raises:
            NotFound: there is none.
        """
        body = msgspec.json.encode({"name": name, **self._here()})
        self._write("DELETE", "/system/secrets" + self._query(), body, f"secret {name}")

    # ------------------------------------------------------------ invoking

    def get(self, name: str, path: str, timeout_s: float | None = None) -> tuple[int, bytes]:
        """GET of a function's own path, through the gateway; status and body, whatever they are."""
        function = quote(f"{name}.{self._namespace}" if self._namespace else name, safe="")
        return self.wire.exchange("GET", f"/function/{function}{path}", timeout_s=timeout_s)

    # ------------------------------------------------------------ parts

    def _tell_whether_gone(self, name: str, error: Failed) -> None:
        try:
            self.describe(name)
        except NotFound:
            raise NotFound(f"function {name} is not deployed ({error})", 404) from error
        except Failed as another:
            raise error from another

    def _verify(self, deployment: Deployment) -> None:
        """Waits a moment for an update to show."""
        end_s = time.monotonic() + VERIFY_S
        while differences := unlike(deployment, self.describe(deployment.service)):
            if time.monotonic() >= end_s:
                raise Unverified(
                    f"PUT of function {deployment.service} was answered 200, and {VERIFY_S:g} s later it "
                    f"still has another {', '.join(differences)}: the provider refused it and says why in "
                    "its own log only (an image that needs credentials, a missing secret, a bad quantity)",
                    200,
                )
            time.sleep(VERIFY_EVERY_S)

    def _placed(self, deployment: Deployment) -> Deployment:
        if self._namespace and not deployment.namespace:
            return msgspec.structs.replace(deployment, namespace=self._namespace)
        return deployment

    def _here(self) -> dict[str, str]:
        return {"namespace": self._namespace} if self._namespace else {}

    def _query(self, **fields: str) -> str:
        text = urlencode({**fields, **self._here()})
        return f"?{text}" if text else ""

    def _read(self, path: str, kind: type[T]) -> T:
        return self._decode(path, self._ask("GET", path) or b"[]", kind)

    def _decode(self, path: str, body: bytes, kind: type[T]) -> T:
        try:
            return decoded(b"[]" if body.strip() == b"null" else body, kind)
        except UNREADABLE as error:
            asked = self.wire.asked("GET", path)
            raise BadAnswer(
                f"{asked} answered what the API does not know: {error}: {body[:200]!r}"
            ) from error

    def _ask(self, method: str, path: str, body: bytes | None = None) -> bytes:
        status, content = self.wire.exchange(method, path, body)
        if not 200 <= status < 300:
            raise answered(self.wire.asked(method, path), status, content)
        return content

    def _write(self, method: str, path: str, body: bytes, about: str) -> int:
        status, content = self.wire.exchange(method, path, body)
        if status not in (200, 201, 202, 204):
            raise answered(f"{self.wire.asked(method, path)} ({about})", status, content)
        return status


def unlike(wanted: Deployment, told: FunctionStatus) -> list[str]:
    """What of a deployment does not show in a function's status; a provider may add to it. Pure."""
    same: list[tuple[str, Callable[[], bool]]] = [
        # A provider may write out the registry that a short name stands for.
        ("image", lambda: told.image == wanted.image or told.image.endswith("/" + wanted.image)),
        ("environment", lambda: wanted.envVars.items() <= told.envVars.items()),
        ("labels", lambda: wanted.labels.items() <= told.labels.items()),
        ("annotations", lambda: wanted.annotations.items() <= told.annotations.items()),
    ]
    return [name for name, holds in same if not holds()]
