"""The manifest: what a checkpoint consists of. Written last, so one without it was never finished."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import msgspec

from paceline.core.errors import CheckpointError

NAME = "manifest.json"
FORMAT = "paceline-checkpoint-1"
SHARED = "shared.safetensors"
FROZEN = "frozen.safetensors"


class Entry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One file."""

    name: str
    bytes: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of manifest.json, besides its own checksum."""

    format: str = FORMAT
    step: int
    number: int  # rises with every checkpoint written in one directory; the newest is the one with the highest
    created: float  # time.time()
    size: int  # members of the run
    meta: dict[str, Any]  # the caller's, coded by tree.flatten
    files: list[Entry]


def own_name(rank: int) -> str:
    """The file of one member's own part."""
    return f"rank-{rank}.safetensors"


def render(manifest: Manifest) -> bytes:
    """The bytes of manifest.json, with a checksum of the rest at the end."""
    content = msgspec.to_builtins(manifest)
    plain = json.dumps(content, separators=(",", ":")).encode()
    return json.dumps({**content, "checksum": hashlib.sha256(plain).hexdigest()}, indent=1).encode() + b"\n"


def read(directory: Path) -> Manifest:
    """The manifest of a checkpoint; a CheckpointError says why there is none that can be trusted."""
    path = directory / NAME
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise CheckpointError(f"{NAME} is missing, so it was never finished") from None
    except OSError as error:
        raise CheckpointError(f"{NAME} cannot be read: {error.strerror}") from None
    try:
        content = json.loads(data)
        checksum = content.pop("checksum")
        if not isinstance(content["format"], str) or not isinstance(checksum, str):
            raise TypeError("format and checksum must be strings")
        if content["format"] != FORMAT and content["format"].startswith("paceline-checkpoint-"):
            raise CheckpointError(f"{NAME} has format {content['format']!r}, this version reads {FORMAT!r}")
        manifest = msgspec.convert(content, Manifest)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{NAME} was altered or torn ({error})") from None
    if render(manifest) != data:
        raise CheckpointError(f"{NAME} was altered: it does not match its own checksum")
    names = [entry.name for entry in manifest.files if entry is not manifest.files[-1] or entry.name != FROZEN]
    if names != [SHARED, *map(own_name, range(manifest.size))]:
        raise CheckpointError(f"{NAME} does not list one file per member and {SHARED}")
    return manifest
