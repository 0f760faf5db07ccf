"""The page of rooms names every module where it is, and none that is not there, in the order that is enforced."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "paceline"
PAGE = ROOT / "docs" / "explanation" / "rooms.md"


def sections() -> dict[str, str]:
    """The page's text by heading. A heading of several rooms has none of its own."""
    parts = re.split(r"^##+ (.+)$", PAGE.read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_each_module_is_named_in_its_room() -> None:
    named = {room.replace(".", "/"): set(re.findall(r"`(\w+)`", text)) for room, text in sections().items()}
    there: dict[str, set[str]] = {}
    for path in SOURCE.rglob("*.py"):
        room = path.parent.relative_to(SOURCE).as_posix()
        if room != "." and not path.stem.startswith("__"):
            there.setdefault(room, set()).add(path.stem)
    assert {room: modules for room, modules in named.items() if modules} == there


def test_rooms_stand_in_the_order_of_their_layers() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (contract,) = settings["tool"]["importlinter"]["contracts"]
    headings = re.findall(r"^## (.+)$", PAGE.read_text(), flags=re.MULTILINE)
    assert [heading.split(", ") for heading in headings] == [layer.split(" | ") for layer in contract["layers"]]
