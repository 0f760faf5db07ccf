"""What can be dealt out again: where members come and go, others take over what they had not done."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch.utils.data import IterableDataset

from paceline.core.errors import ConfigError
from paceline.data import ByFile, Loader
from paceline.data.uploads import Uploads


def check(dataset: Any, partition: Any) -> None:
    """Refuse what only the member that has opened it can go on with."""
    if isinstance(partition, ByFile) or isinstance(dataset, Uploads):
        what = "uploads" if isinstance(dataset, Uploads) else "files that members open for themselves (ByFile)"
        raise ConfigError(
            f"run.loader: {what} cannot be dealt out again when members come or go: start the run with -n N, or "
            "give a dataset with a length, or a stream"
        )


def check_length(dataset: Any) -> None:
    """Refuse a stream where members draw at their own pace, and each has come to another place in it."""
    if isinstance(dataset, IterableDataset) or not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise ConfigError(
            "run.loader: a stream cannot be dealt out again by members that train apart and come and go: give a "
            "dataset with a length, or start the run with -n N"
        )


def check_same(theirs: Collection[str], ours: Collection[str]) -> None:
    """Refuse a newcomer that does not have what the others have, by name."""
    if odd := sorted(set(theirs) ^ set(ours)):
        whose = "the others" if odd[0] in theirs else "this member"
        raise ConfigError(
            f"{odd[0]!r} is known to {whose} only: where members come and go, call run.optimizer, run.loader and "
            "run.track before run.epochs, so that newcomers have the same"
        )


def check_unbound(options: Mapping[str, Any]) -> None:
    """Refuse samples that only some members may train, where all have a part in every step."""
    if options.get("bound") is not None:
        raise ConfigError(
            "run.loader(..., bound=...): an elastic run without servers trains by all-reduce, in which all have a part "
            "in every step: use --strategy async or bounded(...), or choose samples by run.labels yourself"
        )


def check_dealt(loader: Loader) -> None:
    """With servers: refuse what is shared out among workers, of whom one may begin anew."""
    if loader.terms.pad and not loader.dealt:
        raise ConfigError(
            "run.loader: where lost workers are replaced, batches are dealt out, of a dataset with a length and "
            "without a partition of its own: give such a one, or leave --replacements and MIN:MAX out"
        )
