"""kubectl: how a run in pods stands, what it prints, and commands inside it. What it refuses is told in its words."""

from __future__ import annotations

import re
import shlex
import subprocess
from typing import NamedTuple

from paceline.core.errors import ConfigError
from paceline.launch.held import Held
from paceline.launch.interruptible import interruptible

_LIMIT_S = 60.0
_LOGS_S = 600.0  # for all that was printed
_MOST_PODS = 1000  # that are followed; kubectl's own limit is 5
_SEEN = "jsonpath={.metadata.name}{range .status.conditions[?(@.status=='True')]} {.type}{end}"
_MISSING = "there is no kubectl here: https://kubernetes.io/docs/tasks/tools"
_LOGGED = re.compile(r"[EIWF]\d{4} \d\d:\d\d:\d\d\.")  # as in E1118 23:04:01.009214   26376 memcache.go:265]
_ENDED = {"Completed": "completed", "Complete": "completed", "Failed": "failed"}


class Job(NamedTuple):
    """A JobSet or a TrainJob, as `Held.id` writes it."""

    kind: str  # with its group, as in jobset.jobset.x-k8s.io
    namespace: str  # "": kubectl's own
    name: str

    @classmethod
    def of(cls, held: Held) -> Job:
        return cls(*held.id.split("/"))

    @property
    def place(self) -> list[str]:
        return ["-n", self.namespace] if self.namespace else []

    @property
    def label(self) -> str:
        """What selects its pods: a TrainJob makes a JobSet of its name."""
        return f"jobset.sigs.k8s.io/jobset-name={self.name}"

    def __str__(self) -> str:
        return f"{self.kind.partition('.')[0]} {self.name}"


def state(job: Job) -> str:
    """In a word: running, starting, suspended, completed, failed; "": there is none."""
    name, *conditions = call("get", job.kind, job.name, *job.place, "--ignore-not-found", "-o", _SEEN).split() or [""]
    if not name:
        return ""
    for condition, word in {**_ENDED, "Suspended": "suspended", "StartupPolicyCompleted": "running"}.items():
        if condition in conditions:
            return word
    return "starting" if "StartupPolicyInProgress" in conditions else "not finished"


def over(state: str) -> bool:
    """Whether it is gone or has ended."""
    return not state or state in _ENDED.values()


def logs(job: Job, *, follow: bool, lines: int | None) -> int:
    """Print what its pods have printed, and with `follow` what they print; the exit code."""
    words = ["kubectl", "logs", "-l", job.label, *job.place, "--prefix", "--tail", str(-1 if lines is None else lines)]
    words += ["-f", "--max-log-requests", str(_MOST_PODS)] if follow else []
    try:
        return subprocess.run(words, timeout=None if follow else _LOGS_S).returncode
    except FileNotFoundError:
        raise ConfigError(_MISSING) from None
    except subprocess.TimeoutExpired:
        raise ConfigError(f"kubectl logs did not end within {_LOGS_S:g} s: give --lines, or --follow") from None


def inside(job: Job, first: str, *words: str) -> list[str]:
    """What runs `paceline` with these words in a pod of the run's; `first` is the Job of the first pod."""
    return ["exec", *job.place, f"job/{job.name}-{first}-0", "--", "python", "-m", "paceline", *words]


def _reason(said: str) -> str:
    """Without the lines of its log, which say the same several times, unless there is nothing else."""
    lines = [line for line in said.splitlines() if not _LOGGED.match(line)]
    return "\n".join(lines).strip() or said.strip()


def call(*words: str, text: str = "") -> str:
    """What it prints; `text` is its input."""
    try:
        with interruptible():
            done = subprocess.run(["kubectl", *words], input=text, capture_output=True, text=True, timeout=_LIMIT_S)
    except FileNotFoundError:
        raise ConfigError(_MISSING) from None
    except subprocess.TimeoutExpired:
        raise ConfigError(f"kubectl {words[0]} did not end within {_LIMIT_S:g} s: is the cluster reached?") from None
    if done.returncode:
        raise ConfigError(f"kubectl {words[0]} failed: {_reason(done.stderr) or shlex.join(words)}")
    return done.stdout
