"""TLS for tensor connections: one certificate that every holder of the secret can make, and trusts alone.

The key pair is Ed25519, its seed derived from the secret, so all processes of a deployment have the
same certificate without any being handed out. Both ends present it and accept nothing else: it is the
only trust anchor, and `check_peer` compares it byte by byte. TLS 1.3 only.

While a secret is being replaced there are two certificates of one name, of which OpenSSL would take the
wrong one as issuer: so each secret has contexts of its own, and the end that connects names the one it
means (SNI: the secret's fingerprint); the other end takes that if it accepts it (`choosing`).
"""

from __future__ import annotations

import datetime as dt
import hmac
import os
import ssl
from collections.abc import Sequence

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from keystage.wire.errors import PeerError
from keystage.wire.secret import Secret

_NOT_BEFORE = dt.datetime(2020, 1, 1, tzinfo=dt.UTC)
_NOT_AFTER = dt.datetime(9999, 12, 31, tzinfo=dt.UTC)
"""The secret's life is the certificate's: whoever replaces the file replaces it."""
_SUFFIX = ".keystage"


def certificate(secret: Secret) -> tuple[x509.Certificate, Ed25519PrivateKey]:
    """Certificate and private key of a deployment: the same in every process that holds the secret."""
    key = Ed25519PrivateKey.from_private_bytes(secret.derive("tensor tls"))
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "keystage")])
    builder = x509.CertificateBuilder(
        issuer_name=name,
        subject_name=name,
        public_key=key.public_key(),
        serial_number=1,
        not_valid_before=_NOT_BEFORE,
        not_valid_after=_NOT_AFTER,
    )
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    return builder.sign(key, algorithm=None), key


class Tls:
    """Both contexts of a deployment. Args: secret: the deployment's."""

    def __init__(self, secret: Secret) -> None:
        made, key = certificate(secret)
        self._name = secret.fingerprint + _SUFFIX
        self._certificate = made.public_bytes(Encoding.DER)
        self._pem = pem = made.public_bytes(Encoding.PEM) + key.private_bytes(
            Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()
        )
        self._server = self._context(ssl.PROTOCOL_TLS_SERVER, pem)
        self._client = self._context(ssl.PROTOCOL_TLS_CLIENT, pem)

    @property
    def server(self) -> ssl.SSLContext:
        """For the end that listens."""
        return self._server

    @property
    def client(self) -> ssl.SSLContext:
        """For the end that connects."""
        return self._client

    @property
    def client_hostname(self) -> str:
        """What the end that connects names."""
        return self._name

    def server_choosing(self, others: Sequence[Tls]) -> ssl.SSLContext:
        """As `server`, or that of another secret where the end that connects means it."""
        named = {tls.client_hostname: tls.server for tls in others}
        if named.keys() <= {self._name}:
            return self._server

        def choose(sock: ssl.SSLObject, name: str | None, _: ssl.SSLContext) -> None:
            if name in named:
                sock.context = named[name]

        made = self._context(ssl.PROTOCOL_TLS_SERVER, self._pem)
        made.sni_callback = choose
        return made

    def check_peer(self, sock: ssl.SSLSocket) -> None:
        """Makes sure that the other end has shown the very certificate of this deployment.

        Raises:
            PeerError: it has not.
        """
        if not hmac.compare_digest(sock.getpeercert(binary_form=True) or b"", self._certificate):
            raise PeerError("its certificate is not that of this deployment's secret")

    def _context(self, protocol: int, pem: bytes) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # the certificate names the deployment, not a host
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=self._certificate)
        if protocol == ssl.PROTOCOL_TLS_SERVER:
            context.num_tickets = 0  # connections are kept; none is resumed
        # OpenSSL takes a key from a file only: one without a name, gone with its descriptor.
        fd = os.memfd_create("keystage-tls", os.MFD_CLOEXEC)
        try:
            os.write(fd, pem)
            context.load_cert_chain(f"/proc/self/fd/{fd}")
        finally:
            os.close(fd)
        return context
