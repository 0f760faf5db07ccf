"""Options of `run.model` for which the mesh has no use: told and not refused, since one script goes with any mesh."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.core.mesh import Mesh

_OF = {  # by option: the dimension that it is for, and what says nothing
    "cut": ("stage", ()),
    "like": ("stage", None),
    "micro": ("stage", 0),
    "schedule": ("stage", "1f1b"),
    "whole": ("stage", None),
    "split": ("split", None),
    "sequence": ("split", False),
}


def unused(mesh: Mesh, options: Mapping[str, Any]) -> list[str]:
    """A sentence for each dimension that options are for and the mesh has not.

    >>> unused(Mesh(shard=2), {"micro": 8, "schedule": "gpipe", "sequence": False})
    ['run.model(micro=..., schedule=...) has no effect on --mesh shard=2: it is for --mesh stage=N']
    >>> unused(Mesh(replicate=2), {"split": {"up": "column"}})
    ['run.model(split=...) has no effect without --mesh split=N']
    >>> unused(Mesh(stage=2), {"cut": ["head"], "like": 1})
    ['run.model(like=...) has no effect beside cut=..., which says where stages begin']
    >>> unused(Mesh(), {"micro": 8})  # where one script is tried that others run on a mesh
    []
    """
    if mesh == Mesh():
        return []
    said = [name for name, (_, nothing) in _OF.items() if name in options and not _is(options[name], nothing)]
    found = []
    for dimension in ("stage", "split"):
        idle = [f"{name}=..." for name in said if _OF[name][0] == dimension]
        if idle and getattr(mesh, dimension) == 1:
            where = f"on --mesh {mesh.words}: it is for" if mesh.cuts else "without"
            found.append(f"run.model({', '.join(idle)}) has no effect {where} --mesh {dimension}=N")
    if mesh.stage > 1 and {"cut", "like"} <= set(said):
        found.append("run.model(like=...) has no effect beside cut=..., which says where stages begin")
    return found


def _is(option: Any, nothing: Any) -> bool:
    return (type(option) is type(nothing) and bool(option == nothing)) or (nothing == () and len(option) == 0)
