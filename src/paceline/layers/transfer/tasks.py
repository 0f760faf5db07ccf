"""Several tasks that are trained together: one body, a head for each task, each with its own data and loss.

    data    TaskData puts the datasets behind each other; a batch is a dict: {"digits": (x, y), "clothes": (x, y)}
    model   Tasks has the body once and the heads by name
    loss    the mean over the samples of a batch, each by the loss of its task

A task that a batch has nothing of gives its head no gradient, so that no optimizer touches it: neither weight decay nor
momentum moves it. Which member trains which task is said to the loader, see `TaskData`; over all members the gradient
is that of the mean loss over all samples, whoever had them.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, default_collate

from paceline.core.errors import ConfigError
from paceline.layers.transfer.names import near

Loss = Callable[[Any, Any], Tensor]


class TaskData(Dataset[Any]):
    """The datasets of several tasks as one; samples are tuples of a task's name, an input and a label.

        run.loader(data, batch_size=64, collate=data.collate)                            every member trains every task
        run.loader(data, batch_size=64, collate=data.collate, partition=data.by_rank)    member r task r, over again
        run.loader(data, batch_size=64, collate=data.collate, bound=data.labels)         with servers: members that have
                                                                                         the task as a --label

    >>> data = TaskData({"a": [(1.0, 0)] * 3, "b": [(2.0, 1)] * 2})
    >>> len(data), data[4], data.labels
    (5, ('b', 2.0, 1), ['a', 'a', 'a', 'b', 'b'])
    """

    def __init__(self, datasets: Mapping[str, Any]) -> None:
        if not datasets:
            raise ConfigError("TaskData({}): a dataset for each task is wanted, by name")
        for name, dataset in datasets.items():
            if not hasattr(dataset, "__len__") or not len(dataset):
                raise ConfigError(f"the dataset of the task {name!r} needs a length, and at least one sample")
        self.names = list(datasets)
        self._datasets = list(datasets.values())
        self._ends = list(itertools.accumulate(map(len, self._datasets)))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        task = bisect.bisect_right(self._ends, index)
        first = self._ends[task - 1] if task else 0
        sample = self._datasets[task][index - first]
        if not isinstance(sample, tuple | list) or len(sample) != 2:
            raise ConfigError(f"a sample of the task {self.names[task]!r} is not an input and a label")
        return self.names[task], *sample

    @staticmethod
    def collate(samples: Sequence[Any]) -> dict[str, list[Any]]:
        """A batch: for each task that it has samples of, inputs and labels."""
        found: dict[str, list[Any]] = {}
        for name, x, y in samples:
            found.setdefault(name, []).append((x, y))
        return {name: default_collate(own) for name, own in sorted(found.items())}

    @property
    def labels(self) -> list[str]:
        """The task of each sample."""
        return [name for name, dataset in zip(self.names, self._datasets) for _ in range(len(dataset))]

    @property
    def by_rank(self) -> ByTask:
        """A partition: with more members than tasks, those of a task share its samples; with fewer, a member has
        several tasks."""
        return ByTask(tuple(self._ends))


class ByTask:
    """A partition of `run.loader`, by tasks whose samples end at these indices."""

    whole: ClassVar[bool] = False

    def __init__(self, ends: tuple[int, ...]) -> None:
        self._ends = ends

    def check(self, length: int, size: int) -> None:
        if length != self._ends[-1]:
            raise ConfigError(
                f"by_rank is of {self._ends[-1]} samples, the loader has {length}: give both one TaskData"
            )

    def share(self, rest: Tensor, length: int, size: int, batch_size: int) -> list[Tensor]:
        """See `paceline.data.partition`."""
        task = torch.bucketize(rest, torch.tensor(self._ends), right=True)
        owner = torch.empty_like(rest)
        for each in range(len(self._ends)):
            members = torch.arange(each % size, size, len(self._ends)) if size > each else torch.tensor([each % size])
            at = (task == each).nonzero().flatten()
            owner[at] = members[torch.arange(len(at)) % len(members)]
        return [rest[owner == rank] for rank in range(size)]


class Tasks(nn.Module):
    """A body that all tasks have in common, and a head for each.

    >>> model = Tasks(nn.Linear(4, 8), {"a": nn.Linear(8, 3), "b": nn.Linear(8, 1)})
    >>> model(torch.ones(2, 4), "b").shape
    torch.Size([2, 1])
    """

    def __init__(self, body: nn.Module, heads: Mapping[str, nn.Module]) -> None:
        super().__init__()
        if not heads:
            raise ConfigError("Tasks(body, {}): a head for each task is wanted, by name")
        for name in heads:
            if not isinstance(name, str) or not name or "." in name or hasattr(nn.ModuleDict, name):
                raise ConfigError(f"the task {name!r}: its name becomes part of a parameter's, so it needs another one")
        self.body = body
        self.heads = nn.ModuleDict(heads)

    def forward(self, x: Tensor, task: str) -> Any:
        return self._head(task)(self.body(x))

    def loss(self, batch: Mapping[str, Sequence[Any]], losses: Mapping[str, Loss] | Loss) -> Tensor:
        """The mean over the samples of a batch that `TaskData.collate` made.

        Args:
            losses: `loss(output, label)` for each task, a mean over samples; or one for all.
        """
        if not isinstance(batch, Mapping) or not batch:
            raise ConfigError(
                "Tasks.loss wants a batch by tasks, {'name': (x, y)}: give run.loader collate=data.collate, where data "
                "is a transfer.TaskData"
            )
        total = sum(len(y) for _, y in batch.values())
        parts = []
        for task, (x, y) in batch.items():
            if isinstance(losses, Mapping) and task not in losses:
                raise ConfigError(f"there is no loss for the task {task!r}: {near(task, losses)}")
            loss = losses[task] if isinstance(losses, Mapping) else losses
            parts.append(loss(self(x, task), y) * (len(y) / total))
        return torch.stack(parts).sum()

    def _head(self, task: str) -> nn.Module:
        if task not in self.heads:
            raise ConfigError(f"there is no head for the task {task!r}: {near(task, self.heads)}")
        return self.heads[task]
