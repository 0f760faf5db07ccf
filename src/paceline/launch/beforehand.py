"""What can be known to go wrong before anything is started, so that it costs one line and no run directory."""

from __future__ import annotations

import os
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from paceline.core.errors import ConfigError
from paceline.core.mesh import Mesh, parse
from paceline.core.settings import Settings
from paceline.launch import names
from paceline.parallel.precision import make_precision

# Worth importing torch for
_OF_ROUNDS = ("quorum", "overlap", "warmup", "inner", "median", "trimmed", "post_local", "guest")
# Of NVIDIA's driver, of Windows' (WSL), and of AMD's, whose devices torch calls cuda too.
_GPUS = ("nvidia[0-9]*", "nvidiactl", "dxg", "kfd")


def check(settings: Settings, *, here: bool = True) -> None:
    """ConfigError where members of these settings could not begin to train; `here`: some do on this host."""
    check_strategy(settings.strategy, settings.codec)
    make_precision(settings.precision).check(settings)
    if here:
        check_device(settings.device)


def aside(check: Callable[[], None]) -> None:
    """Make a check in a process of its own: torch, which it may import, would stay with this one for as long as the run
    lasts, in 150 MB. Where that process does not get to an answer, and where torch is here already, it is made here."""
    if "torch" in sys.modules or threading.active_count() > 1:
        check()
        return
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        failed = 1
        try:
            check()
            failed = 0
        except ConfigError as error:
            os.write(writer, str(error).encode())
            failed = 0
        finally:
            os._exit(failed)
    os.close(writer)
    with open(reader, "rb") as stream:
        wrong = stream.read().decode()
    _, failed = os.waitpid(child, 0)
    if wrong:
        raise ConfigError(wrong)
    if failed:
        check()


def check_elastic(settings: Settings, why: str = "-n MIN:MAX") -> None:
    """Refuse what members of all-reduce cannot come to and go from; `why` they may."""
    if settings.transport in ("gloo", "nccl"):
        raise ConfigError(
            f"{why} does not go with --transport {settings.transport}: torch's groups end with the first member "
            f"that is lost; {'give one number (-n 4), or ' if why[:2] == '-n' else ''}leave --transport at auto"
        )
    if settings.servers != "auto":
        raise ConfigError(
            f"{why} does not go with --servers {settings.servers}: all-reduce has no servers; leave it out"
        )


def check_fixed(settings: Settings) -> None:
    """Refuse what needs members that may come and go."""
    if settings.lr_rule != "keep":
        raise ConfigError(
            f"--lr-rule {settings.lr_rule}: the learning rate follows the number of members in elastic runs of "
            "all-reduce; give -n MIN:MAX, or leave it out"
        )
    if settings.stragglers == "drop":
        raise ConfigError(
            "--stragglers drop: members can leave only a run that goes on without them; give -n MIN:MAX, or use "
            "--stragglers tell or less"
        )


def check_mesh(settings: Settings, members: int, *, elastic: str, served: bool) -> None:
    """Refuse a mesh that does not fit the members, and what cannot be cut; `elastic`: why members come and go."""
    refuse_zero(
        settings, parse(settings.mesh, members, elastic or (f"--strategy {settings.strategy}" if served else ""))
    )


def refuse_zero(settings: Settings, mesh: Mesh) -> None:
    """ZeRO shares out what replicas that are cut have shared out already."""
    if settings.strategy.partition("(")[0].strip() == "zero" and mesh.cuts:
        raise ConfigError(
            f"--mesh {mesh.words} does not go with --strategy {settings.strategy}: zero shares out what is in parts "
            "already; leave one of both out"
        )


def check_strategy(text: str, codec: str = "") -> None:
    """Make the strategy once. Names alone are checked by `names`; only options, those that are missing, and codecs that
    a strategy may not take, are worth importing torch for."""
    coded = codec not in ("", "none") and text != "allreduce"
    if coded or text.strip() in names.INCOMPLETE or any(mark in text + codec for mark in "(,"):
        from paceline.strategies import make_strategy

        make_strategy(text, codec)


def check_rounds(strategy: str, members: tuple[int, int] | int) -> None:
    """Refuse what local steps cannot do with members that come and go, as few and as many as these, or with so many
    that stay; and what a guest cannot."""
    if not any(word in strategy for word in _OF_ROUNDS):
        return
    from paceline.strategies import Guest, Local, make_strategy

    made = make_strategy(strategy)
    if isinstance(made, Guest):
        made.refuse(members if isinstance(members, int) else members[1], elastic=not isinstance(members, int))
    elif isinstance(made, Local) and isinstance(members, int):
        made.plan.refuse_fixed()
        if made.options["inner"] == "none":  # else sites count, which nobody knows yet
            made.plan.average.check(members)
    elif isinstance(made, Local) and not isinstance(members, int):
        made.refuse_elastic(*members)


def shows_gpu(dev: Path = Path("/dev")) -> bool:
    """Whether this host shows a sign of one."""
    return any(any(dev.glob(name)) for name in _GPUS) or shutil.which("nvidia-smi") is not None


def check_device(device: str, dev: Path = Path("/dev")) -> None:
    """Refuse a GPU where there is no sign of one; which there are only torch knows, in the members."""
    if not device.startswith("cuda") or shows_gpu(dev):
        return
    raise ConfigError(
        f"device {device!r} was asked for, but this host shows no GPU: there is no /dev/nvidia* and no nvidia-smi. "
        f"Use --device cpu, or install the driver; in a container, pass the GPU on (docker run --gpus all)"
    )
