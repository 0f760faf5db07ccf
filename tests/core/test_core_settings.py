"""Settings: replaced by name, checked by type, and pinned by the launcher alone."""

from __future__ import annotations

import pytest

from paceline.core.errors import ConfigError
from paceline.core.settings import NAMES, Settings


def test_what_was_typed_stays_pinned() -> None:
    settings = Settings(seed=3).pin("seed", "name").with_(device="cpu")
    assert (settings.pinned, settings.seed, settings.device) == (("seed", "name"), 3, "cpu")
    assert settings.changed() == ("device", "seed")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pinned": ("seed",)}, "unknown setting 'pinned'"),  # the launcher's to say, not the script's
        ({"sed": 1}, "unknown setting 'sed': did you mean 'seed'"),
        ({"seed": "1"}, "bad setting"),
    ],
)
def test_what_is_refused(changes: dict[str, object], message: str) -> None:
    assert "pinned" not in NAMES
    with pytest.raises(ConfigError, match=message):
        Settings().with_(**changes)
