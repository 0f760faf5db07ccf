"""Whether members that work on one batch were given the same.

The members of a pipeline or a split read the same samples. What a script draws or makes itself (mixed samples, noise, a
loader of its own) must be the same on them too, or the first stage sees other samples than the last one's targets are
of. The first batch is compared: what differs, mostly does so from the beginning.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch

from paceline.core.errors import ConfigError

UNLIKE = (
    "members that work on one batch were given different ones. Stages and splits of a replica get the same from "
    "run.loader; what a script draws or loads by itself must be the same on them: call torch.manual_seed(run.seed) "
    "before, and do not read data by run.rank"
)


def fingerprint(values: Any) -> int:
    """Of the tensors among values.

    >>> fingerprint([torch.ones(2), "x"]) == fingerprint([torch.ones(2), "y"]) != fingerprint([torch.zeros(2)])
    True
    """
    crc = 0
    for leaf in torch.utils._pytree.tree_leaves(values):
        if type(leaf) is torch.Tensor and not leaf.is_sparse:
            flat = leaf.detach().cpu().contiguous().view(-1)
            crc = zlib.crc32(flat.view(torch.uint8).numpy().data, crc) if flat.numel() else crc
    return crc


def refuse_unlike(alike: bool) -> None:
    if not alike:
        raise ConfigError(UNLIKE)
