"""Takes versions from a source, judges them, puts them on the shelf, and follows orders. In the parent.

    source → merge what changed → does it fit? → is it good on the holdout? → shelf → served, unless it was ordered
    otherwise

Orders: `pin` serves one version whatever comes, `pause` takes nothing more, `roll_back` goes to the one before and
stays there until `resume`; a version that was rolled back is served again only where it is pinned. They are kept on the
shelf, so that another start with the same directory goes on with them; `kept` keeps them where the shelf is not.

A source that is lost is asked again, ever less often up to a limit, for ever; what is served stays, and `state` says
so. Only one thread works here, and it has a lower priority than those that answer requests.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable

import msgspec
from msgspec.structs import replace
from torch import Tensor, nn

from paceline.core.errors import ConfigError, PacelineError
from paceline.serve.holdout import Holdout
from paceline.serve.kept import Kept
from paceline.serve.merged import Merged
from paceline.serve.places import Unfit
from paceline.serve.shelf import Orders, Shelf, Version
from paceline.serve.sources.source import Source, Update

_WAIT_S = 1.0  # of one question to the source
_SOON_S, _LATER_S = 0.1, 2.0  # between questions to a source that is lost, first and at last
_NICE = 10


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """How versions are taken. `every_s`: at most one in so many seconds."""

    every_s: float = 0.0


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """A version that was not taken. Where the holdout spoke against it, `metric` and the one that it had to reach.

    `number`: of one that an earlier server had left.
    """

    at: float
    source_version: int | None
    reason: str
    metric: float | None = None
    best: float | None = None
    number: int | None = None


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """A version on the holdout; `number` where it was taken."""

    at: float
    source_version: int
    metric: float
    number: int | None = None


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """How versions stand."""

    versions: list[Version]
    current: int  # the version that is served; 0: none yet
    pinned: int | None
    paused: bool
    source: str  # in words
    lost: bool  # whether the source cannot be reached
    note: str  # about where tensors come from
    refusals: list[Refusal]  # the last ones
    metrics: list[Measured]


class Keeper:
    """See the module. `model` is the parent's own copy, which nobody else uses."""

    def __init__(
        self,
        shelf: Shelf,
        source: Source,
        rules: Rules | None = None,
        *,
        model: nn.Module,
        holdout: Holdout | None = None,
        kept: Kept | None = None,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._shelf, self._source, self._rules = shelf, source, rules or Rules()
        self._holdout, self._kept, self._say = holdout, kept, say
        self._merged = Merged(model)
        self._model = model
        self._changed = threading.Condition(threading.RLock())  # guards orders and what is told
        self._closing = False
        self._candidate: tuple[int, float] | None = None  # version and time of what is merged and not judged yet
        self._lost_since = 0.0
        self._why = ""
        self._awaits = ""  # what of the model is still to come
        self._pause_s = _SOON_S
        self._seen: tuple[int, float] | None = None  # the newest version of the source
        self._refusals: deque[Refusal] = deque(maxlen=20)
        self._metrics: deque[Measured] = deque(maxlen=1000)
        self._best: float | None = None
        self._base: int | None = None  # the version that was put last, of this process
        self._thread = threading.Thread(target=self._run, name="paceline-keeper", daemon=True)

    def start(self) -> None:
        """Go on with what is kept or on the shelf, and begin to follow."""
        with self._changed:
            if self._kept and (why := self._kept.load(self._shelf)):
                self._say(why)
            self._recover()
        self._thread.start()

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(30.0)
        if self._kept:
            self._kept.close()
        self._source.close()

    def wait(self, limit_s: float) -> bool:
        """Whether there is a version to serve within so long."""
        with self._changed:
            return self._changed.wait_for(lambda: self._shelf.current() > 0 or self._closing, limit_s)

    def state(self) -> Standing:
        with self._changed:
            orders = self._shelf.orders()
            return Standing(
                versions=self._shelf.versions(),
                current=orders.serving,
                pinned=orders.pinned,
                paused=orders.paused,
                source=self._health(orders.serving),
                lost=self._lost_since > 0,
                note="; ".join(
                    filter(None, (self._source.note, self._merged.note, self._kept.note if self._kept else ""))
                ),
                refusals=list(self._refusals),
                metrics=list(self._metrics),
            )

    # ---- orders; from any thread

    def pin(self, number: int) -> None:
        """Serve this version, whatever comes."""
        with self._changed:
            if number not in (numbers := [version.number for version in self._shelf.versions()]):
                there = f"there are {', '.join(map(str, numbers))}" if numbers else "there is none yet"
                raise ConfigError(f"version {number} cannot be pinned, since it is not on the shelf: {there}")
            self._shelf.order(replace(self._shelf.orders(), serving=number, pinned=number))
            self._changed.notify_all()
        self._keep()

    def unpin(self) -> None:
        """Follow again: serve the newest version, unless it is paused."""
        with self._changed:
            self._shelf.order(replace(self._shelf.orders(), pinned=None))
            self._serve_newest()
        self._keep()

    def pause(self) -> None:
        """Take no more versions; what is served stays."""
        with self._changed:
            self._shelf.order(replace(self._shelf.orders(), paused=True))
            self._changed.notify_all()
        self._keep()

    def resume(self) -> None:
        """Take versions again."""
        with self._changed:
            self._shelf.order(replace(self._shelf.orders(), paused=False))
            self._serve_newest()
        self._keep()

    def roll_back(self) -> None:
        """Serve the version before the one that is served, and stay there until `resume`."""
        with self._changed:
            orders = self._shelf.orders()
            if orders.pinned is not None:
                raise ConfigError(f"version {orders.pinned} is pinned: unpin before you roll back")
            older = [version for version in self._shelf.versions() if version.number < orders.serving]
            before = [version for version in older if version.number not in orders.withdrawn]
            if not before:
                but = " but those that were rolled back: pin one of them" if older else ""
                raise ConfigError(f"there is no version before {orders.serving} on the shelf{but}")
            to = before[-1]
            here = {version.number for version in self._shelf.versions()}
            withdrawn = (*(number for number in orders.withdrawn if number in here), orders.serving)
            self._shelf.order(replace(orders, serving=to.number, paused=True, withdrawn=withdrawn))
            self._best = _finite(to.metric)
            self._changed.notify_all()
        self._keep()

    def _keep(self) -> None:
        """For the next start; it may take a while, and the order counts already."""
        if self._kept:
            self._kept.keep(self._shelf)

    # ---- with the lock held

    def _serve_newest(self) -> None:
        orders = self._shelf.orders()
        good = [version for version in self._shelf.versions() if version.number not in orders.withdrawn]
        if good and orders.pinned is None and not orders.paused:
            self._shelf.serve(good[-1].number)
            self._count(good[-1].metric)
        self._changed.notify_all()

    def _count(self, metric: float | None) -> None:
        """A version with this metric is served."""
        metric = _finite(metric)
        if metric is not None and self._holdout:
            self._best = metric if self._best is None else self._holdout.better(self._best, metric)

    def _recover(self) -> None:
        """What an earlier process left: versions that cannot be read, or are of another model, are none."""
        self._shelf.prune()
        before = orders = self._shelf.orders()
        for version in reversed(self._shelf.versions()):
            try:
                found = Merged(self._model)
                found.take(Update(version.number, version.made_at, self._shelf.read(version.number), whole=True))
                if found.misfit:
                    raise Unfit(found.misfit)
            except Unfit as error:
                self._refuse(str(error), version.source_version, number=version.number)
                self._shelf.remove(version.number)
        left = {version.number: version for version in self._shelf.versions()}
        if orders.pinned not in left:
            orders = replace(orders, pinned=None)
        if orders.serving not in left:
            good = [number for number in left if number not in orders.withdrawn] or list(left)
            orders = replace(orders, serving=max(good, default=0))
            if before.serving and not left:
                orders = replace(orders, paused=False)  # it would never serve anything
        self._shelf.order(orders)
        for version in left.values():
            if version.number <= orders.serving:
                self._count(version.metric)
        self._tell_orders(before, orders)

    def _tell_orders(self, before: Orders, now: Orders) -> None:
        """Which orders of an earlier process count, and which cannot."""
        was = "was pinned" if before.pinned is not None else "was served in a pause" if before.paused else ""
        if was and before.serving != now.serving:
            goes_on = f"version {now.serving} is served" if now.serving else f"{self._source.what} is followed"
            self._say(f"version {before.serving}, which {was} before this start, cannot be served: {goes_on}")
        elif was:
            until = "unpinned" if before.pinned is not None else "resumed"
            what = f"version {now.serving}, which {was} before this start," if now.serving else "nothing"
            self._say(f"serves {what} until it is {until}")

    def _refuse(
        self,
        reason: str,
        version: int | None,
        metric: float | None = None,
        best: float | None = None,
        number: int | None = None,
    ) -> None:
        at = time.time()
        refusal = Refusal(at=at, source_version=version, reason=reason, metric=metric, best=best, number=number)
        self._refusals.append(refusal)
        self._say(f"{'' if version is None else f'version {version} of {self._source.what} '}is refused: {reason}")

    def _health(self, serving: int) -> str:
        what, now = self._source.what, time.time()
        goes_on = f"serving goes on with version {serving}" if serving else "there is nothing to serve yet"
        if self._lost_since and not serving:
            return f"{what} cannot be reached ({self._why}): {goes_on}"
        if self._lost_since:
            since = time.strftime("%H:%M:%S", time.localtime(self._lost_since))
            return f"{what} is gone since {since} ({self._why}): {goes_on}"
        if self._source.ended:
            return f"{what} is over ({self._source.ended}): {goes_on}"
        if not serving and self._shelf.orders().paused:
            return f"{what} is not asked, since it was paused before there was a version: resume it"
        if self._seen is None:
            return f"waits for {what}" + (f": {self._source.note}" if self._source.note else "")
        awaits = f"; {self._awaits}" if self._awaits else ""
        return f"follows {what}, version {self._seen[0]}, {now - self._seen[1]:.1f} s ago{awaits}"

    # ---- in a thread of its own

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        due = 0.0
        while not self._closing:
            with self._changed:
                if self._shelf.orders().paused:
                    self._changed.wait(_WAIT_S)
                    continue
                if (early := due - time.monotonic()) > 0:
                    self._changed.wait(min(early, _WAIT_S))
                    continue
            try:
                if self._candidate is None:
                    self._ask()
                if self._candidate is not None and self._judge(*self._candidate):
                    due = time.monotonic() + self._rules.every_s
            except Exception as error:  # the user's holdout, or a fault of ours: what is served stays
                traceback.print_exc()
                with self._changed:
                    version = self._candidate[0] if self._candidate else None
                    self._candidate = None
                    self._refuse(f"{type(error).__name__}: {error}", version)
                    self._changed.wait(_LATER_S)

    def _ask(self) -> None:
        """The source for what is new, which is merged."""
        try:
            update = self._source.newest(_WAIT_S)
        except Unfit as error:
            with self._changed:
                self._refuse(str(error), None)
            return
        except (PacelineError, OSError) as error:
            with self._changed:
                if not self._lost_since:
                    self._lost_since = time.time()
                    serving = self._shelf.current()
                    how, goes_on = ("is gone", ", and serving goes on") if serving else ("cannot be reached", "")
                    self._say(f"{self._source.what} {how} ({error}): it is looked for{goes_on}")
                self._why = str(error)
                self._changed.wait(self._pause_s)
                self._pause_s = min(2 * self._pause_s, _LATER_S)
            return
        with self._changed:
            if self._lost_since:
                self._say(f"{self._source.what} is there again")
            self._lost_since, self._why, self._pause_s = 0.0, "", _SOON_S
            if update:
                self._seen = update.version, update.made_at
        if update and update.tensors:  # else all is as it was
            self._merged.take(update)
            self._candidate = update.version, update.made_at

    def _judge(self, version: int, made_at: float) -> bool:
        """Whether what is merged was taken; it is not judged again, unless a pause came between."""
        if reason := self._merged.misfit:
            return self._turn_down(reason, version)
        if self._has_to_wait():
            return False
        metric = best = None
        if self._holdout:
            best = self._best_served()
            metric = self._measure(self._merged.tensors)
            if best is not None and not self._holdout.is_good(metric, best):
                with self._changed:
                    self._metrics.append(Measured(at=time.time(), source_version=version, metric=metric))
                words = f"{self._holdout.name} {metric:.6g} on the holdout, after {best:.6g}"
                return self._turn_down(words, version, metric, best)
        with self._changed:
            orders = self._shelf.orders()
            if orders.paused or self._closing:
                return False  # it stays a candidate
            numbers = [v.number for v in self._shelf.versions()]
        number = 1 + max([*numbers, orders.serving, *orders.withdrawn])
        base = self._base if self._base in numbers else None
        new = self._merged.tensors if base is None else self._merged.fresh()
        if self._base is None and self._merged.note:
            self._say(self._merged.note)
        self._shelf.put(Version(number=number, source_version=version, made_at=made_at, metric=metric), new, base)
        self._merged.put()
        self._base, self._candidate = number, None
        with self._changed:
            if metric is not None:
                self._metrics.append(Measured(at=time.time(), source_version=version, metric=metric, number=number))
            self._serve_newest()
            self._shelf.prune()
        return True

    def _has_to_wait(self) -> bool:
        """Whether something of the model is still to come. It is no refusal: what is merged stays, and is added to."""
        with self._changed:
            awaits, before = self._merged.awaits, self._awaits
            self._awaits = awaits
            if awaits:
                self._candidate = None
        if awaits and not before:
            self._say(f"{self._source.what}: {awaits}")
        return bool(awaits)

    def _turn_down(self, reason: str, version: int, metric: float | None = None, best: float | None = None) -> bool:
        with self._changed:
            self._candidate = None
            self._refuse(reason, version, metric, best)
        return False

    def _best_served(self) -> float | None:
        """What a version must reach; one that was served before there was a holdout is measured now."""
        serving = self._shelf.current()
        if self._best is None and serving:
            metric = _finite(self._measure(self._shelf.read(serving)))
            with self._changed:
                self._best = metric
        return self._best

    def _measure(self, tensors: dict[str, Tensor]) -> float:
        assert self._holdout
        self._merged.fill(tensors)
        return self._holdout.measure(self._model)


def _finite(metric: float | None) -> float | None:
    """None where it is nan or infinite: such a version is no measure for others, or nothing would ever reach it."""
    return metric if metric is not None and math.isfinite(metric) else None
