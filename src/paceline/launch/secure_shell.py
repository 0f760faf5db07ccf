"""The way to a host over OpenSSH: the user's own `ssh`, key, agent, configuration and known hosts.

It never asks (BatchMode) and never turns the check of host keys off. What the host is to run goes through the standard
input as one line of JSON, with its environment; on the command lines of ssh there are only the few words that read it,
and on the host those of the program that it then becomes. So nothing that is secret can be seen there, and no shell has
to understand more than one quoted word.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from paceline.core.errors import ConfigError

OPTIONS = (
    "-T",
    *("-o", "BatchMode=yes"),
    *("-o", "ConnectTimeout=10"),
    *("-o", "ServerAliveInterval=10"),
    *("-o", "ServerAliveCountMax=3"),
)
_LIMIT_S = 30.0
# One line, without what csh or fish would read in quotes. Beside the home directory nothing is imported.
_BOOT = (
    "import sys;sys.path.pop(0);import os,json;"
    'h=json.loads(open(0,"rb",0,closefd=False).readline() or b"{}");'
    'os.environ.update(h.get("env",{}));exec(h.get("program",""))'
)
_REFUSES, _SILENT = r"Connection refused", r"timed out|No route to host|Network is unreachable"
_DOWN = f"{_REFUSES}|{_SILENT}|Connection (closed|reset) by|kex_exchange_identification"
# What ssh says when it does not get there, and what to do about it.
_WORDS = (
    (r"REMOTE HOST IDENTIFICATION HAS CHANGED", "its host key is another one than in known_hosts", "{changed}"),
    (r"Host key verification failed|host key is known", "its host key is not in known_hosts", "{unknown}"),
    (r"Permission denied|Too many authentication failures", "it refused every key", "{refused}"),
    (
        r"Could not resolve hostname",
        "its name is not known",
        "check the spelling, or give it a HostName in ~/.ssh/config",
    ),
    (_REFUSES, "nothing listens there", "start sshd on it, or say its port in ~/.ssh/config"),
    (
        _SILENT,
        "it was not reached",
        "is it up, and is port 22 let through?",
    ),
    (
        r"Bad configuration option|Bad owner|no such identity|Can't open user config",
        "ssh does not start",
        "correct that",
    ),
)
_NEXT = {
    "{changed}": "ask who runs it whether that is right; only then: ssh-keygen -R {host}",
    "{unknown}": "connect once by hand (`{ssh} {host}`), compare the key, and accept it",
    "{refused}": "put your public key there (ssh-copy-id {host}), and load it here (ssh-add)",
}


@dataclass(frozen=True, kw_only=True)
class SecureShell:
    """What leads to hosts, and what programs there begin with."""

    ssh: str = "ssh"  # with options of the user's, as in "ssh -F FILE"
    python: str = ""  # there; "": the same path as here
    cwd: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    stays: bool = False  # an agent goes on when the connection ends

    @property
    def words(self) -> list[str]:
        """The ssh command, up to the host's name."""
        first, *more = shlex.split(self.ssh)
        return [first, *OPTIONS, *more]

    def command(self, host: str, slots: int = 1, labels: tuple[str, ...] = ()) -> list[str]:
        """What is started here for any program there."""
        return [*self.words, host, f"exec {shlex.quote(self.python or sys.executable)} -c {shlex.quote(_BOOT)}"]

    def agent(self, host: str, slots: int, labels: tuple[str, ...]) -> list[str]:
        """What is started there, of an agent."""
        more = [word for label in labels for word in ("--label", label)]
        more += ["--stay"] if self.stays else []
        return ["-P", "-m", "paceline", "agent", "--join", "-", "--name", host, "--slots", str(slots), *more]

    def input(self, host: str, slots: int, labels: tuple[str, ...]) -> bytes:
        """What goes into it first, for an agent."""
        return self.python_on(host, self.agent(host, slots, labels))[1]

    def python_on(self, host: str, arguments: Sequence[str]) -> tuple[list[str], bytes]:
        """The command and its first input, for any arguments of Python there."""
        program = f"os.chdir({self.cwd!r})\nos.execv(sys.executable, [sys.executable, *{list(arguments)!r}])"
        return self.command(host), self.line(program)

    def line(self, program: str) -> bytes:
        return json.dumps({"env": dict(self.env), "program": program}).encode() + b"\n"

    def start(self, host: str, program: str) -> subprocess.Popen[bytes]:
        """Run a program there, in a Python process of its own whose environment is the one that is carried."""
        try:
            process = subprocess.Popen(
                self.command(host),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # a Ctrl-C is for the launcher
            )
        except OSError as error:
            raise self.missing(error) from None
        assert process.stdin
        again = f"os.execv(sys.executable, [sys.executable, '-c', {program!r}])"
        try:
            process.stdin.write(self.line(again))
            process.stdin.flush()
        except OSError:  # it has ended already, and says why
            pass
        return process

    def missing(self, error: OSError) -> ConfigError:
        first = shlex.split(self.ssh)[0]
        return ConfigError(
            f"{first} cannot be started ({error.strerror}): apt-get install openssh-client, or give --ssh"
        )

    def target(self, host: str) -> str:
        """The address or name that ssh goes to for a host of the user's configuration; asks nobody."""
        try:
            done = subprocess.run(
                [*self.words, "-G", host], capture_output=True, text=True, timeout=_LIMIT_S, stdin=subprocess.DEVNULL
            )
        except OSError as error:
            raise self.missing(error) from None
        found = re.search(r"^hostname (.+)$", done.stdout, flags=re.M)
        if done.returncode or not found:
            said = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
            raise ConfigError(f"host {host}: {shlex.join(self.words)} -G {host} failed: {said}")
        return found[1]

    def passes(self, code: int, said: str) -> bool:
        """Whether a host that was not reached may be so by itself after a while."""
        return code == 255 and re.search(_DOWN, said) is not None

    def why(self, host: str, code: int, said: str, printed: str = "") -> str:
        """Why a host was not reached, or its Python not started, by what ssh said; and what to change. `printed`: on
        the standard output, where a login that is refused by its shell says so."""
        last = _last(said) or _last(printed) or "no reason given"
        tried = f"tried {self.ssh} {host}"
        for pattern, what, then in _WORDS:
            if code == 255 and re.search(pattern, said):
                do = _NEXT.get(then, then).format(host=host, ssh=self.ssh)
                return f"host {host}: {what} ({tried}: {last}); {do}"
        if code in (126, 127):
            python = self.python or sys.executable
            return (
                f"host {host}: there is no {python} ({tried}: {last}); make the same environment there, or give "
                "--python PATH"
            )
        if code != 255 and _last(printed) and _last(said):  # a banner goes to one, a refusal to the other
            last = f"{_last(printed)}; {last}"
        return f"host {host}: {last} ({tried}, exit code {code})"


def _last(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1].strip()
