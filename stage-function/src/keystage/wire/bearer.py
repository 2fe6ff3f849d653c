"""Bearer tokens of internal HTTP, derived from secrets that may change while the process runs.

Before it: a token that was configured, or a `keyring`. After it: who asks shows `current`, who is asked
`admits`. Tokens are compared in constant time, all that are accepted, whichever fits.
"""

from __future__ import annotations

import hmac
import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path

from keystage.wire.errors import WireError
from keystage.wire.keyring import Keyring
from keystage.wire.secret import is_open_to_others

SCHEME = "Bearer "
INTERNAL = "kubernetes internal http"
"""Label under which the token of Keystage's own parts among each other is derived."""
MAX_TOKEN_BYTES = 4096


class Bearer:
    """Tokens of one purpose.

    Args:
        tokens: gives what is valid now: the one that is shown first, all are taken.
    """

    def __init__(self, tokens: Callable[[], Sequence[str]]) -> None:
        self._tokens = tokens

    def __repr__(self) -> str:
        return "Bearer(...)"

    @property
    def current(self) -> str:
        """The token to be shown to others; empty for none."""
        return next(iter(self._tokens()), "")

    def admits(self, authorization: bytes) -> bool:
        """Whether an Authorization header's value bears one of the tokens; never, where there is none."""
        is_known = False
        for token in self._tokens():
            is_known |= bool(token) and hmac.compare_digest(authorization, f"{SCHEME}{token}".encode())
        return is_known


def bearer_of(token: Bearer | str) -> Bearer:
    """A token that does not change; what changes is taken as it is."""
    if isinstance(token, Bearer):
        return token
    tokens = (token,) if token else ()
    return Bearer(lambda: tokens)


def read_token(path: Path) -> str:
    """Reads a token file.

    Raises:
        WireError: it cannot be read, is empty, or others than its owner may read it.
    """
    try:
        with path.open() as file:
            facts = os.fstat(file.fileno())
            token = file.read(MAX_TOKEN_BYTES).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise WireError(f"token file {path} cannot be read: {error}") from error
    if is_open_to_others(facts.st_mode, facts.st_uid, os.geteuid()):
        mode = stat.S_IMODE(facts.st_mode)
        raise WireError(f"token file {path} has mode {mode:04o}, 0600 is needed: others could read it")
    if not token:
        raise WireError(f"token file {path} is empty")
    return token


def bearer_from(token_file: Path | None, wire_key_file: Path | None) -> Bearer:
    """The token of a part's own settings: that of a file, else one derived from the secret, else none.

    Raises:
        WireError: the file cannot be used.
    """
    if token_file is not None:
        return bearer_of(read_token(token_file))
    return bearer_of("") if wire_key_file is None else derived(Keyring(wire_key_file), INTERNAL)


def derived(keyring: Keyring, purpose: str) -> Bearer:
    """Tokens that every process of a deployment derives from its secrets.

    Args:
        keyring: the deployment's.
        purpose: label under which they are derived.
    """
    known: dict[object, tuple[str, ...]] = {}

    def tokens() -> tuple[str, ...]:
        secrets = keyring.secrets
        found = known.get(secrets)
        if found is None:
            found = tuple(secret.derive(purpose).hex() for secret in secrets)
            known.clear()
            known[secrets] = found
        return found

    return Bearer(tokens)
