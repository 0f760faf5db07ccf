"""A run as a source: its servers where it has some, else its checkpoints.

    it has servers   versions as they are applied, followed through its desks; what the servers do not have (buffers,
                     parameters that no optimizer has) comes from its newest checkpoint; until there is one, buffers
                     stay as the model is made, and parameters are waited for
    it has none      its checkpoints, as they appear
    it is over       its last checkpoint, if that is newer than what came before

Where the run is lost, `newest` raises; when it is started again, in the same directory and with whatever address and
token, it is followed again.
"""

from __future__ import annotations

import re
from pathlib import Path

from torch import Tensor

from paceline.core import status
from paceline.core.errors import ConfigError, Interrupted, PacelineError
from paceline.environment.place import this_host
from paceline.serve.places import Unfit
from paceline.serve.sources.checkpoints import Checkpoints, wait_for
from paceline.serve.sources.source import Update, changed
from paceline.server.outside.bodies import Bodies
from paceline.server.outside.desk import Note, read_note
from paceline.server.outside.follower import Follower
from paceline.server.outside.outsider import Outsider, connect

_LIMIT_S = 3.0  # of waits for a run that is there
_AWAITS = "waits for its first checkpoint"


class RunSource:
    """The run in `directory`; or at the address of its first desk, with its token, where only servers can be followed.

    Args:
        model: the number of the model among the run's.
        codec: in which the servers' changes travel; "": as they are.
    """

    def __init__(self, where: Path | str, *, token: str = "", model: int = 0, codec: str = "") -> None:
        self._directory = where if isinstance(where, Path) else None
        self._where, self._token, self._codec = str(where), token, codec
        self._checkpoints = Checkpoints(self._directory / "checkpoints", model) if self._directory else None
        self._outsider: Outsider | None = None
        self._follower: Follower | None = None
        self._held: Bodies | None = None  # what need not travel again after a cut
        self._version = 0  # of the servers, that was given last
        self._served: set[str] | None = None  # names that servers have; None: nothing of this start was given yet
        self._names: set[str] = set()  # of the model, where a checkpoint told
        self._rest: dict[str, Tensor] = {}  # of the newest checkpoint, what servers do not have
        self._saved = ""  # its name
        self._serverless: Note | None = None  # of a start whose servers do not exist
        self._exact = ""  # why no codec is used, where one was asked for
        self._made_at = 0.0  # of what was given last
        self._from_file: dict[str, Tensor] | None = None  # given, from a checkpoint
        name = self._directory.name if self._directory else f"at {where}"
        self.what = f"run {name}"
        self.orders = self._directory / "serving" if self._directory else None
        self.ended = ""

    @property
    def note(self) -> str:
        if self._served is None:
            alone = self._checkpoints is not None and self._follower is None and self._from_file is None
            return "it has no servers and no checkpoint yet" if alone else ""
        told = [f"the codec is not used: {self._exact}"] if self._exact else []
        if self._rest:
            told.append(f"{len(self._rest)} tensors that servers do not have come from {self._saved}")
        elif not self._names:
            what = "buffers that servers do not have" if self._checkpoints else "tensors that servers do not have"
            told.append(f"{what} are as the model was made")
        return "; ".join(told)

    def newest(self, wait_s: float) -> Update | None:
        if self._follower is None:
            lost: PacelineError | None = None
            try:
                self._connect()
            except PacelineError as error:
                lost = error
            if self._follower is None:
                return self._from_checkpoints(wait_s, lost)
        try:
            update = self._follower.next(wait_s)
        except ConfigError as error:
            if not self._codec or self._exact:
                raise
            self._leave()
            self._exact = str(error)  # others follow with a codec already: exactly, then
            return None
        except PacelineError:
            self._leave()
            raise
        if update:
            return self._from_servers(update.version, update.made_at, update.tensors, update.whole)
        return self._first_saved()

    def close(self) -> None:
        self._leave()

    def connect(self) -> Outsider:
        """To the run, for whoever has more to say to it."""
        return connect(self._where, token=self._token, limit_s=_LIMIT_S)

    # ---- servers

    def _connect(self) -> None:
        """To the servers, if there are any. Raises where there should be some and cannot be reached."""
        if self._directory is None:
            outsider = connect(self._where, token=self._token, limit_s=_LIMIT_S)
        else:
            note = read_note(self._directory)
            if note is None or note == self._serverless:
                return
            outsider = connect(str(self._directory), limit_s=_LIMIT_S)
            if not outsider.servers:
                outsider.close()
                self._serverless = note
                return
        try:
            self._follower = outsider.follow(codec="" if self._exact else self._codec, held=self._held)
        except BaseException:
            outsider.close()
            raise
        self._outsider, self._served, self.ended = outsider, None, ""

    def _leave(self) -> None:
        if self._follower:
            self._held = self._follower.held
            self._follower.close()
        if self._outsider:
            self._outsider.close()
        self._follower = self._outsider = None
        if self._checkpoints:
            self._checkpoints.again()  # the last one may be newer than what servers had last

    def _from_servers(self, version: int, made_at: float, tensors: dict[str, Tensor], whole: bool) -> Update:
        first = self._served is None
        self._served = (self._served or set()) | tensors.keys()
        fresh = self._newest_saved(self._served)
        new = self._rest if first else fresh
        if self._names:  # of this model; servers may have others' too
            tensors = {name: tensor for name, tensor in tensors.items() if name in self._names}
        self._version, self._made_at, self._from_file = version, made_at, None
        awaits = _AWAITS if self._checkpoints else ""
        return Update(version, made_at, {**new, **tensors}, whole or first, partly=not self._names, awaits=awaits)

    def _first_saved(self) -> Update | None:
        """What servers do not have, when it is there at last; they may have nothing new for long."""
        if self._served is None or self._names:
            return None
        fresh = self._newest_saved(self._served)
        return Update(self._version, self._made_at, fresh, False) if fresh else None

    def _newest_saved(self, served: set[str]) -> dict[str, Tensor]:
        """What has changed, in the newest checkpoint, of what the servers do not have."""
        if self._checkpoints is None or (self._names and not self._rest):
            return {}
        try:
            found = self._checkpoints.newest()
        except Unfit:
            found = None  # the one before it will do
        if found is None:
            return {}
        tied = {id(tensor) for name, tensor in found.tensors.items() if name in served}
        rest = {name: t for name, t in found.tensors.items() if name not in served and id(t) not in tied}
        new = changed(self._rest, rest)
        self._names, self._rest, self._saved = set(found.tensors), rest, found.name
        return new

    # ---- checkpoints

    def _from_checkpoints(self, wait_s: float, lost: PacelineError | None) -> Update | None:
        if self._checkpoints is None or self._directory is None:
            assert lost
            raise lost
        checkpoints, since = self._checkpoints, self._made_at
        life = life_of(self._directory)
        self.ended = life if life != "gone" and not lost else ""
        found = wait_for(lambda: checkpoints.newest(since), 0.0 if lost else wait_s)
        if found is None:
            if lost:
                raise lost
            if life == "gone":
                raise Interrupted("its first member is not there any more")
            if not self._directory.exists():
                raise Interrupted(f"there is no directory {self._directory}")
            return None
        before, self._from_file = self._from_file, found.tensors
        self._made_at, self._served = found.made_at, None
        if before is None or before.keys() != found.tensors.keys():
            return Update(found.step, found.made_at, found.tensors, True)
        return Update(found.step, found.made_at, changed(before, found.tensors), False)


def life_of(directory: Path) -> str:
    """How the run in this directory ended; "gone": its first member was killed; "": it lives, or cannot be seen."""
    said = status.read(directory / "status" / "rank-0", 0)
    if said is None:
        return ""
    if said.what in ("finished", "left early") or re.match(r"failed|stopped", said.what):
        return said.what
    here = said.host in ("", this_host())
    return "gone" if here and said.pid and not Path(f"/proc/{said.pid}").exists() else ""
