"""Addresses as text: "ip:port", or "[ipv6]:port"."""

from __future__ import annotations

import ipaddress
import socket
import time

from paceline.core.errors import ConfigError


def split_address(address: str) -> tuple[str, int]:
    """
    >>> split_address("10.0.0.1:80"), split_address("[::1]:80")
    (('10.0.0.1', 80), ('::1', 80))
    """
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"address {address!r}: write it as ip:port or [ipv6]:port")
    return host.removeprefix("[").removesuffix("]"), int(port)


def join_address(host: str, port: int) -> str:
    """
    >>> join_address("::1", 80)
    '[::1]:80'
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def await_name(address: str, limit_s: float) -> None:
    """Until the name of the host in `address` is known, as that of a pod is some time after it was made; or until the
    limit, after which whoever connects there finds out."""
    host, port = split_address(address)
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        try:
            socket.getaddrinfo(host, port)
            return
        except OSError:
            time.sleep(min(0.5, max(0.0, deadline - time.monotonic())))


def is_loopback(host: str) -> bool:
    """Whether bytes sent to this address never leave the host.

    >>> is_loopback("127.0.0.5"), is_loopback("::1"), is_loopback("10.0.0.1")
    (True, True, False)
    """
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)
