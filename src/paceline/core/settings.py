"""What a launcher or `join()` decides for the whole run. Every member gets the same."""

from __future__ import annotations

from typing import Any

import msgspec

from paceline.core.errors import ConfigError, nearest


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a run; `with_` gives a copy in which some are replaced, and refuses unknown names."""

    name: str = ""  # of the run; "" makes one from the script and the time
    root: str = "runs"  # where run directories live
    strategy: str = "allreduce"
    mesh: str = ""  # how replicas are cut, such as "shard=2"; see `paceline.core.mesh`
    servers: str = "auto"  # of the server strategies: auto, colocated, or how many processes
    codec: str = ""  # what travels between hosts instead of float32, such as "topk(0.01)"
    precision: str = "fp32"  # what models compute in, such as "bf16"; see `paceline.parallel.precision`
    transport: str = "auto"  # auto, gloo, nccl
    device: str = "auto"  # auto, cpu, cuda, cuda:1
    seed: int = 0
    fresh: bool = False  # start over although the run has checkpoints
    checkpoint_every_s: float = 300.0  # besides the one at the end of each epoch; 0: only those
    checkpoint_keep: int = 3  # 0: write none
    join_limit_s: float = 120.0  # how long to wait for all members to arrive
    wait_limit_s: float = 300.0  # how long any later wait for another member may last
    lr_rule: str = "keep"  # of elastic runs with fewer members than they may have: keep, linear, sqrt
    stragglers: str = "tell"  # what is done about slow members of all-reduce runs: tell, less, drop
    progress: str = "auto"  # auto, rich, plain, off
    check_finite: bool = False  # stop on a gradient that is not finite, naming the member and parameter
    pinned: tuple[str, ...] = ()  # which of these the launcher was told: a script does not overrule them

    def with_(self, **changes: Any) -> Settings:
        """A copy with `changes`; an unknown name or a value of the wrong type is a ConfigError.

        >>> Settings().with_(seed=3).seed
        3
        """
        for key in changes:
            if key not in NAMES:
                raise ConfigError(f"unknown setting {key!r}: {nearest(key, NAMES)}")
        try:
            return msgspec.convert(msgspec.structs.asdict(self) | changes, Settings)
        except msgspec.ValidationError as error:
            raise ConfigError(f"bad setting: {error}") from None

    def pin(self, *names: str) -> Settings:
        """A copy in which these hold whatever a script says in `join(...)`.

        >>> Settings().pin("seed").pin("name", "seed").pinned
        ('seed', 'name')
        """
        return msgspec.structs.replace(self, pinned=tuple(dict.fromkeys((*self.pinned, *names))))

    def changed(self) -> tuple[str, ...]:
        """The names of those that are not at their default.

        >>> Settings(seed=3).changed()
        ('seed',)
        """
        default = Settings()
        return tuple(name for name in NAMES if getattr(self, name) != getattr(default, name))


NAMES = tuple(name for name in Settings.__struct_fields__ if name != "pinned")  # what a user may set
