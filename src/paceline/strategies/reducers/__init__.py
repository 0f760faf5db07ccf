"""How buckets of gradients become their sums over the members when they do not travel as they are."""

from paceline.strategies.reducers.coder import Coder, Piece
from paceline.strategies.reducers.method import Auto, LowRank, Method
from paceline.strategies.reducers.reducer import Reducer, load

__all__ = ["Auto", "Coder", "LowRank", "Method", "Piece", "Reducer", "load"]
