"""How one replica is cut: over which members, and where.

`parallel.model` has what it takes to cut; it imports more of PyTorch than runs need that cut nothing.
"""

from paceline.parallel.cut import Cut, CutModel
from paceline.parallel.layers import recompute_layers
from paceline.parallel.outline import whole_model

__all__ = ["Cut", "CutModel", "recompute_layers", "whole_model"]
