"""Who may ask: one who brings the token; where there is none, one who speaks to this host by a name of its own.

Without a token anybody on this host may ask, and a browser is on this host whose pages are not from here. A page can
have its own name lead to 127.0.0.1 (DNS rebinding): the browser then takes our answers for that page's, whose script
may read them and give orders. Which name it has asked for stands in Host, which no script can change.

Assumes that a server without a token listens on loopback only, as `cli.serve` sees to.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping

from paceline.serve.refused import Refused
from paceline.transport.address import is_loopback


def permit(token: str, headers: Mapping[str, str]) -> None:
    """By names in small letters, decoded as latin-1; Refused: 401, 421."""
    if not token:
        _ask_for_own_name(headers.get("host", ""))
    elif not hmac.compare_digest(headers.get("authorization", "").encode("latin-1"), f"Bearer {token}".encode()):
        raise Refused(401, "the header 'Authorization: Bearer TOKEN' is missing, or its token is another one")


def is_foreign(headers: Mapping[str, str]) -> bool:
    """Whether it is the script of a page that came from elsewhere: a browser says whose page it is."""
    origin = headers.get("origin")
    return origin is not None and origin.partition("://")[2] != headers.get("host", "")


def _ask_for_own_name(host: str) -> None:
    name = host_of(host)
    if not (name == "localhost" or name.endswith(".localhost") or is_loopback(name)):
        raise Refused(
            421,
            f"without a token, requests must be for localhost, a name that ends in .localhost or a loopback address, "
            f"and the header Host says {host!r}: ask for http://localhost:PORT, or start paceline serve with "
            "--token-file",
        )


def host_of(host: str) -> str:
    """The name or address in the header Host, without the port.

    >>> host_of("LocalHost:8000"), host_of("[::1]:8000"), host_of("127.0.0.1"), host_of("[::1")
    ('localhost', '::1', '127.0.0.1', '[::1')
    """
    if host.startswith("["):
        address, closed, _ = host[1:].partition("]")
        return address if closed else host
    return host.partition(":")[0].lower()
