"""Start from a model that is trained: freeze, load, swap the head, adapt. Works on any nn.Module, by names.

names      what a pattern means                  freezing   freeze and unfreeze, norms that stay in eval mode
depth      rates by depth, gradual thawing       files      load what fits and say so, save a part
heads      other classes                         lora       low-rank adapters
cutting    a model in two                        features   the frozen part computed once, on disk
suggesting where to cut, by linear probes        fusion     features of several layers or models together
sharing    parts of two models that are one      tasks      one body, several heads, each with its own data

>>> import paceline
>>> from torch import nn
>>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
>>> paceline.transfer.freeze(model, "0")
['0.weight', '0.bias']
"""

from paceline.layers.transfer.cutting import cut
from paceline.layers.transfer.depth import Gradual, gradual, groups
from paceline.layers.transfer.features import Features, features
from paceline.layers.transfer.files import Loading, load, save
from paceline.layers.transfer.freezing import freeze, unfreeze
from paceline.layers.transfer.fusion import Concat, Gated, Taps, WeightedSum
from paceline.layers.transfer.heads import Head, head
from paceline.layers.transfer.lora import LoRAConv1D, LoRAEmbedding, LoRALinear, load_lora, lora, merge, save_lora
from paceline.layers.transfer.sharing import share
from paceline.layers.transfer.suggesting import Probe, Suggestion, suggest
from paceline.layers.transfer.tasks import TaskData, Tasks

__all__ = [
    "Concat",
    "Features",
    "Gated",
    "Gradual",
    "Head",
    "LoRAConv1D",
    "LoRAEmbedding",
    "LoRALinear",
    "Loading",
    "Probe",
    "Suggestion",
    "Taps",
    "TaskData",
    "Tasks",
    "WeightedSum",
    "cut",
    "features",
    "freeze",
    "gradual",
    "groups",
    "head",
    "load",
    "load_lora",
    "lora",
    "merge",
    "save",
    "save_lora",
    "share",
    "suggest",
    "unfreeze",
]
