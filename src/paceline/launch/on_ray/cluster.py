"""The way into a Ray cluster: one that runs, or one of our own on this host; and what its nodes have room for."""

from __future__ import annotations

import logging
import math
import os
import secrets
import signal
import socket
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.core.errors import ConfigError
from paceline.launch.cores import cores
from paceline.launch.on_ray.post import first_line
from paceline.transport.address import split_address

PIP = "pip install 'paceline[ray]'"
LOCAL = "local"  # as an address: a cluster of our own
_REACH_S = 5.0
_CURRENT = Path("/tmp/ray/ray_current_cluster")  # where `ray start` writes the address of this host's cluster
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, kw_only=True)
class Share:
    """What each member is given."""

    cpus: float = 1.0
    gpus: float = 0.0

    def times(self, slots: int) -> dict[str, float]:
        """A bundle for so many.

        >>> Share(cpus=2).times(3)
        {'CPU': 6}
        """
        return {"CPU": self.cpus * slots} | ({"GPU": self.gpus * slots} if self.gpus else {})

    def fit(self, free: Mapping[str, float]) -> int:
        """How many of them there is room for.

        >>> Share(cpus=0.5, gpus=1).fit({"CPU": 4.0, "GPU": 2.0})
        2
        """
        room = [free.get("CPU", 0.0) / self.cpus] + ([free.get("GPU", 0.0) / self.gpus] if self.gpus else [])
        return int(min(room) + 1e-6)


@dataclass(frozen=True, kw_only=True)
class Node:
    """One of the cluster's."""

    id: str
    name: str
    total: Mapping[str, float]
    free: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """One that this process has joined as a driver; `leave` it."""

    address: str  # "ip:port"
    namespace: str  # of the run's actors
    node: str  # that we are on
    host: str  # its address, by which the other nodes reach it
    own: bool  # it ends with us

    def nodes(self) -> list[Node]:
        """Those that live."""
        import ray

        free = _free_by_node()
        return [
            Node(
                id=node["NodeID"],
                name=node["NodeManagerHostname"],
                total=node["Resources"],
                free=free.get(node["NodeID"], {}) if free is not None else node["Resources"],
            )
            for node in ray.nodes()
            if node["Alive"]
        ]

    def leave(self) -> None:
        import ray

        ray.shutdown()


def enter(address: str, cpus: float, working_dir: str = "") -> Cluster:
    """Join a cluster; ConfigError says why not.

    Args:
        address: "": that of RAY_ADDRESS, else the one that runs here, else one of our own.
        cpus: that one of our own has at least; GPUs it finds by itself.
        working_dir: copied to all nodes.
    """
    import ray

    where = find(address)
    namespace = f"paceline-{secrets.token_hex(6)}"
    options: dict[str, Any] = {
        "address": where,
        "namespace": namespace,
        "log_to_driver": False,  # the launcher shows members' lines itself
        "logging_level": logging.ERROR,
        "configure_logging": True,
    }
    if working_dir:
        options["runtime_env"] = {"working_dir": working_dir}
    if where == LOCAL:
        options["num_cpus"] = max(cores().usable, math.ceil(cpus))
    _hush()
    with _own_signals():
        try:
            context = ray.init(**options)
        except (RuntimeError, ValueError, OSError, ray.exceptions.RayError) as error:
            ray.shutdown()
            raise ConfigError(_why(where, error)) from None
    found = context.address_info
    runtime = ray.get_runtime_context()
    return Cluster(
        address=found["gcs_address"],
        namespace=namespace,
        node=runtime.get_node_id(),
        host=ray.util.get_node_ip_address(),
        own=where == LOCAL,
    )


def find(address: str, environ: Mapping[str, str] = os.environ) -> str:
    """Where the cluster is, which answers there; LOCAL: nowhere yet."""
    asked = address or environ.get("RAY_ADDRESS", "")
    source = "--address" if address else "RAY_ADDRESS"
    if asked.startswith("ray://"):
        raise ConfigError(
            f"{source} {asked}: that is a port for Ray's clients, and the launcher must be on a node, where members "
            "reach it: start it there, or send it: ray job submit -- paceline run --on ray …"
        )
    if asked == LOCAL:
        return LOCAL
    if asked in ("", "auto"):
        current = _current()
        if current and _answers(current):
            return current
        if asked:
            raise ConfigError(f"{source} auto: no Ray cluster runs on this host: ray start --head, or leave it out")
        return LOCAL
    try:
        split_address(asked)
    except ConfigError:
        raise ConfigError(f"{source} {asked!r} is not ip:port, auto or local") from None
    if not _answers(asked):
        raise ConfigError(
            f"{source} {asked}: no Ray cluster answers there within {_REACH_S:g} s; is it up (ray status there), and "
            "is the port let through?"
        )
    return asked


def too_few(nodes: Sequence[Node], share: Share, members: int, where: str) -> str:
    """What to say where they do not have room."""
    kinds = {"CPU": share.cpus, "GPU": share.gpus}
    words = []
    for kind, each in kinds.items():
        if not each:
            continue
        total, free = (sum(of.get(kind, 0.0) for of in one) for one in zip(*((n.total, n.free) for n in nodes)))
        words.append(f"{each * members:g} {kind}s, and the cluster at {where} has {total:g} ({free:g} free)")
    room = sum(share.fit(node.free) for node in nodes)
    shown = ", ".join(f"{node.name} {share.fit(node.free)}" for node in nodes[:8]) + (", …" if len(nodes) > 8 else "")
    few = f"start fewer (-n {room}), " if room else ""
    return (
        f"{members} members need {'; '.join(words)}; members that fit now, by node: {shown}; {few}add nodes, wait for "
        "those that are busy, or give each member less (--cpus)"
    )


def _why(where: str, error: Exception) -> str:
    text = " ".join(str(error).split())
    if "ersion mismatch" in text:
        return (
            f"the Ray cluster at {where} is of another version than this process: {text}; install the same Ray and "
            "Python here as there"
        )
    if where == LOCAL:
        return f"a Ray cluster of our own cannot be started here: {first_line(error)}"
    return (
        f"the Ray cluster at {where} does not take us in: {first_line(error)}; does it ask for a token "
        "(RAY_AUTH_MODE=token), or is it no Ray?"
    )


def _current() -> str:
    try:
        return _CURRENT.read_text().strip()
    except OSError:
        return ""


def _answers(address: str) -> bool:
    """Ray's own way waits for a minute, and may end the process."""
    try:
        with socket.create_connection(split_address(address), _REACH_S):
            return True
    except OSError:
        return False


def _free_by_node() -> dict[str, dict[str, float]] | None:
    """None: this Ray does not tell."""
    try:
        from ray._private.state import available_resources_per_node
    except ImportError:
        return None
    found: dict[str, dict[str, float]] = available_resources_per_node()
    return found


def _hush() -> None:
    """Ray prints pages about a node that is lost onto the driver's output, whatever it is told; its logs have them."""
    from ray._private import worker

    if hasattr(worker, "print_to_stdstream"):
        worker.print_to_stdstream = lambda *data, **how: None


class _own_signals:  # noqa: N801
    """Ray takes SIGTERM for itself; the launcher drains by it."""

    def __enter__(self) -> None:
        self._kept = {number: signal.getsignal(number) for number in _SIGNALS}

    def __exit__(self, *error: object) -> None:
        if threading.current_thread() is threading.main_thread():
            for number, kept in self._kept.items():
                signal.signal(number, kept)
