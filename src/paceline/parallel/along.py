"""The groups of members that differ in some dimensions of the mesh only."""

from __future__ import annotations

from paceline.core.mesh import Mesh
from paceline.transport.group import Group


def along(mesh: Mesh, group: Group, *dimensions: str) -> Group:
    """This member's group along dimensions; all members make all of them."""
    every = dict.fromkeys(tuple(mesh.along(rank, *dimensions)) for rank in range(group.size))
    return next(each for each in [group.subgroup(ranks) for ranks in every] if each)
