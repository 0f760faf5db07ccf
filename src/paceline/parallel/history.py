"""How the tensors of a model came to be: written down while it is made without memory, done again for one at a time.

What a constructor does to tensors goes through torch's dispatcher, also on the device "meta", where nothing is
computed. Each operation that makes a tensor or writes into one is kept, with where its tensors lie in which memory. To
have the values of one tensor, those operations are done on the CPU that made its memory, wrote to it, or made what was
read for that, in their order. Each draws from a seed of its own, so a tensor has the same values whoever makes it, and
alone or among others.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

_FROM_VALUES = (torch.tensor, torch.as_tensor, torch.asarray)  # what they are given is no tensor of ours


class _Place(NamedTuple):
    """Where a tensor lies; `memory` is a number of this history's."""

    memory: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def within(self, storage: torch.UntypedStorage) -> Tensor:
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.size, self.stride)


class _Operation(NamedTuple):
    call: Any
    args: Any  # with places in place of tensors
    kwargs: dict[str, Any]
    makes: tuple[tuple[int, _Place], ...]  # which of its results have memory of their own, and where they lie
    writes: tuple[int, ...]  # into which memory


class History:
    """Of the tensors of one model: enter it while the model is made on the device "meta", then `keep` the model."""

    def __init__(self) -> None:
        self._operations: list[_Operation] = []
        self._of: dict[int, list[int]] = defaultdict(list)  # by memory: the operations that made it or wrote to it
        self._numbers: dict[int, int] = {}  # of memory, by the storage's address
        self._alive: list[torch.UntypedStorage] = []  # so that no other storage gets that address
        self._named: dict[str, _Place | Tensor] = {}
        self._modes = _Calls(self), _Operations(self)

    def __enter__(self) -> History:
        for mode in self._modes:
            mode.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *how: Any) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*how)  # type: ignore[no-untyped-call]

    def keep(self, model: nn.Module) -> None:
        """The names of what the model has now."""
        for name, tensor in named(model):
            self._named[name] = self._place(tensor) if tensor.is_meta else tensor.detach()

    @torch.no_grad()
    def whole(self, name: str, seed: int) -> Tensor:
        """The values of one tensor, on the CPU."""
        place = self._named[name]
        if isinstance(place, Tensor):
            return place
        made: dict[int, torch.UntypedStorage] = {}
        state = torch.random.get_rng_state()
        for number in sorted(self._needed(place.memory)):
            torch.default_generator.manual_seed(seed * 1_000_003 + number)
            self._do(self._operations[number], made)
        torch.random.set_rng_state(state)
        return place.within(made[place.memory])

    def _needed(self, memory: int) -> set[int]:
        needed: set[int] = set()
        before = [(memory, len(self._operations))]  # memory, as it was before that operation
        while before:
            memory, end = before.pop()
            for number in self._of[memory]:
                if number < end and number not in needed:
                    needed.add(number)
                    operation = self._operations[number]
                    before += [(p.memory, number) for p in _places((operation.args, operation.kwargs))]
        return needed

    def _do(self, operation: _Operation, made: dict[int, torch.UntypedStorage]) -> None:
        def real(one: Any) -> Any:
            return one.within(made[one.memory]) if isinstance(one, _Place) else one

        args, kwargs = tree_map(real, (operation.args, operation.kwargs), is_leaf=_is_place)
        results = tree_leaves(operation.call(*args, **kwargs))
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for which, place in operation.makes:
            result = results[which]
            lies = (result.stride(), result.storage_offset()) == (place.stride, place.offset)
            if not lies or result.untyped_storage().data_ptr() in given:
                result = torch.empty_strided(place.size, place.stride, dtype=place.dtype).copy_(result)
            made[place.memory] = result.untyped_storage()

    # while the model is made

    def add(self, call: Any, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        read = {t.untyped_storage()._cdata for t in _tensors((args, kwargs))}
        results = tree_leaves(out)
        new = [
            (which, self._place(t))
            for which, t in enumerate(results)
            if isinstance(t, Tensor) and t.is_meta and t.untyped_storage()._cdata not in read
        ]
        written = [self._place(t).memory for t in _written(call, args, kwargs) if t.is_meta]
        if not new and not written:
            return  # a view, or nothing of ours
        args, kwargs = tree_map(self._kept, (args, kwargs))
        self._append(_Operation(call, args, kwargs, tuple(new), tuple(written)))

    def write(self, call: Any, given: dict[str, Any]) -> None:
        """A call that writes into the tensors that it is given, and makes none."""
        written = [self._place(t).memory for t in _tensors(given) if t.is_meta]
        self._append(_Operation(call, (), tree_map(self._kept, given), (), tuple(written)))

    def give(self, values: Tensor) -> Tensor:
        """A tensor without memory that stands for one with given values."""
        stands = torch.empty_like(values, device="meta")
        self.write(_copy, {"into": stands, "values": values})
        return stands

    def _append(self, operation: _Operation) -> None:
        for memory in {*operation.writes, *(place.memory for _, place in operation.makes)}:
            self._of[memory].append(len(self._operations))
        self._operations.append(operation)

    def _kept(self, one: Any) -> Any:
        if isinstance(one, torch.Generator):
            return None  # seeds are ours
        if isinstance(one, torch.device) and one.type == "meta":
            return torch.device("cpu")
        return self._place(one) if isinstance(one, Tensor) and one.is_meta else one

    def _place(self, tensor: Tensor) -> _Place:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._numbers:
            self._numbers[storage._cdata] = len(self._alive)
            self._alive.append(storage)
        number = self._numbers[storage._cdata]
        return _Place(number, tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, history: History) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._history = history

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self._history.add(func, args, kwargs or {}, out)
        return out


class _Calls(TorchFunctionMode):
    """What does not reach the dispatcher: values that Python gives, and initialisers that do nothing without memory."""

    def __init__(self, history: History) -> None:
        super().__init__()
        self._history = history

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _FROM_VALUES and kwargs.get("device") is None and not _tensors((args, kwargs)):
            return self._history.give(func(*args, **{**kwargs, "device": "cpu"}))
        if getattr(func, "__self__", None) is Tensor.is_meta and args[0].is_meta:
            asks = sys._getframe(1)
            if asks.f_globals.get("__name__") == "torch.nn.init":  # it will do nothing, and some need values for it
                code = asks.f_code
                given = {name: asks.f_locals[name] for name in code.co_varnames[: code.co_argcount]}
                self._history.write(getattr(nn.init, code.co_name), given)
        return func(*args, **kwargs)


def _copy(into: Tensor, values: Tensor) -> None:
    into.copy_(values)


def named(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers under all their names."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _written(call: Any, args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    found: list[Any] = []
    for position, told in enumerate(call._schema.arguments):
        if told.alias_info is not None and told.alias_info.is_write:
            found.append(args[position] if position < len(args) else kwargs.get(told.name))
    return _tensors(found)


def _tensors(found: Any) -> list[Tensor]:
    return [one for one in tree_leaves(found) if isinstance(one, Tensor)]


def _is_place(one: Any) -> bool:
    return isinstance(one, _Place)


def _places(found: Any) -> list[_Place]:
    return [one for one in tree_leaves(found, is_leaf=_is_place) if isinstance(one, _Place)]
