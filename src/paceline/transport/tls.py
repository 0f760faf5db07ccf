"""TLS 1.3 whose identity is the run's token.

Every member derives the same ed25519 key pair and self-signed certificate from the token, presents it,
and takes exactly that public key from the other side. There is no authority and nothing to hand out: who
holds the token is in. Host names are not checked, since the key says more. The channel uses this off
loopback, after `auth`.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import os
import select
import socket
import ssl
import tempfile
import time
from collections.abc import Iterator

from paceline.core.errors import AuthError, Interrupted, TimedOut


def secure(sock: socket.socket, token: str, server_side: bool, deadline: float) -> ssl.SSLSocket:
    """Wrap a connected non-blocking socket; AuthError where the other side holds another key."""
    context = _context(token, server_side)
    wrapped = context.wrap_socket(
        sock, server_side=server_side, do_handshake_on_connect=False, suppress_ragged_eofs=False
    )
    try:
        _shake_hands(wrapped, deadline)
        theirs = wrapped.getpeercert(binary_form=True)
        if theirs is None or _public_key(theirs) != _public_key(_identity(token)[0]):
            raise AuthError("the other side's TLS key is not this run's: its traffic may be intercepted")
    except BaseException:
        wrapped.close()
        raise
    return wrapped


def _shake_hands(sock: ssl.SSLSocket, deadline: float) -> None:
    while True:
        try:
            return sock.do_handshake()
        except ssl.SSLWantReadError:
            event = select.POLLIN
        except ssl.SSLWantWriteError:
            event = select.POLLOUT
        except ssl.SSLCertVerificationError as error:
            raise AuthError(f"the other side's TLS key is not this run's: {error.verify_message}") from None
        except OSError as error:
            raise Interrupted(f"the TLS handshake failed: {error}") from None
        poll = select.poll()
        poll.register(sock, event)
        left = deadline - time.monotonic()
        if left <= 0 or not poll.poll(left * 1e3):
            raise TimedOut("the other side did not finish the TLS handshake in time")


@functools.lru_cache(maxsize=8)
def _context(token: str, server_side: bool) -> ssl.SSLContext:
    certificate, key = _identity(token)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server_side else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=certificate)
    if server_side:
        context.num_tickets = 0  # sessions are never resumed; tickets would only travel unread
    with _unlisted_file(ssl.DER_cert_to_PEM_cert(certificate).encode() + key) as path:
        context.load_cert_chain(path)
    return context


@functools.lru_cache(maxsize=8)
def _identity(token: str) -> tuple[bytes, bytes]:
    """The certificate (DER) and the key (PEM) of a token; the same bytes on every member."""
    # Imported here: loopback runs, which are most, never need it.
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF
    from cryptography.x509.oid import NameOID

    seed = HKDF(hashes.SHA256(), 32, salt=None, info=b"paceline tls identity 1").derive(token.encode())
    key = Ed25519PrivateKey.from_private_bytes(seed)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "paceline run")])
    usage = x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        crl_sign=False,
        encipher_only=False,
        decipher_only=False,
    )
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        # Fixed and wide: the token's life bounds the key, and hosts' clocks may disagree.
        .not_valid_before(datetime.datetime(2000, 1, 1))
        .not_valid_after(datetime.datetime(9999, 12, 31))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .sign(key, None)
    )
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return certificate.public_bytes(serialization.Encoding.DER), pem


@functools.lru_cache(maxsize=64)
def _public_key(certificate: bytes) -> bytes:
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization

    key = x509.load_der_x509_certificate(certificate).public_key()
    return key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)


@contextlib.contextmanager
def _unlisted_file(data: bytes) -> Iterator[str]:
    """A path that holds `data` for as long as the block runs. OpenSSL reads keys from paths only.

    Memory of the kernel, where there is such a thing; elsewhere a private file that is removed at once.
    """
    if hasattr(os, "memfd_create"):
        number = os.memfd_create("paceline")
        try:
            os.write(number, data)
            yield f"/proc/self/fd/{number}"
        finally:
            os.close(number)
    else:
        with tempfile.NamedTemporaryFile() as file:  # mode 0600
            file.write(data)
            file.flush()
            yield file.name
