"""How one replica is cut: over which members, and where."""

from paceline.parallel.cut import Cut, CutModel
from paceline.parallel.model import cut_model, recompute_layers, whole_model

__all__ = ["Cut", "CutModel", "cut_model", "recompute_layers", "whole_model"]
