"""From sample indices to a batch.

`fetcher` looks at the dataset once and picks the way: where the dataset is made of tensors, a batch is one
`index_select` per tensor; otherwise samples are read one by one (or all at once by `__getitems__`, as torch
does) and collated. A batch is what torch's own DataLoader would give for the same indices.

An error in the dataset keeps its type and gets a note that names the sample.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Subset, TensorDataset, default_collate

Collate = Callable[[list[Any]], Any]


class TensorFetch:
    """Batches of a dataset made of tensors; nothing is drawn and no user code is called."""

    draws = False  # it cannot

    def __init__(self, tensors: Sequence[Tensor], indices: Tensor | None, single: bool) -> None:
        self.tensors, self.indices, self.single = list(tensors), indices, single

    def __call__(self, indices: Tensor) -> Any:
        if self.indices is not None:
            indices = self.indices[indices]
        try:
            batch = [tensor.index_select(0, indices.to(tensor.device)) for tensor in self.tensors]
        except (IndexError, RuntimeError) as error:
            error.add_note(f"while reading samples {few(indices.tolist())}")
            raise
        return batch[0] if self.single else batch

    def cut(self, cut: Callable[[Any], Any]) -> TensorFetch:
        """A fetch that sees only a part of each sample; a view, nothing is copied."""
        whole: Any = self.tensors[0] if self.single else self.tensors
        part = cut(whole)
        return TensorFetch([part] if self.single else part, self.indices, self.single)


class SampleFetch:
    """Batches of any other map-style dataset."""

    draws = True  # perhaps

    def __init__(self, dataset: Any, collate: Collate | None, after: Callable[[Any], Any] | None = None) -> None:
        self.dataset, self.collate, self.after = dataset, collate or default_collate, after

    def __call__(self, indices: Tensor | list[int]) -> Any:
        wanted: list[int] = indices.tolist() if isinstance(indices, Tensor) else indices
        batch = collated(self._samples(wanted), self.collate, lambda: f"samples {few(wanted)}")
        return self.after(batch) if self.after else batch

    def _samples(self, wanted: list[int]) -> list[Any]:
        at_once = getattr(self.dataset, "__getitems__", None)
        samples: list[Any] = []
        try:
            if at_once is not None:
                samples = list(at_once(wanted))
            else:
                for index in wanted:
                    samples.append(self.dataset[index])
        except Exception as error:
            where = f"sample {wanted[len(samples)]}" if at_once is None else f"samples {few(wanted)}"
            tell(error, f"while reading {where} of {type(self.dataset).__name__}")
            raise
        if len(samples) != len(wanted):
            kind = type(self.dataset).__name__
            raise ValueError(f"{kind}.__getitems__ gave {len(samples)} samples for {len(wanted)} indices")
        return samples

    def cut(self, cut: Callable[[Any], Any]) -> SampleFetch:
        return SampleFetch(self.dataset, self.collate, cut)


Fetch = TensorFetch | SampleFetch


def fetcher(dataset: Any, collate: Collate | None) -> Fetch:
    """The quickest way to make batches of a map-style dataset."""
    if collate is None:
        inner, indices = dataset, None
        while type(inner) is Subset:
            own = torch.as_tensor(inner.indices, dtype=torch.int64)
            indices = own if indices is None else own[indices]
            inner = inner.dataset
        # Only the class itself: a subclass may do anything in __getitem__.
        if type(inner) is TensorDataset:
            return TensorFetch(inner.tensors, indices, single=False)
        if type(inner) is Tensor:
            return TensorFetch([inner], indices, single=True)
    return SampleFetch(dataset, collate)


def collated(samples: list[Any], collate: Collate, where: Callable[[], str]) -> Any:
    """One batch; an error says which samples could not be collated."""
    try:
        return collate(samples)
    except Exception as error:
        tell(error, f"while collating {where()}")
        raise


def tell(error: Exception, note: str) -> None:
    """Add a note to an error; a StopIteration, which would end the loop in silence, becomes another error."""
    if isinstance(error, StopIteration):
        raise RuntimeError(f"StopIteration {note}: a dataset must not raise it") from error
    error.add_note(note)


def few(indices: list[int]) -> str:
    """The first of many, for a message."""
    shown = ", ".join(map(str, indices[:8]))
    return f"[{shown}, …]" if len(indices) > 8 else f"[{shown}]"
