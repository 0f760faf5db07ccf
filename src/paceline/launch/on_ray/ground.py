"""A run's place on a Ray cluster: bundles of a placement group, an agent in each, and what becomes of lost nodes.

The first group is placed as a whole, or the run does not start. Of a node that dies Ray places the bundle again, where
there is room for it, now or when a node comes; and while the run has fewer slots than it may have members, what is free
on nodes is taken by further groups, of one bundle each. So hosts come and go, as those of a list do (`launch.posts`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.core.errors import ConfigError
from paceline.core.on_ray import HOLDER
from paceline.launch.on_ray.actors import HostAgent
from paceline.launch.on_ray.cluster import PIP, Cluster, Node, Share, enter, too_few
from paceline.launch.on_ray.keeper import ActorKeeper
from paceline.launch.on_ray.post import Post, first_line
from paceline.launch.on_ray.seat_host import SeatHost
from paceline.launch.preflight import Facts
from paceline.launch.spec import Room
from paceline.membership.scheduler import Parameters

_PLACE_S = 30.0  # for a group of which Ray says that there is room
_HELLO_S = 90.0  # for an actor, whose process may have to be made


@dataclass(frozen=True)
class _Group:
    """A placement group."""

    handle: Any
    slots: list[int]  # of each bundle
    asked_at: float


@dataclass(frozen=True)
class _Spot:
    """A bundle, on the node that has it."""

    group: _Group
    bundle: int
    node: str


class RayGround:
    """See `launch.ground.Ground`.

    Nothing is asked of Ray before `enter`.

    Args:
        labels: of all members.
        address: of the cluster; see `cluster.enter`.
        working_dir: which Ray is to bring to the nodes; "": they have it.
        stays: where members work that stay, on nodes that have it; such a run has other actors (`seat_host`).
    """

    def __init__(
        self,
        share: Share,
        least: int,
        most: int,
        labels: tuple[str, ...] = (),
        *,
        address: str = "",
        working_dir: str = "",
        stays: str | None = None,
    ) -> None:
        self._share, self._least, self._most = share, least, most
        self._labels, self._address, self._working_dir = labels, address, working_dir
        self._stays = stays
        self._joined: Cluster | None = None
        self._groups: list[_Group] = []
        self._names: dict[tuple[str, int, str], str] = {}  # by group, bundle and node
        self._spots: dict[str, _Spot] = {}  # by name, also of those that are gone
        self._made: dict[str, Any] = {}  # actors that wait for the run
        self._posts: dict[str, Post] = {}
        self._started: dict[str, int] = {}
        self._could_grow = False

    @property
    def _cluster(self) -> Cluster:
        assert self._joined
        return self._joined

    def enter(self) -> tuple[Cluster, int]:
        """Join the cluster and place the first group; how many slots that is."""
        self._joined = enter(self._address, self._share.cpus * self._most, self._working_dir)
        nodes = self._cluster.nodes()
        slots = dealt([self._share.fit(node.free) for node in nodes], self._most)
        if sum(slots) < self._least:
            raise ConfigError(too_few(nodes, self._share, self._least, self._cluster.address))
        group = self._ask([count for count in slots if count])
        if not group.handle.wait(_PLACE_S):
            raise ConfigError(
                f"Ray has not placed {len(group.slots)} bundles ({self._share.times(1)} for each member) within "
                f"{_PLACE_S:g} s: has somebody else taken them? See ray status"
            )
        return self._cluster, sum(slots)

    def meet(self, ask: Mapping[str, Any]) -> dict[str, Facts]:
        """An actor on each host, and what it finds there."""
        import ray

        for name, room in self.hosts().items():
            self._made[name] = self._actor(name, room)
        asked = {name: actor.facts.remote(dict(ask)) for name, actor in self._made.items()}
        found = {}
        for name, answer in asked.items():
            try:
                found[name] = Facts(**ray.get(answer, timeout=_HELLO_S))
            except Exception as error:  # of many kinds
                raise ConfigError(f"host {name}: {_no_actor(error)}") from None
        return found

    def lacking(self, path: str) -> list[str]:
        """The hosts that have no such file."""
        import ray

        asked = {name: actor.exists.remote(path) for name, actor in self._made.items()}
        return [name for name, answer in asked.items() if not ray.get(answer, timeout=_HELLO_S)]

    @property
    def actors(self) -> dict[str, Any]:
        """Those that were met, by host."""
        return dict(self._made)

    def hosts(self) -> dict[str, Room]:
        """One for each bundle that is placed; its node's name tells it from others."""
        try:
            nodes = {node.id: node for node in self._cluster.nodes()}
            spots = [spot for group in self._groups for spot in _placed(group) if spot.node in nodes]
        except Exception as error:  # of many kinds
            raise ConfigError(f"Ray does not tell which nodes there are: {first_line(error)}") from None
        found = {self._name(spot, nodes): spot for spot in spots}
        self._spots |= found
        for name, post in self._posts.items():
            if name not in found and post.node not in nodes and post.poll() is None:
                post.kill()  # Ray may take longer to tell its callers
        rooms = {name: Room(spot.group.slots[spot.bundle], self._labels) for name, spot in found.items()}
        self._grow(list(nodes.values()), self._most - sum(room.slots for room in rooms.values()))
        return rooms

    def start(self, host: str, room: Room, where: bytes) -> Post:
        actor = self._made.pop(host, None) or self._actor(host, room)
        self._posts[host] = Post(actor, self._spots[host].node, where)
        return self._posts[host]

    def keeper(
        self, told: Parameters, token: str, on_started: Callable[[str, int], None], say: Callable[[str], None]
    ) -> ActorKeeper:
        return ActorKeeper(told, token, self._cluster.node, on_started=on_started, say=say)

    def close(self) -> None:
        """Give it all back."""
        if self._joined is None:
            return
        import ray
        from ray.util.placement_group import remove_placement_group

        for actor in [*self._made.values(), *(post.actor for post in self._posts.values())]:
            with contextlib.suppress(Exception):  # it is gone, whatever Ray calls that
                ray.kill(actor)
        with contextlib.suppress(Exception):
            ray.kill(ray.get_actor(HOLDER))
        for group in self._groups:
            with contextlib.suppress(Exception):
                remove_placement_group(group.handle)
        self._cluster.leave()

    def _ask(self, slots: list[int]) -> _Group:
        from ray.util.placement_group import placement_group

        bundles = [self._share.times(count) for count in slots]
        strategy = "STRICT_SPREAD" if len(bundles) > 1 else "STRICT_PACK"
        group = _Group(placement_group(bundles, strategy=strategy, name="paceline"), slots, time.monotonic())
        self._groups.append(group)
        return group

    def _actor(self, name: str, room: Room) -> Any:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        spot = self._spots[name]
        needs = self._share.times(room.slots)
        times = self._started[name] = self._started.get(name, 0) + 1
        made = ray.remote(HostAgent if self._stays is None else SeatHost).options(
            name=f"paceline-agent-{name}" + (f"-{times}" if times > 1 else ""),
            num_cpus=needs["CPU"],
            num_gpus=needs.get("GPU", 0),
            max_restarts=0,  # who keeps agents here is `posts`
            max_concurrency=8,
            scheduling_strategy=PlacementGroupSchedulingStrategy(spot.group.handle, spot.bundle),
        )
        synced = bool(self._working_dir)
        if self._stays is not None:
            return made.remote(name, room.slots, room.labels, cwd="" if synced else self._stays)
        return made.remote(name, room.slots, room.labels, synced=synced)

    def _name(self, spot: _Spot, nodes: Mapping[str, Node]) -> str:
        key = (spot.group.handle.id.hex(), spot.bundle, spot.node)
        if key not in self._names:
            own = nodes[spot.node].name
            alike = sum(node.name == own for node in nodes.values()) > 1
            base = f"{own}-{spot.node[:6]}" if alike else own
            taken = set(self._names.values())
            more = (f"{base}-{number}" for number in range(2, 10_000))
            self._names[key] = base if base not in taken else next(name for name in more if name not in taken)
        return self._names[key]

    def _grow(self, nodes: list[Node], missing: int) -> None:
        """Take what is free, where it still is at the second look: what Ray places again by itself goes first."""
        import ray
        from ray.util.placement_group import remove_placement_group

        waiting = [group for group in self._groups[1:] if not _placed(group)]
        for group in waiting:
            if time.monotonic() - group.asked_at > _PLACE_S:  # taken meanwhile, or lost with its node
                with contextlib.suppress(ray.exceptions.RayError):
                    remove_placement_group(group.handle)
                self._groups.remove(group)
        room = max((self._share.fit(node.free) for node in nodes), default=0)
        could, self._could_grow = self._could_grow, bool(missing > 0 and room and not waiting)
        if could and self._could_grow:
            self._ask([min(missing, room)])
            self._could_grow = False


def dealt(room: list[int], most: int) -> list[int]:
    """So many members at most, on as few nodes as can be: those of one host reduce through shared memory.

    >>> dealt([2, 4, 0, 3], 6)
    [0, 4, 0, 2]
    """
    given = [0] * len(room)
    for node in sorted(range(len(room)), key=lambda node: -room[node]):
        given[node] = min(room[node], most - sum(given))
    return given


def _placed(group: _Group) -> list[_Spot]:
    from ray.util.placement_group import placement_group_table

    table = placement_group_table(group.handle)
    return [
        _Spot(group, int(bundle), node)
        for bundle, node in table.get("bundles_to_node_id", {}).items()
        if node and table.get("state") != "REMOVED"
    ]


def _no_actor(error: Exception) -> str:
    if "No module named 'paceline'" in str(error):
        return f"its Python has no paceline: {PIP} there, of the same version as here"
    kind = type(error).__name__
    if kind == "GetTimeoutError":
        return f"its actor has not answered within {_HELLO_S:g} s; is the node overloaded? See ray status"
    return f"its actor cannot be made ({kind}: {first_line(error)}); see ray logs on that node"
