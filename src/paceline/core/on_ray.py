"""Names by which the parts of a run on Ray find each other: its launcher makes them, its members look them up."""

from __future__ import annotations

NAMESPACE = "PACELINE_RAY"  # the environment variable that has the namespace of the run's actors
SCHEDULER = "paceline-scheduler"  # the actor that lives as long as the run
HOLDER = "paceline-data"  # the one that holds datasets; see `data.rows`
