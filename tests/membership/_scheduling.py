"""Schedulers, members and agents over real sockets, for the tests of the scheduler and its lines."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time

from paceline.core.settings import Settings
from paceline.core.view import Member
from paceline.membership.agent_line import AgentLine, look
from paceline.membership.line import Line
from paceline.membership.orders import Arrive, Host
from paceline.membership.scheduler import Scheduler
from paceline.membership.seats import Rules

TOKEN = "the run's token"
SILENCE_S = 0.6


@contextlib.contextmanager
def scheduler(folder, least=1, target=2, most=4, silence_s=SILENCE_S, replacements=3, **settings):
    rules = Rules(
        least=least,
        target=target,
        most=most,
        silence_s=silence_s,
        replacements=replacements,
        settings=Settings(**({"join_limit_s": 20.0} | settings)),
    )
    with contextlib.closing(Scheduler(rules, TOKEN, folder / "journal.sqlite")) as there:
        yield there


class Program:
    """The scheduler as a process."""

    def __init__(self, folder, **told):
        self.told = {"journal": str(folder / "journal.sqlite"), "least": 1, "target": 2, "most": 4}
        self.told |= {"silence_s": SILENCE_S, "settings": {"join_limit_s": 20.0}} | told
        self.process = None
        self.start()

    def start(self):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "paceline.membership.scheduler"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PACELINE_TOKEN": TOKEN},
            text=True,
        )
        self.process.stdin.write(json.dumps(self.told) + "\n")
        self.process.stdin.flush()
        said = json.loads(self.process.stdout.readline())
        self.address, self.term = said["address"], said["term"]

    def kill(self):
        self.process.kill()
        self.close()

    def close(self):
        self.process.terminate()
        self.process.wait(10)
        self.process.stdin.close()
        self.process.stdout.close()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()


def me(id, pid=None, view=0):
    return Arrive(id=id, member=Member(rank=id, host="h", pid=pid or 1000 + id), view=view)


def line(address, id, pid=None, limit_s=10.0):
    return Line(address, TOKEN, me(id, pid), limit_s=limit_s)


def lines(address, count):
    return [line(address, id) for id in range(count)]


def agent(address, name="a", slots=4, running=()):
    return AgentLine(address, TOKEN, Host(name=name, slots=slots, running=tuple(running)), 10.0)


def see(address):
    return look(address, TOKEN)


def until(fact, limit_s=10.0):
    deadline = time.monotonic() + limit_s
    while not fact():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def closing(*things):
    """All of them, one after the other."""
    stack = contextlib.ExitStack()
    for thing in things:
        stack.callback(thing.close)
    return stack


def ids(view):
    return [m.id for m in view.members]
