"""How soon is a push that a shard has applied answered with? A run with a server, `paceline serve` that follows it.

    worker --push--> shard: version v is applied --follows--> paceline serve --HTTP--> an answer with v, or a later one

Two of us look on, both here and by this host's clock (time.time()). An outsider (`paceline.connect`) asks the shard for
its version, over and over. One who asks /predict over one open connection notes when the first answer of each served
version has come, whole, and then asks /versions which of the shard's versions that is.

`freshness_s`, for every version v that the shard had, also those that serving left out: from the last moment at which
the outsider asked and v was not there yet, so from before its apply, to the first answer that names v or a later one.
It is too long by up to one look (`LOOK_S` and a round trip), never too short. `freshness_taken_s`, for those versions
that were served: from the shard's own time stamp, written with its lock held when v was applied, to the first answer.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from bench._serve_sides import Side, headers_of
from bench.harness import Figure, Report, middle, short

LOOK_S = 0.005
_NAME = "fresh"
_LIMIT_S = 180.0
_ROOT = Path(__file__).resolve().parents[1]


@dataclass
class _Seen:
    """What the two have noted; times are time.time()."""

    before: dict[int, float] = field(default_factory=dict)  # shard's version -> the last look without it
    first: dict[int, float] = field(default_factory=dict)  # served version -> its first answer
    source: dict[int, int] = field(default_factory=dict)  # served version -> the shard's
    made_at: dict[int, float] = field(default_factory=dict)  # served version -> the shard's time stamp


def follow_a_run(report: Report, directory: Path, versions: int) -> None:
    """Adds the figures, over at least so many versions that were served."""
    with _training(directory) as training:
        words = ["-m", "paceline", "serve", _NAME, "--root", str(directory / "runs"), "--port", "PORT"]
        words += ["--model", "bench/_serve_model.py:make"]
        side = Side("follows", [sys.executable, *words], "json")
        try:
            side.start(directory)
            seen = _look_on(side, directory / "runs" / _NAME, training, versions)
        finally:
            side.stop()
    every, taken = _every(seen), [at - seen.made_at[n] for n, at in seen.first.items() if n in seen.made_at]
    report.add(_figure("freshness_s", every, "applied", "<= 1"))
    report.add(_figure("freshness_taken_s", taken, "served", ""))
    report.extra["freshness_worst_s"] = max(every)


def _every(seen: _Seen) -> list[float]:
    """Seconds from each of the shard's versions to the first answer that is as new."""
    answers = sorted((at, seen.source[n]) for n, at in seen.first.items() if n in seen.source)
    found = []
    for version, before in seen.before.items():
        at = next((at for at, source in answers if source >= version), None)
        if at is not None:  # else it came at the very end
            found.append(at - before)
    return found


def _figure(name: str, seconds: list[float], of: str, goal: str) -> Figure:
    low, high = middle(seconds)
    return Figure(
        name=name,
        value=statistics.median(seconds),
        ours=f"{len(seconds)} {of}, at most {short(max(seconds))} s",
        spread=f"{short(low)} .. {short(high)}",
        goal=goal,
    )


@contextlib.contextmanager
def _training(directory: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A run of two workers and a server, whose desk is open."""
    words = ["run", "-n", "2", "--strategy", "async", "--servers", "1", "--name", _NAME]
    words += ["--root", str(directory / "runs"), "-m", "bench._serve_train", str(directory)]
    log = directory / "training.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "paceline", *words], cwd=_ROOT, stdout=out, stderr=out, start_new_session=True
        )
    try:
        deadline = time.monotonic() + _LIMIT_S
        while not (directory / "runs" / _NAME / "desk.json").exists():
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the run that is to be followed does not begin: {log.read_text()[-2000:]}")
            time.sleep(0.1)
        yield process
    finally:
        (directory / "stop").touch()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _look_on(side: Side, run: Path, training: subprocess.Popen[bytes], versions: int) -> _Seen:
    seen, over = _Seen(), threading.Event()
    outsider = threading.Thread(target=_watch, args=(run, seen, over), daemon=True)
    outsider.start()
    connection = http.client.HTTPConnection("127.0.0.1", side.port, timeout=30)
    headers = headers_of("json", side.body)
    deadline = time.monotonic() + _LIMIT_S
    started = False
    while len(seen.first) < versions:
        if training.poll() is not None or not outsider.is_alive() or time.monotonic() > deadline:
            raise RuntimeError(f"{len(seen.first)} of {versions} versions have come: the run ended, or is too slow")
        connection.request("POST", "/predict", side.body, headers)
        answer = connection.getresponse()
        number = json.loads(answer.read())["version"]
        at = time.time()
        if number not in seen.first:
            if started:  # the first one was there before
                seen.first[number] = at
            started = True
            connection.request("GET", "/versions")
            for version in json.loads(connection.getresponse().read())["versions"]:
                seen.source[version["number"]] = version["source_version"]
                seen.made_at[version["number"]] = version["made_at"]
    over.set()
    outsider.join()
    connection.close()
    return seen


def _watch(run: Path, seen: _Seen, over: threading.Event) -> None:
    import paceline

    with paceline.connect(str(run)) as outsider:
        last, asked = -1, 0.0
        while not over.wait(LOOK_S):
            now = time.time()
            version = min(outsider.versions())
            if last >= 0:
                seen.before |= dict.fromkeys(range(last + 1, version + 1), asked)
            last, asked = version, now
