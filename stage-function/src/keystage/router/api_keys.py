"""API keys: who may ask, as which tenant, how urgently. For the HTTP face; their file is followed.

A line a key, `#` begins a comment:

    TENANT SHA256 [weight=NUMBER] [priority=low|normal|high]

SHA256 is the key's, in hexadecimal. `python -m keystage.router.api_keys TENANT` makes keys of 256 random
bits: a plain hash of such a key tells nothing, while one of a password would be guessed, so passwords are
none. A tenant may have several keys (to change one, add the new one, then drop the old one); its weight is
its share beside others. `priority` is the highest that the key may ask for.

No key is ever written anywhere: not into logs, metrics, traces or refusals, which name tenants.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import hmac
import logging
import math
import re
import secrets
import sys
import time
from pathlib import Path

from keystage.router.engine import Caller, Generation, InvalidRequest
from keystage.router.face_http import TENANT, Scope, header, tenant_of
from keystage.router.openai_errors import PriorityRefused, Unauthorized

log = logging.getLogger("keystage.router")

PRIORITIES = {"low": -1, "normal": 0, "high": 1}
PRIORITY = "x-keystage-priority"
_CALLER = "keystage.priority"
_TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
LOOK_EVERY_S = 1.0
"""How often the file is looked at while requests come."""
MOST_BYTES = 1 << 20
MOST_TENANTS = 256
"""Each has series of its own in the metrics."""
MOST_WEIGHT = 1000.0
OPEN = ("/_/", "/metrics", "/openapi.json")
"""Paths that need no key: supervisor, controller and Prometheus ask there, and nothing secret is there."""


class KeysError(Exception):
    """The file cannot be used; the message names the line and what is wrong, never what it says."""


@dataclasses.dataclass(frozen=True, slots=True)
class ApiKey:
    """What a key gives.

    Attributes:
        tenant: whose it is.
        weight: share of the tenant.
        priority: highest one that it may ask for.
    """

    tenant: str
    weight: float = 1.0
    priority: int = 0


def parse(text: str) -> dict[bytes, ApiKey]:
    """Keys by their SHA-256.

    Raises:
        KeysError: a line is none, a key comes twice, or a tenant has two weights.
    """
    found: dict[bytes, ApiKey] = {}
    weights: dict[str, float] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        digest, key = _line(words, f"line {number}")
        if digest in found:
            raise KeysError(f"line {number}: this key has a line already")
        if weights.setdefault(key.tenant, key.weight) != key.weight:
            raise KeysError(
                f"line {number}: tenant {key.tenant} has weight {weights[key.tenant]:g} in an earlier line, "
                f"here {key.weight:g}"
            )
        found[digest] = key
    if len(weights) > MOST_TENANTS:
        raise KeysError(f"{len(weights)} tenants, at most {MOST_TENANTS} are served")
    return found


def _line(words: list[str], where: str) -> tuple[bytes, ApiKey]:
    if len(words) < 2 or not _TENANT.fullmatch(words[0]):
        raise KeysError(
            f"{where}: it must be TENANT SHA256 [weight=NUMBER] [priority=low|normal|high], a tenant of 1 to "
            "64 letters, digits, dots, dashes and underscores"
        )
    if not _SHA256.fullmatch(words[1].lower()):
        raise KeysError(f"{where}: the key of {words[0]} must be its SHA-256, 64 hexadecimal digits")
    weight, priority = 1.0, 0
    for word in words[2:]:
        name, _, value = word.partition("=")
        if name == "weight":
            weight = _number(value)
            if not 0 < weight <= MOST_WEIGHT:
                raise KeysError(
                    f"{where}: a weight is above 0 and at most {MOST_WEIGHT:g}, not {value[:20]!r}"
                )
        elif name == "priority" and value in PRIORITIES:
            priority = PRIORITIES[value]
        else:
            raise KeysError(f"{where}: {word[:40]!r} is neither weight=NUMBER nor priority=low|normal|high")
    return bytes.fromhex(words[1]), ApiKey(words[0], weight, priority)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


class ApiKeys:
    """The keys of one file.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        # Digests are looked up under a secret of this process: how long that takes tells nobody of them.
        self._secret = secrets.token_bytes(32)
        self._by_name: dict[bytes, tuple[bytes, ApiKey]] = {}
        self._weights: dict[str, float] = {}
        self._stamp: tuple[int, int, int] | None = None
        self._looked_s = -math.inf

    def load(self) -> None:
        """Reads the file.

        Raises:
            KeysError: it cannot be read or used; what was known stays.
        """
        try:
            stamp = self._stamp_now()
            with self.path.open("rb") as file:
                raw = file.read(MOST_BYTES + 1)
        except OSError as error:
            raise KeysError(f"API keys in {self.path} cannot be read: {error.strerror}") from error
        if len(raw) > MOST_BYTES:
            raise KeysError(f"API keys in {self.path}: more than {MOST_BYTES} bytes")
        try:
            found = parse(raw.decode())
        except UnicodeDecodeError:
            raise KeysError(f"API keys in {self.path}: no UTF-8") from None
        except KeysError as error:
            raise KeysError(f"API keys in {self.path}: {error}") from None
        self._by_name = {self._name(digest): (digest, key) for digest, key in found.items()}
        self._weights = {key.tenant: key.weight for key in found.values()}
        self._stamp = stamp

    def refresh(self, now_s: float) -> None:
        """Reads the file again if it has changed; one that is broken is told, and changes nothing."""
        if now_s - self._looked_s < LOOK_EVERY_S:
            return
        self._looked_s = now_s
        stamp = self._stamp_or_none()
        if stamp == self._stamp:
            return
        try:
            self.load()
        except KeysError as error:
            log.error("%s; the keys read before stay in force", error)
            self._stamp = stamp
        else:
            log.info("API keys in %s were read again: %d tenants", self.path, len(self._weights))

    def weight_of(self, tenant: str) -> float:
        """Of a tenant; of one that has gone meanwhile, 1."""
        return self._weights.get(tenant, 1.0)

    @property
    def tenants(self) -> list[str]:
        """All of them."""
        return sorted(self._weights)

    def find(self, given: bytes) -> ApiKey | None:
        """What a key gives, None: it is none of ours. Takes as long for the one as for the other."""
        digest = hashlib.sha256(given).digest()
        known, key = self._by_name.get(self._name(digest), (bytes(32), None))
        return key if hmac.compare_digest(known, digest) else None

    def admit(self, scope: Scope) -> None:
        """Checks the key of a request, if its path needs one, and notes in the scope whose it is.

        Raises:
            Unauthorized: there is none, or it is not known.
            PriorityRefused: it may not ask for that priority.
            InvalidRequest: that is no priority.
        """
        if scope["path"].startswith(OPEN):
            return
        self.refresh(time.monotonic())
        scheme, _, given = (header(scope, b"authorization") or b"").strip().partition(b" ")
        if scheme.lower() != b"bearer" or not given.strip():
            raise Unauthorized("an API key is needed: Authorization: Bearer KEY")
        key = self.find(given.strip())
        if key is None:
            raise Unauthorized("the API key is not known here")
        wanted = asked_priority(scope)
        if wanted is not None and wanted > key.priority:
            names = {value: name for name, value in PRIORITIES.items()}
            raise PriorityRefused(
                f"tenant {key.tenant} asks for priority {names[wanted]}; its key allows "
                f"{names[key.priority]} at most",
                param=PRIORITY,
            )
        scope[TENANT] = key.tenant
        scope[_CALLER] = min(0, key.priority) if wanted is None else wanted

    def _name(self, digest: bytes) -> bytes:
        return hmac.digest(self._secret, digest, "sha256")

    def _stamp_now(self) -> tuple[int, int, int]:
        found = self.path.stat()
        return found.st_mtime_ns, found.st_size, found.st_ino

    def _stamp_or_none(self) -> tuple[int, int, int] | None:
        try:
            return self._stamp_now()
        except OSError:
            return None


