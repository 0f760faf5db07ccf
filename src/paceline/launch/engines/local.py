"""Members on this host, and on hosts that a command of the user's leads to (`--start-on`)."""

from __future__ import annotations

import errno
import os
import socket
from dataclasses import dataclass, replace
from typing import ClassVar

from paceline.core.errors import ConfigError
from paceline.environment import crowd
from paceline.launch import listed, posts, preview, probe, tokens
from paceline.launch.elastic import ElasticJob
from paceline.launch.engines import Option, Shown
from paceline.launch.local import Local, LocalJob
from paceline.launch.record import SUBMISSION
from paceline.launch.spec import JobSpec
from paceline.transport.address import join_address


@dataclass(frozen=True, kw_only=True)
class Engine:
    """The engine of a run that names none."""

    OPTIONS: ClassVar[tuple[Option, ...]] = ()
    spreads: ClassVar[bool] = False
    elsewhere: ClassVar[bool] = False
    no_hosts: ClassVar[str] = (
        "its members are on this host: leave --on out, since --hosts alone is --on ssh, or leave --hosts out; a "
        "command of yours leads there with --start-on"
    )
    stays: ClassVar[str] = ""

    def prepare(self, spec: JobSpec) -> JobSpec:
        """With an address to listen on, where there are other hosts; what is wrong with their list is said here.

        Who says on which address to listen may have told others the token before, as is done with pods, which may also
        be started again by the same command.
        """
        elastic = spec.elastic
        if elastic and elastic.listen and (token := tokens.told()):
            spec = replace(spec, token=token, submission=os.environ.get(SUBMISSION, ""))
        if not elastic or not elastic.hosts:
            return spec
        if elastic.listen:
            listed.read(elastic.hosts)
            return spec
        return replace(spec, elastic=replace(elastic, listen=posts.reachable(elastic.hosts)))

    def preview(self, spec: JobSpec) -> str:
        """Each member's command with what its environment has beyond ours, ready for a shell."""
        return "\n".join([*preview.members(spec), preview.settings(spec)])

    def check(self, spec: JobSpec) -> None:
        """There is always this host; its scheduler must be able to listen where it is to.

        The name of a pod may not be known yet, or lead to the one before: the scheduler is started again until it does.
        """
        elastic = spec.elastic
        if elastic is None:
            return
        host, port = elastic.listen or "127.0.0.1", elastic.port
        try:
            socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
        except OSError as error:
            why = (error.strerror or str(error)).partition(" (")[0]
            if error.errno == errno.EADDRINUSE:
                raise ConfigError(
                    f"--port {port}: cannot listen at {join_address(host, port)} ({why}); give another one, or leave "
                    "it out"
                ) from None
            if not spec.token:
                own = ", ".join(f"{name} ({address})" for name, address in probe.interfaces().items() if address)
                raise ConfigError(
                    f"--listen {host}: cannot listen there ({why}); give an address of this host: {own}"
                ) from None

    def start(self, spec: JobSpec, shown: Shown) -> LocalJob | ElasticJob:
        told = spec.elastic is not None and bool(spec.elastic.listen)  # the others of a TrainJob have agents
        if (many := crowd()) and not told:
            shown.say(
                f"warning: this launcher is {many}, and each of them starts a run of its own; to have one run, start "
                "the launcher once, or the script itself in its place"
            )
        return Local(shown.show, on_lost=shown.on_lost, say=shown.say).start(spec)
