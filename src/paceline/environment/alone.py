"""Nobody started this process for us: a run of one, as in `python train.py` or a notebook cell."""

from __future__ import annotations

from collections.abc import Mapping

from paceline.environment import kubernetes, slurm
from paceline.environment.place import Place, labels_in, this_host


def detect(env: Mapping[str, str]) -> Place:
    note = slurm.hint(env) or kubernetes.hint(env)
    return Place(kind="alone", host=this_host(), labels=labels_in(env), note=note)