def asked_priority(scope: Scope) -> int | None:
    """What a request asks for, None: it does not say.

    Raises:
        InvalidRequest: it is no priority.
    """
    raw = header(scope, PRIORITY.encode())
    if raw is None:
        return None
    priority = PRIORITIES.get(raw.decode("latin-1").strip().lower())
    if priority is None:
        raise InvalidRequest(
            f"header {PRIORITY} must be low, normal or high, not {raw[:40]!r}", param=PRIORITY
        )
    return priority


def caller_of(scope: Scope) -> Caller:
    """Who asks, and how urgently.

    Raises:
        InvalidRequest: it asks for a priority that is none.
    """
    noted = scope.get(_CALLER)
    return Caller(tenant_of(scope), int(noted) if noted is not None else asked_priority(scope) or 0)


def on_behalf_of(scope: Scope, generation: Generation) -> Generation:
    """The request, with who asks for it.

    Raises:
        InvalidRequest: it asks for a priority that is none.
    """
    caller = caller_of(scope)
    return dataclasses.replace(generation, tenant=caller.tenant, priority=caller.priority)


def keys_path(setting: str, secrets_folder: str) -> Path | None:
    """File that `KEYSTAGE_API_KEYS` names: a path, or `secret:NAME`, None for none.

    Args:
        setting: the variable's value.
        secrets_folder: where the function's secrets are mounted.

    Raises:
        KeysError: the secret's name is none.
    """
    if not setting:
        return None
    kind, _, name = setting.partition(":")
    if kind != "secret":
        return Path(setting)
    if name in ("", "..") or name != Path(name).name:
        raise KeysError(f"KEYSTAGE_API_KEYS={setting[:100]}: a secret's name has no slash")
    return Path(secrets_folder) / name


def made(tenant: str, weight: float, priority: str) -> tuple[str, str]:
    """A new key, and its line in the file.

    Raises:
        KeysError: a word of the line would not do.
    """
    key = "ks-" + secrets.token_urlsafe(32)
    words = [tenant, hashlib.sha256(key.encode()).hexdigest()]
    words += [f"weight={weight:g}"] if weight != 1 else []
    words += [f"priority={priority}"] if priority != "normal" else []
    _line(words, "the key's line")
    return key, " ".join(words)


def main() -> int:
    """Makes a key: it goes to stdout, its line for the file to stderr, or into the file."""
    parser = argparse.ArgumentParser(prog="keystage-api-key", description="Make an API key of a tenant.")
    parser.add_argument("tenant")
    parser.add_argument("--weight", type=float, default=1.0, help="the tenant's share beside others")
    parser.add_argument(
        "--priority", choices=list(PRIORITIES), default="normal", help="highest it may ask for"
    )
    parser.add_argument("--append", type=Path, metavar="FILE", help="add the line to this file")
    given = parser.parse_args()
    try:
        key, line = made(given.tenant, given.weight, given.priority)
        if given.append is not None:
            with given.append.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
        else:
            print(line, file=sys.stderr)  # noqa: T201
    except (KeysError, OSError) as error:
        print(f"keystage-api-key: {error}", file=sys.stderr)  # noqa: T201
        return 2
    print(key)  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
