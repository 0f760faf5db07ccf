"""`paceline agent`: let this host take part in an elastic run that was started on another one."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import types
from pathlib import Path

import msgspec

from paceline.cli.display import Display
from paceline.cli.flags import LABEL_HELP, Parser, seconds, whole
from paceline.core.errors import ConfigError
from paceline.core.labels import word
from paceline.environment import this_host
from paceline.launch.joined import APART, JoinedHost
from paceline.launch.reach import Reach
from paceline.transport.address import await_name, split_address

_LIMIT_S = 30.0
_EPILOG = """\
examples:
  paceline agent --join /data/runs/big/scheduler.json --slots 4     on a disk that this host shares, or copied
  PACELINE_TOKEN=… paceline agent --join 10.0.0.1:29400 --slots 4

Script, arguments and settings come from the run, which must have been started with -n MIN:MAX and --listen or --hosts;
the working directory and the script have the same paths here. SIGTERM drains: the members finish the step under way and
leave. With --join - the first line of the input is what scheduler.json holds, and the end of the input drains too.
"""


def main(argv: list[str]) -> int:
    parser = Parser(prog="paceline agent", description="Let this host take part in an elastic run.", epilog=_EPILOG)
    parser.option("--join", parse=str, metavar="RUN", help="its scheduler.json, - for standard input, or ip:port")
    parser.option("--slots", parse=whole(1), metavar="K", default=1, help="members that this host may have (1)")
    parser.option("--label", parse=word, metavar="LABEL", action="append", help=LABEL_HELP)
    parser.option("--stay", help="with --join -: go on when the input ends, as long as the run does")
    parser.option("--together", help="SIGTERM drains the whole run: whoever takes this host takes all of them")
    parser.option("--limit-s", parse=seconds(0.1), metavar="S", help="wait so long for the run to be there (30)")
    parser.option("--name", parse=str, metavar="NAME", help="of this host; two agents of a run differ in it")
    options, rest = parser.split(argv)
    if rest:
        raise ConfigError(f"{rest[0]!r} is not understood: the script and its arguments come from the run")
    given = parser.parse_args(options)
    if not given.join:
        raise ConfigError("which run? paceline agent --join runs/NAME/scheduler.json")
    where = _where(given.join)
    display = Display(100)
    labels = tuple(given.label or ())
    name, together = given.name or this_host(), given.together
    limit_s = given.limit_s or _LIMIT_S
    if given.limit_s:  # whoever gives it expects to wait; a name that was mistyped is told at once
        display.say(f"joining the run at {where.address}, for up to {limit_s:g} s")
        began = time.monotonic()
        await_name(where.address, limit_s)
        limit_s = max(1.0, limit_s - (time.monotonic() - began))
    host = JoinedHost(
        where, name, given.slots, display, labels=labels, together=together, limit_s=limit_s, say=display.say
    )
    if given.stay:  # whoever started us may go
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda number, frame: _stop(host, number, frame))
    if given.join == "-" and not given.stay:
        threading.Thread(target=_drain_at_end_of_input, args=(host,), daemon=True).start()
    slots = "1 slot" if host.slots == 1 else f"{host.slots} slots"
    apart = f" {APART}" if host.apart else ""
    display.say(f"joined the run at {where.address} with {slots}; logs in {host.dir / 'logs'}{apart}")
    code = host.run()
    if host.reason:
        display.say(f"over: {host.reason}")
    return code


def _where(join: str) -> Reach:
    if join == "-":
        return _decoded(sys.stdin.buffer.readline(1 << 16), "standard input")
    if os.path.isfile(join):
        try:
            return _decoded(Path(join).read_bytes(), join)
        except OSError as error:
            raise ConfigError(f"--join {join!r} cannot be read: {error.strerror}") from None
    try:
        split_address(join)
    except ConfigError:
        raise ConfigError(
            f"--join {join!r}: there is no run; give its scheduler.json, which is there while it runs, or its address, "
            "such as 10.0.0.1:29400"
        ) from None
    if not (token := os.environ.get("PACELINE_TOKEN")):
        raise ConfigError(
            "PACELINE_TOKEN is not set: put the run's token there (it is in scheduler.json in the run's directory), or "
            "give that file to --join"
        )
    return Reach(address=join, token=token)


def _decoded(data: bytes, source: str) -> Reach:
    try:
        return msgspec.json.decode(data, type=Reach)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{source} does not hold what a run's scheduler.json holds: {error}") from None


def _stop(host: JoinedHost, number: int, frame: types.FrameType | None) -> None:
    host.stop(number)


def _drain_at_end_of_input(host: JoinedHost) -> None:
    while os.read(0, 1 << 12):
        pass
    host.drain()
