"""`paceline.connect(...)`: a run as seen from outside.

    run = paceline.connect("digits")                 # a run in ./runs, on this host
    weights = run.weights()                          # names and tensors, with a version
    for update in run.follow(): ...                  # what changes, version by version
    for progress in run.watch(): ...                 # until the run ends
    run.upload(samples)                              # into the queue that run.uploads() in the script reads

One connection to each desk (`desk`), made when it is needed and made again where it was lost. Nothing here runs in the
background, and every wait has a limit.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch

from paceline.core import status
from paceline.core.errors import AuthError, ConfigError, Interrupted, PacelineError, TimedOut, nearest
from paceline.server.outside import visits as v
from paceline.server.outside.bodies import Bodies, Weights, weights_of
from paceline.server.outside.desk import read_note
from paceline.server.outside.desks import Desks, Pinning
from paceline.server.outside.follower import Follower
from paceline.server.outside.line import Line, expect
from paceline.server.outside.samples import pack
from paceline.server.outside.visits import Progress

_PATIENCE_S = 3.0  # after which one who uploads is told that nobody has asked for samples
_BUNDLE, _BUNDLE_BYTES = 256, 1 << 20  # samples that travel together


def connect(where: str, *, token: str = "", limit_s: float = 30.0) -> Outsider:
    """Look into a run from outside: read its weights, watch it, upload samples.

    Args:
        where: the name of a run in ./runs or a run's directory, on this host; or with `token` the address "host:port"
            of its first desk, which its desk.json has.
        limit_s: bounds each wait, but for the wait of `watch` for news and of `upload` for room.
    """
    if re.search(r":\d+$", where) and not Path(where).exists():
        if not token:
            raise ConfigError(
                f'connect("{where}"): an address needs token=, which the run\'s desk.json has; on the same host give '
                "the run's name or directory instead"
            )
        return _outsider(where, token, limit_s)
    directory = _directory(where)
    note = read_note(directory)
    if note is None:
        raise ConfigError(_why_no_desk(directory))
    try:
        return (
            _outsider(note.addresses[0], token, limit_s) if token else Outsider(note.addresses[0], note.token, limit_s)
        )
    except (Interrupted, AuthError) as error:  # its desk would have taken the note away: another may listen there now
        if token or not _is_over(directory, error):
            raise
        raise Interrupted(f"run {directory.name!r} is over: it was killed ({error})") from None


def _outsider(address: str, token: str, limit_s: float) -> Outsider:
    """With a token that someone typed."""
    try:
        return Outsider(address, token, limit_s)
    except AuthError as error:
        if "same token" not in str(error):
            raise
        raise AuthError(
            f"token= is not that of the run at {address}: take the one in its desk.json, in the run's directory; "
            "on the same host leave token= out, and give the run's name"
        ) from None


class Stopped(TimedOut):
    """The run took `taken` samples of an upload, and then no more; `asked`: whether its script has asked for any."""

    def __init__(self, text: str, taken: int, asked: bool) -> None:
        super().__init__(text)
        self.taken, self.asked = taken, asked


class Outsider:
    """One who looks into a run. A context manager; `close` leaves."""

    def __init__(self, address: str, token: str, limit_s: float) -> None:
        self.limit_s = limit_s
        self._token = token
        self._desks = Desks([address], token, limit_s)
        self._welcome = self._desks.welcome
        self._asking = threading.Lock()

    @property
    def name(self) -> str:
        """The run's."""
        return self._welcome.name

    @property
    def strategy(self) -> str:
        """The run's, in words."""
        return self._welcome.strategy

    @property
    def servers(self) -> bool:
        """Whether any hold the weights."""
        return self._welcome.servers

    # ---- weights

    def versions(self) -> tuple[int, ...]:
        """The version of each server that holds weights."""
        self._check_servers()
        with self._asking:
            return tuple(s.version for s in self._desks.standings() if s.serves)

    def weights(self, *, newer_than: int = -1) -> Weights | None:
        """The parameters as the servers hold them now; None where their version is not higher than `newer_than`.

        In sync they are of one version. Buffers, such as those of batch norm, and parameters that no optimizer has are
        not with the servers.
        """
        self._check_servers()
        with self._asking:
            found = self._desks.pin(newer_than)
            return self._read(found) if found else None

    def _check_servers(self) -> None:
        if not self._welcome.servers:
            raise ConfigError(
                f"run {self.name!r} is trained by {self.strategy}, where no server holds the weights: read a "
                "checkpoint instead, or train with --strategy sync, bounded or async. Watching and uploading work"
            )

    def _read(self, found: Pinning) -> Weights:
        bodies = Bodies()
        for line in found.lines:
            line.say(v.Read())
        for line, answer in zip(found.lines, found.pinned):
            for part in answer.parts:
                body = torch.empty(part.nbytes, dtype=torch.uint8)
                self._desks.fill(line, body)
                bodies.put(part, body)
        return weights_of(bodies.tensors(), found.pinned)

    def follow(self, *, codec: str = "", held: Bodies | None = None) -> Follower:
        """Follow the weights from version to version: only what has changed travels.

        Args:
            codec: say changes in fewer bytes, such as "quantize(8)"; what one version leaves unsaid is in the next.
            held: what an earlier follower has, which need not travel again.
        """
        self._check_servers()
        return Follower(Desks(self._desks.addresses, self._token, self.limit_s), codec=codec, held=held)

    # ---- watching

    def watch(self, every_s: float = 1.0) -> Iterator[Progress]:
        """How the run is getting on, at once and then about every `every_s` seconds; ends when the run does."""
        line = Line(self._desks.lines[0].address, self._token, self.limit_s)
        progress, wait_s = Progress(state="gone"), 0.0
        with contextlib.closing(line):
            while True:
                try:
                    line.say(v.Watch(wait_s))
                    progress = expect(line.hear(), Progress)
                except Interrupted:
                    progress = msgspec.structs.replace(progress, state="gone")
                yield progress
                if progress.state != "running":
                    return
                wait_s = min(max(every_s, 0.0), 10.0)

    # ---- samples

    def upload(self, samples: Iterable[Any], *, wait_s: float = 60.0) -> int:
        """Put samples into the run's input queue, from which `run.uploads()` in its script reads; how many.

        A sample is made of tensors, numbers and words, in tuples, lists and dicts. Where the queue is full this waits,
        for at most `wait_s` without a single sample being taken; TimedOut then says how many were.
        """
        count = 0
        with self._asking:
            for some in _bundles(pack(sample) for sample in samples):
                count = self._put(some, count, wait_s)
        return count

    def finish_uploads(self) -> None:
        """No more samples will come, from nobody: what waits is trained, then `run.uploads()` ends."""
        with self._asking:
            self._samples_said(v.Finish(), 0)

    def _put(self, samples: list[bytes], before: int, wait_s: float) -> int:
        began = time.monotonic()
        deadline, warned = began + wait_s, False
        while samples:
            taken = self._samples_said(v.Upload(samples), before)
            if not taken.asked and not warned and time.monotonic() - began >= _PATIENCE_S:
                warned = True
                warnings.warn(f"upload() to run {self.name!r} waits: {taken.why}", stacklevel=3)
            if taken.count:
                deadline = time.monotonic() + wait_s
            before += taken.count
            samples = samples[taken.count :]
            if samples and time.monotonic() > deadline:
                raise Stopped(
                    f"run {self.name!r} took no more samples for {wait_s:g} s, after {before} of this upload: "
                    f"{taken.why}",
                    before,
                    taken.asked,
                )
        return before

    def _samples_said(self, message: v.Upload | v.Finish, before: int) -> v.Taken:
        line = self._desks.lines[0]
        try:
            line.say(message)
            return expect(line.hear(), v.Taken)
        except ConfigError as error:  # the desk has hung up
            line.close()
            raise ConfigError(f"{error} ({before} samples of this upload were taken before)") from None
        except Interrupted as error:
            line.close()
            raise Interrupted(
                f"{self._desks.lost(error)}; at least {before} samples of this upload were taken"
            ) from None

    # ---- inside

    def close(self) -> None:
        self._desks.close()

    def __enter__(self) -> Outsider:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _bundles(samples: Iterable[bytes]) -> Iterator[list[bytes]]:
    """Samples in messages of moderate size."""
    bundle: list[bytes] = []
    size = 0
    for sample in samples:
        if len(sample) > v.MAX_VISIT_BYTES - 64:
            raise ConfigError(f"a sample of {len(sample)} bytes is longer than {v.MAX_VISIT_BYTES - 64}: cut it")
        if bundle and (size + len(sample) > _BUNDLE_BYTES or len(bundle) == _BUNDLE):
            yield bundle
            bundle, size = [], 0
        bundle.append(sample)
        size += len(sample)
    if bundle:
        yield bundle


def _directory(where: str) -> Path:
    for directory in (Path(where), Path("runs") / where):
        if directory.is_dir():
            return directory
    names = sorted(path.parent.name for path in Path("runs").glob("*/status"))
    known = nearest(where, names) if names else "there are no runs in ./runs"
    raise ConfigError(f'connect("{where}"): no such run here: {known}; from elsewhere give "host:port" and token=')


def _why_no_desk(directory: Path) -> str:
    said = status.read(directory / "status" / "rank-0", 0)
    if said and (said.what in ("finished", "left early") or said.what.startswith("failed")):
        return f"run {directory.name!r} is over ({said.what}): its checkpoints have the weights"
    return (
        f"run {directory.name!r} has no desk: it has only begun, or it is a run of one process, which has none; start "
        "it with paceline run -n 2 or more, or wait until its members have met"
    )


def _is_over(directory: Path, error: PacelineError) -> bool:
    return isinstance(error, AuthError) or "nobody listens" in str(error)
