"""Layers in place of larger ones, and models that begin from trained ones (`transfer`).

>>> import paceline
>>> paceline.layers.TTLinear(1024, 256, rank=4)
TTLinear(in_features=1024, out_features=256, bias=True, modes=16x16 by 32x32, ranks=4)
"""

from paceline.layers import transfer
from paceline.layers.tensor_train.convert import Conversion, to_tensor_train
from paceline.layers.tensor_train.cost import Verdict, calibrate, verdict
from paceline.layers.tensor_train.embedding import TTEmbedding
from paceline.layers.tensor_train.linear import TTLinear
from paceline.layers.tensor_train.spread import SpreadTTLinear

__all__ = [
    "Conversion",
    "SpreadTTLinear",
    "TTEmbedding",
    "TTLinear",
    "Verdict",
    "calibrate",
    "to_tensor_train",
    "transfer",
    "verdict",
]
