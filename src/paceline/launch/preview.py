"""What would be started, ready for a shell: for `--dry-run`."""

from __future__ import annotations

import os
import shlex

from paceline.core.settings import NAMES
from paceline.launch.plan import plan
from paceline.launch.spec import JobSpec


def members(spec: JobSpec) -> list[str]:
    """Each member's command on this host, with what its environment has beyond ours."""
    parts = []
    address = (spec.elastic and spec.elastic.listen) or "127.0.0.1"
    slots = spec.elastic.own_slots if spec.elastic else None
    starts = plan(spec, f"{address}:<port>", "<token>", slots=slots)
    if slots is not None and slots < spec.size:
        parts.append(f"# {slots} of the {spec.size} members have a slot here (--slots); other hosts start the others")
    for start in starts if slots is None else starts[:slots]:
        added = {k: v for k, v in start.env.items() if os.environ.get(k) != v}
        words = [f"{k}={shlex.quote(v)}" for k, v in added.items()]
        parts.append(f"# rank {start.rank}\n{' '.join(words)} {shlex.join(start.command)}")
    return parts


def settings(spec: JobSpec) -> str:
    words = [f"{name}={getattr(spec.settings, name)!r}" for name in NAMES]
    return "# settings, told to each when it joins: " + ", ".join(words)
