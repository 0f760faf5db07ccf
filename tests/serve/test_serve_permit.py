"""Who may ask: tokens byte for byte, and names that can only be this host's."""

from __future__ import annotations

import pytest

from paceline.serve.permit import permit
from paceline.serve.refused import Refused


@pytest.mark.parametrize(
    "host",
    ["", "here", "localhost.here", "notlocalhost", "127.0.0.1.here:80", "10.0.0.1", "0.0.0.0", "[::]", "[::1", "::1"],
)
def test_other_names_are_refused(host: str) -> None:
    with pytest.raises(Refused, match=r"Host says .*--token-file") as error:
        permit("", {"host": host})
    assert error.value.status == 421


def test_a_token_is_compared_as_the_bytes_that_came() -> None:
    permit("sécret", {"authorization": "Bearer sécret".encode().decode("latin-1")})
    with pytest.raises(Refused, match="another one"):
        permit("sécret", {"authorization": "Bearer sécret"})
