"""The report of one step on one member, from which progress, metrics and the end summary are made."""

from __future__ import annotations

import msgspec


class StepReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one step cost. The three times add up to the time since the step before."""

    step: int
    samples: float = 0.0  # this member's
    data_s: float = 0.0  # waiting for the loader
    compute_s: float = 0.0  # everything else
    wait_s: float = 0.0  # waiting for other members
    sent_bytes: int = 0
    applied: bool = True  # False: the step was dropped on everyone
