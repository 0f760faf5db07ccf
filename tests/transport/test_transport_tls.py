"""TLS with the token as identity: who holds it gets in, the key is nowhere on disk, waits are limited."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from paceline.core.errors import AuthError, Interrupted, PacelineError, TimedOut
from paceline.transport import tls
from paceline.transport.address import is_loopback
from paceline.transport.channel import Listener, connect


def own_address() -> str:
    """An address of this machine that is not loopback, or "" where there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            return ""
        host = str(sock.getsockname()[0])
    return "" if is_loopback(host) else host


def shake(server_token: str, client_token: str) -> list[ssl.SSLSocket | PacelineError]:
    """Both sides of one handshake: the wrapped socket, or what went wrong."""
    pair = socket.socketpair()

    def side(i: int) -> ssl.SSLSocket | PacelineError:
        pair[i].setblocking(False)
        try:
            return tls.secure(pair[i], (server_token, client_token)[i], i == 0, time.monotonic() + 5)
        except PacelineError as error:
            return error

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(side, range(2)))


def test_off_loopback_the_channel_is_encrypted_by_itself() -> None:
    host = own_address()
    if not host:
        pytest.skip("this machine has no address but loopback")
    with Listener(host, "t") as listener:
        with connect(listener.address, "t", 5) as here, listener.accept(5) as there:
            assert here.encrypted
            assert there.encrypted
            here.send(b"hello")
            assert there.recv(5) == b"hello"
    with Listener("127.0.0.1", "t") as listener, connect(listener.address, "t", 5) as here:
        assert not here.encrypted


def test_what_travels_cannot_be_read() -> None:
    with Listener(token="t", encrypt=True) as listener, socket.create_server(("127.0.0.1", 0)) as tap:
        seen = bytearray()

        def carry(source: socket.socket, target: socket.socket) -> None:
            while data := source.recv(65536):
                seen.extend(data)
                target.sendall(data)

        def relay() -> None:
            inner, _ = tap.accept()
            outer = socket.create_connection(("127.0.0.1", int(listener.address.rpartition(":")[2])))
            with inner, outer, ThreadPoolExecutor(2) as pool:
                pool.submit(carry, inner, outer)
                carry(outer, inner)

        with ThreadPoolExecutor(1) as pool:
            relaying = pool.submit(relay)
            with connect(f"127.0.0.1:{tap.getsockname()[1]}", "t", 5, encrypt=True) as here:
                there = listener.accept(5)
                here.send(b"the gradient of the first layer")
                assert there.recv(5) == b"the gradient of the first layer"
                there.close()
            relaying.result(5)
        assert len(seen) > 1000
        assert b"gradient" not in seen


def test_tokens_are_identities() -> None:
    assert tls._identity("a") == tls._identity("a")
    assert tls._public_key(tls._identity("a")[0]) != tls._public_key(tls._identity("b")[0])
    server, client = shake("a", "a")
    assert isinstance(server, ssl.SSLSocket)
    assert isinstance(client, ssl.SSLSocket)
    assert client.version() == "TLSv1.3"
    server.close()
    client.close()


def test_every_process_derives_the_same_identity() -> None:
    code = "from paceline.transport import tls; print(tls._identity('a')[0].hex())"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert out.stdout.strip() == tls._identity("a")[0].hex()


def test_another_key_is_refused_by_both_sides() -> None:
    server, client = shake("a", "b")
    assert isinstance(client, AuthError)
    assert "not this run's" in str(client)
    assert isinstance(server, Interrupted | AuthError)


def test_a_side_without_a_key_is_refused() -> None:
    here, there = socket.socketpair()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE

    def nobody() -> None:
        with contextlib.suppress(OSError), context.wrap_socket(there) as wrapped:
            wrapped.recv(1)

    with ThreadPoolExecutor(1) as pool:
        trying = pool.submit(nobody)
        here.setblocking(False)
        with pytest.raises((AuthError, Interrupted)):
            tls.secure(here, "a", True, time.monotonic() + 5)
        trying.result(5)


def test_a_silent_handshake_is_limited() -> None:
    here, there = socket.socketpair()
    here.setblocking(False)
    start = time.monotonic()
    with there, pytest.raises(TimedOut):
        tls.secure(here, "a", False, time.monotonic() + 0.2)
    assert time.monotonic() - start < 1


def test_older_tls_is_refused() -> None:
    here, there = socket.socketpair()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.maximum_version = ssl.TLSVersion.TLSv1_2

    def old() -> None:
        with pytest.raises(OSError):
            context.wrap_socket(there)

    with ThreadPoolExecutor(1) as pool:
        trying = pool.submit(old)
        here.setblocking(False)
        with pytest.raises(Interrupted, match=r"TLS handshake failed.*(protocol|version)"):
            tls.secure(here, "a", True, time.monotonic() + 5)
        trying.result(5)
    there.close()


def test_the_key_is_left_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    files = len(os.listdir("/proc/self/fd"))
    tls._context.__wrapped__("fresh token", True)
    assert len(os.listdir("/proc/self/fd")) == files
    # And where the system has no anonymous files, the named one is private and goes at once.
    monkeypatch.delattr("os.memfd_create")
    with tls._unlisted_file(b"secret") as path:
        assert Path(path).stat().st_mode & 0o777 == 0o600
        assert Path(path).read_bytes() == b"secret"
    tls._context.__wrapped__("fresh token", False)
    assert list(tmp_path.iterdir()) == []
