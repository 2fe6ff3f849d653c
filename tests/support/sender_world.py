"""What the sender's tests share: plans, requests sent within the test's own loop, certificates."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from keystage.loadgen.lengths import Length
from keystage.loadgen.plan import Plan
from keystage.loadgen.sending.client import Client
from keystage.loadgen.sending.route import Reading, route
from keystage.loadgen.sending.row import Row

WAIT_S = 30.0


def plan_of(times_s: Sequence[float], bodies: Sequence[bytes] | None = None, **changes: Any) -> Plan:
    """A plan at these times, of equal bodies if none are given."""
    count = len(times_s)
    last_s = float(times_s[-1]) if count else 0.0
    times = np.asarray(times_s, np.float64)
    return Plan(
        times, [Length(1, 1)] * count, bodies or [b"x"] * count, last_s, None, None, "test", **changes
    )


@contextlib.asynccontextmanager
async def client_of(url: str, reading: Reading = "times", **changes: Any) -> AsyncIterator[Client]:
    """A client of one route, in this loop."""
    given: dict[str, Any] = {"timeout_s": WAIT_S, "http": "1.1", "retries": 0, "ended": lambda _row: None}
    made = Client(
        [route(url, {"Content-Type": "text/plain"}, reading)], start_s=time.monotonic(), **(given | changes)
    )
    try:
        yield made
    finally:
        await made.close()


async def ask(client: Client, body: bytes = b"x") -> Row:
    """Sends one request and waits for its end."""
    row = Row(0, time.monotonic() - client.start_s)
    client.send(row, body)
    async with asyncio.timeout(2 * WAIT_S):
        await client.finish()
    return row


def write_certificate(folder: Path) -> tuple[Path, Path]:
    """A self-signed certificate of `localhost` and its key, as files."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = dt.datetime.now(dt.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    certificate, private = folder / "localhost.pem", folder / "localhost.key"
    certificate.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    private.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return certificate, private
