"""Hosts to reach by ssh: an OpenSSH server for each, with keys, known hosts and a client's configuration of their own.

    with Sshd(directory, ["a", "b"]) as servers:
        subprocess.run(shlex.split(servers.ssh) + ["a", "hostname"])

All are this machine, at ports of the loopback, or in network namespaces (`inside`). Nothing of the user's own keys or
configuration is read or written.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from paceline.core.errors import ConfigError, PacelineError

_LIMIT_S = 20.0
_LOOPBACK = "127.0.0.1"
_LOOPBACKS = (_LOOPBACK, "::1")
_SERVER = """\
Port {port}
ListenAddress {address}
HostKey {folder}/host-{name}
AuthorizedKeysFile {folder}/key.pub
PidFile none
StrictModes no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin yes
UsePAM no
MaxStartups 100
{more}
"""
_CLIENT = """\
Host {name}
  HostName {address}
  Port {port}
  IdentityFile {folder}/key
  IdentitiesOnly yes
  UserKnownHostsFile {folder}/known_hosts
  GlobalKnownHostsFile /dev/null
"""


class Sshd:
    """A server for each of `names`.

    Args:
        directory: for keys, configurations and logs.
        inside: by name, what a server is started by, such as ("ip", "netns", "exec", NAME).
        addresses: by name, where it listens (127.0.0.1).
        more: by name, lines of its configuration, such as "SetEnv PATH=/opt/bin:/usr/bin".
    """

    def __init__(
        self,
        directory: Path,
        names: Sequence[str],
        *,
        inside: Mapping[str, Sequence[str]] | None = None,
        addresses: Mapping[str, str] | None = None,
        more: Mapping[str, str] | None = None,
    ) -> None:
        self.dir = directory
        self.names = list(names)
        self._inside, self._more = inside or {}, more or {}
        self._addresses = {name: (addresses or {}).get(name, _LOOPBACK) for name in names}
        self.ports: dict[str, int] = {}
        self._servers: dict[str, subprocess.Popen[bytes]] = {}

    @staticmethod
    def missing() -> str:
        """Why there can be none on this machine; "" where there can."""
        if _server() is None:
            return "no OpenSSH server: apt-get install openssh-server"
        if shutil.which("ssh") is None or shutil.which("ssh-keygen") is None:
            return "no OpenSSH client: apt-get install openssh-client"
        return ""

    @property
    def ssh(self) -> str:
        """The command that leads to them, for `--ssh`."""
        return f"ssh -F {self.dir / 'config'}"

    def __enter__(self) -> Sshd:
        if reason := self.missing():
            raise ConfigError(f"cannot make ssh servers: {reason}")
        self.dir.mkdir(parents=True, exist_ok=True)
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(exist_ok=True)  # which the server asks for
        _key(self.dir / "key")
        clients, known = [], []
        for name, address in self._addresses.items():
            _key(self.dir / f"host-{name}")
            self.ports[name] = port = _free_port(address) if address in _LOOPBACKS else 22
            own = {"folder": self.dir, "name": name, "address": address, "port": port}
            (self.dir / f"sshd-{name}").write_text(_SERVER.format(more=self._more.get(name, ""), **own))
            clients.append(_CLIENT.format(**own))
            where = address if port == 22 else f"[{address}]:{port}"
            known.append(f"{where} {(self.dir / f'host-{name}.pub').read_text()}")
        (self.dir / "config").write_text("".join(clients))
        (self.dir / "known_hosts").write_text("".join(known))
        try:
            for name in self.names:
                self.start(name)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def start(self, name: str) -> None:
        server = _server()
        assert server
        with (self.dir / f"log-{name}").open("ab") as log:
            words = [*self._inside.get(name, ()), server, "-D", "-e", "-f", str(self.dir / f"sshd-{name}")]
            self._servers[name] = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        deadline = time.monotonic() + _LIMIT_S
        while b"Server listening" not in (said := (self.dir / f"log-{name}").read_bytes()):
            if self._servers[name].poll() is not None or time.monotonic() > deadline:
                raise PacelineError(f"the ssh server of {name} did not start: {said.decode(errors='replace')}")
            time.sleep(0.02)

    def stop(self, name: str) -> None:
        """End a server; connections that it has go on."""
        self._servers[name].terminate()
        self._servers.pop(name).wait()

    def close(self) -> None:
        for name in list(self._servers):
            self.stop(name)


def _server() -> str | None:
    return shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")


def _key(path: Path) -> None:
    command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "test", "-f", str(path)]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, capture_output=True)


def _free_port(address: str) -> int:
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        probe.bind((address, 0))
        port: int = probe.getsockname()[1]
        return port
