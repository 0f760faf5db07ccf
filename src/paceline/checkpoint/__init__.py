"""Save and resume: any state as safetensors and JSON, written in the background, whole or not at all.

Sits below `train`, which decides when to save and who holds what; assumes nothing of runs, groups or members.
Read files.py first, then part.py and tree.py.
"""

from paceline.checkpoint.files import CheckpointFailed, Checkpoints, Written
from paceline.checkpoint.part import Snapshot, pack, unpack
from paceline.checkpoint.peers import Coming, Lent, Pipe, digest
from paceline.checkpoint.random import random_states, seed_newcomer, set_random_states
from paceline.checkpoint.shelf import Loaded, newest_first

__all__ = [
    "CheckpointFailed",
    "Checkpoints",
    "Coming",
    "Lent",
    "Loaded",
    "Pipe",
    "Snapshot",
    "Written",
    "digest",
    "newest_first",
    "pack",
    "random_states",
    "seed_newcomer",
    "set_random_states",
    "unpack",
]
