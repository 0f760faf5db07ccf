"""Two levels: all-reduce inside a site, at every step; rounds between sites.

    site      members with the same label that begins with site- (`paceline run --label`); without one, those of a host
    inside    gradients are summed by the inner all-reduce, so that members of a site have the same weights, bit for bit
    between   the first member of each site exchanges differences with the first ones of the others, and hands on what
              came to its site

A site counts in the average as its members would: by their number, samples, tokens or losses. Median and trimmed mean
look at one row for each site.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence

from paceline.core.errors import ConfigError
from paceline.core.words import build
from paceline.strategies.allreduce import AllReduce
from paceline.strategies.strategy import Inside, World
from paceline.transport.group import Group

LABEL = "site-"


def site_of(labels: Sequence[str], host: str) -> str:
    """
    >>> site_of(("gpu", "site-a"), "h"), site_of((), "h")
    ('site-a', 'h')
    """
    return next((label for label in labels if label.startswith(LABEL)), host)


class Sites:
    """Who is where. All members make one together; `world.site` names this member's."""

    def __init__(self, world: World) -> None:
        group = world.group
        names = world.do(lambda group: group.exchange(world.site.encode()))
        found = {name: [rank for rank, other in enumerate(names) if other == name] for name in names}
        self._ranks = list(found.values())
        self.count = len(self._ranks)
        mine = found[names[group.rank]]
        self.leads = mine[0] == group.rank
        self._first = [found[name][0] for name in names]  # by rank, of its site
        self.inside = Inside(world, self._part(group)) if self.count > 1 else world  # where gradients are summed
        near = self._part(group) if self.count > 1 else None  # made by all, since names of groups are counted
        self.near = near if near and near.size > 1 else None
        self.leaders = group.subgroup([ranks[0] for ranks in self._ranks]) if self.count > 1 else None
        for made in (self.near, self.leaders):
            if made:
                made.barrier()  # what it stands on is made here, not in the thread of the exchange
        self.speakers = self._who_encodes(group)

    def fold(self, weights: Sequence[float]) -> list[float]:
        """A member's weights as their site's, which its first member has."""
        folded = [0.0] * len(weights)
        for rank, weight in enumerate(weights):
            folded[self._first[rank]] += weight
        return folded

    @property
    def sent_bytes(self) -> int:
        groups = [self.near, self.leaders, self.inside.group if self.count > 1 else None]
        return sum(group.sent_bytes for group in groups if group)

    def _part(self, group: Group) -> Group:
        """A group of this member's site; all sites make theirs in the same order."""
        made = [group.subgroup(ranks) for ranks in self._ranks]
        return next(part for part in made if part)

    def _who_encodes(self, group: Group) -> list[int]:
        """For each member, the one that encodes for it."""
        leaders = self.leaders
        speaker = group.rank
        if leaders and leaders.size > 1:
            speaker = group.ranks.index(leaders.ranks[leaders.speakers[leaders.rank]])
        told = [json.loads(words) for words in group.exchange(json.dumps(speaker).encode())]
        return [told[first] for first in self._first]


def make_inner(words: AllReduce | str | None) -> AllReduce | None:
    """The inner all-reduce that a user wrote as an object or in words.

    >>> make_inner("none"), make_inner("allreduce(bucket_mb=8)").options["bucket_mb"]
    (None, 8.0)
    """
    if words is None or words == "none":
        return None
    if isinstance(words, str):
        return build(words, {"allreduce": AllReduce}, "inner strategy")
    if not isinstance(words, AllReduce):
        raise ConfigError(f'inner={words!r}: inside a site members all-reduce: give "allreduce", or AllReduce(...)')
    return words


def inner_words(inner: AllReduce | None) -> str:
    """How a user would write it, without what is as usual."""
    if inner is None:
        return "none"
    usual = {name: p.default for name, p in inspect.signature(AllReduce).parameters.items()} | {"codec": "none"}
    own = [f"{key}={value!r}" for key, value in inner.options.items() if value != usual[key]]
    return f"allreduce({', '.join(own)})" if own else "allreduce"
