"""Start processes: what to start (`JobSpec`), and the launchers that do it. Imports no torch."""

from __future__ import annotations

from paceline.launch.local import Local
from paceline.launch.spec import Job, JobSpec, Launcher

__all__ = ["Job", "JobSpec", "Launcher", "Local"]
