"""What is computed on parts, and how: for each function, which parts it needs and where those of its result lie.

A rule gets what the function was called with, and answers NotImplemented where it does not know: then wholes are put
together. Random numbers: a mask of a whole tensor is drawn from torch's own stream, which is the same on all members of
a split; one of a tensor in parts from a stream of the member's own, which begins with a number from that one.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from paceline.parallel.fellows import Fellows, collect, enter, part, total
from paceline.parallel.fellows import spread as to_parts
from paceline.parallel.lay import Lay, even
from paceline.parallel.spread import RULES, Rule, Spread, wholes

Args = Sequence[Any]
Named = dict[str, Any]
Func = Callable[..., Any]


def rule(*names: str) -> Callable[[Rule], Rule]:
    def keep(made: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, made))
        return made

    return keep


@contextlib.contextmanager
def own_stream(fellows: Fellows, device: torch.device) -> Iterator[None]:
    """Random numbers of this member's own; afterwards all go on alike."""
    begin = int(torch.randint(2**62, ()))
    stream = torch.default_generator
    if device.type == "cuda":
        stream = torch.cuda.default_generators[device.index or 0]
    before = stream.get_state()
    stream.manual_seed(begin + fellows.rank)
    try:
        yield
    finally:
        stream.set_state(before)


# ---- element by element

_BY_ELEMENT = (
    "relu relu_ gelu silu silu_ mish elu selu celu leaky_relu leaky_relu_ relu6 hardtanh hardswish hardsigmoid "
    "softplus softsign tanh tanh_ sigmoid sigmoid_ logsigmoid erf exp exp_ log sqrt rsqrt square abs neg pow "
    "sin cos clamp clamp_ add add_ sub sub_ mul mul_ div div_ true_divide __add__ __radd__ __iadd__ __sub__ "
    "__rsub__ __isub__ __mul__ __rmul__ __imul__ __truediv__ __rtruediv__ __rdiv__ __itruediv__ __neg__ "
    "__pow__ __rpow__ rsub subtract multiply divide maximum minimum where masked_fill masked_fill_ nan_to_num "
    "float half bfloat16 double to contiguous clone detach data type_as eq ne lt le gt ge __eq__ __ne__ __lt__ "
    "__le__ __gt__ __ge__ logical_not logical_and logical_or isfinite isnan isinf addcmul lerp zeros_like "
    "ones_like full_like empty_like"
)


@rule(*_BY_ELEMENT.split())
def by_element(func: Func, args: Args, named: Named) -> Any:
    first = next((a for a in [*args, *named.values()] if isinstance(a, Spread)), None)
    if first is None:
        return NotImplemented
    name = func.__name__
    changed = (name.endswith("_") and not name.endswith("__")) or (name.startswith("__i") and name != "__invert__")
    if changed and first is not args[0]:
        return NotImplemented
    back = first.ndim - first.lay.dim  # from the last dimension
    given = [_beside(a, first, back) for a in args]
    options = {key: _beside(a, first, back) for key, a in named.items()}
    if any(a is NotImplemented for a in [*given, *options.values()]) or (name == "where" and len(args) == 1):
        return NotImplemented
    out = func(*given, **options)
    if changed:
        first.local = out
        return first
    return Spread(out, first.lay.at(out.ndim - back), first.fellows)


def _beside(other: Any, first: Spread, back: int) -> Any:
    """Another operand, for the part of the first."""
    if not isinstance(other, torch.Tensor):
        return other
    if isinstance(other, Spread):
        if other.lay.blocks == first.lay.blocks and other.ndim - other.lay.dim == back:
            return other.local
        other = other.whole()
    if other.ndim < back or other.shape[-back] == 1:
        return enter(other, first.fellows)
    if other.shape[-back] == first.lay.whole:
        return part(other, first.fellows, first.lay.at(other.ndim - back))
    return NotImplemented


# ---- shapes


@rule("view", "reshape", "flatten", "unflatten")
def reshaped(func: Func, args: Args, named: Named) -> Any:
    x = args[0]
    if not isinstance(x, Spread) or named or any(isinstance(a, torch.dtype) for a in args):
        return NotImplemented
    name = func.__name__
    if name == "flatten":
        shape = _flattened(x.shape, *args[1:])
    elif name == "unflatten":
        at = args[1] % x.ndim
        shape = [*x.shape[:at], *args[2], *x.shape[at + 1 :]]
    else:
        shape = list(args[1]) if isinstance(args[1], tuple | list) else list(args[1:])
    if -1 in shape:
        known = math.prod(n for n in shape if n != -1)
        shape[shape.index(-1)] = x.numel() // known if known else 0
    found = _relaid(list(x.shape), shape, x.lay)
    if found is None:
        return NotImplemented
    mine = list(shape)
    mine[found.dim] = found.own(x.fellows.rank)
    return Spread(x.local.view(mine) if name == "view" else x.local.reshape(mine), found, x.fellows)


def _flattened(shape: Sequence[int], start: int = 0, end: int = -1) -> list[int]:
    end %= len(shape)
    return [*shape[:start], math.prod(shape[start : end + 1]), *shape[end + 1 :]]


def _relaid(old: list[int], new: list[int], lay: Lay) -> Lay | None:
    """Where parts lie after a change of shape; None: nowhere that can be said so.

    >>> _relaid([2, 5, 12], [2, 5, 4, 3], Lay(2, ((6, 6),)))
    Lay(dim=2, blocks=((2, 2),))
    >>> _relaid([2, 5, 12], [2, 5, 3, 2, 2], Lay(2, ((2, 2),) * 3))
    Lay(dim=3, blocks=((1, 1),))
    >>> _relaid([2, 5, 4, 3], [10, 12], Lay(2, ((2, 2),)))
    Lay(dim=1, blocks=((6, 6),))
    >>> _relaid([2, 5, 12], [2, 5, 3, 4], Lay(2, ((6, 6),)))
    """
    if 0 in old or math.prod(old) != math.prod(new):
        return None
    before = math.prod(old[: lay.dim])  # elements in front of the dimension that is cut
    at, passed = 0, 1
    while at < len(new) and (passed < before or new[at] == 1):
        passed *= new[at]
        at += 1
    if passed != before or at == len(new):
        return None
    if new[at] == lay.whole:
        return lay.at(at)
    after = math.prod(old[lay.dim + 1 :])
    blocks = set(lay.blocks)
    if len(blocks) > 1:
        return None
    if len(lay.blocks) > 1:  # each in its own row
        if new[at] != len(lay.blocks):
            return None
        at += 1
    rest = math.prod(new[at + 1 :])
    (block,) = blocks
    if any(size * after % rest for size in block):
        return None
    return Lay(at, (tuple(size * after // rest for size in block),))


@rule("transpose", "swapaxes", "swapdims")
def transposed(func: Func, args: Args, named: Named) -> Any:
    if named:
        return NotImplemented
    x, a, b = args
    order = list(range(x.ndim))
    order[a], order[b] = order[b], order[a]
    return Spread(x.local.transpose(a, b), x.lay.at(order.index(x.lay.dim)), x.fellows)


@rule("permute")
def permuted(func: Func, args: Args, named: Named) -> Any:
    if named:
        return NotImplemented
    x = args[0]
    order = [n % x.ndim for n in (args[1] if isinstance(args[1], tuple | list) else args[1:])]
    return Spread(x.local.permute(order), x.lay.at(order.index(x.lay.dim)), x.fellows)


@rule("t", "T", "mT")
def turned(func: Func, args: Args, named: Named) -> Any:
    x = args[0]
    return transposed(func, (x, -2, -1), {}) if x.ndim == 2 or "mT" in str(func) else NotImplemented


@rule("unsqueeze")
def unsqueezed(func: Func, args: Args, named: Named) -> Any:
    if named:
        return NotImplemented
    x, at = args[0], args[1] % (args[0].ndim + 1)
    return Spread(x.local.unsqueeze(at), x.lay.at(x.lay.dim + (at <= x.lay.dim)), x.fellows)


@rule("chunk", "split", "tensor_split", "unsafe_chunk", "unsafe_split")
def divided(func: Func, args: Args, named: Named) -> Any:
    if len(args) < 2 or named.keys() - {"dim"}:
        return NotImplemented
    x, how = args[0], args[1]
    dim = (args[2] if len(args) > 2 else named.get("dim", 0)) % x.ndim
    if dim != x.lay.dim:
        return type_of(func(x.local, how, dim=dim), x)
    totals = [sum(block) for block in x.lay.blocks]
    if "chunk" in func.__name__:
        fits = how == len(totals) and len(set(totals)) == 1
    elif func.__name__ in ("split", "unsafe_split"):
        fits = list(how) == totals if isinstance(how, tuple | list) else totals == [how] * len(totals)
    else:
        fits = False
    if not fits:
        return NotImplemented
    pieces = x.local.split([block[x.fellows.rank] for block in x.lay.blocks], dim)
    return tuple(Spread(piece, Lay(dim, (block,)), x.fellows) for piece, block in zip(pieces, x.lay.blocks))


def type_of(pieces: Any, x: Spread) -> tuple[Spread, ...]:
    return tuple(Spread(piece, x.lay, x.fellows) for piece in pieces)


@rule("unbind", "__iter__")
def unbound(func: Func, args: Args, named: Named) -> Any:
    x = args[0]
    dim = (args[1] if len(args) > 1 else named.get("dim", 0)) % x.ndim
    if dim == x.lay.dim:
        return NotImplemented
    found = tuple(Spread(p, x.lay.at(x.lay.dim - (dim < x.lay.dim)), x.fellows) for p in x.local.unbind(dim))
    return iter(found) if func.__name__ == "__iter__" else found


@rule("__getitem__")
def indexed(func: Func, args: Args, named: Named) -> Any:
    """Numbers and slices, where the dimension that is cut is kept as it is."""
    x, index = args
    if not isinstance(x, Spread):
        return NotImplemented
    keys = list(index) if isinstance(index, tuple) else [index]
    if any(not (isinstance(k, int | slice) or k is None or k is Ellipsis) or isinstance(k, bool) for k in keys):
        return NotImplemented
    if Ellipsis in keys:
        at = keys.index(Ellipsis)
        keys[at : at + 1] = [slice(None)] * (x.ndim - sum(k is not None for k in keys) + 1)
    keys += [slice(None)] * (x.ndim - sum(k is not None for k in keys))
    dim, kept = 0, 0
    new = None
    for key in keys:
        if key is not None and dim == x.lay.dim:
            if key != slice(None):
                return NotImplemented
            new = kept
        dim += key is not None
        kept += not isinstance(key, int)
    assert new is not None
    return Spread(x.local[tuple(keys)], x.lay.at(new), x.fellows)


# ---- products


@rule("linear")
def linear(func: Func, args: Args, named: Named) -> Any:
    given = dict(zip(("input", "weight", "bias"), args)) | named
    x, weight, bias = given["input"], given["weight"], given.get("bias")
    some: Any = weight if isinstance(weight, Spread) else x if isinstance(x, Spread) else bias
    fellows = some.fellows
    if isinstance(weight, Spread) and weight.lay.dim == 0:  # by columns of the result
        beside = None if bias is None else _beside(bias, transposed(func, (weight, 0, 1), {}), 1)
        out = F.linear(_entered(x, fellows), weight.local, beside)
        return Spread(out, weight.lay.at(out.ndim - 1), fellows)
    if isinstance(x, Spread) and x.lay.dim != x.ndim - 1 and not isinstance(weight, Spread):
        bias = wholes(bias)
        out = F.linear(x.local, enter(weight, fellows), None if bias is None else enter(bias, fellows))
        return Spread(out, x.lay, fellows)
    lay = weight.lay if isinstance(weight, Spread) else x.lay if isinstance(x, Spread) else None
    if lay is None:
        return NotImplemented
    mine = weight.local if isinstance(weight, Spread) else part(weight, fellows, lay.at(1))
    out = added_up(F.linear(_along(x, fellows, lay), mine), fellows)
    return out if bias is None else out + wholes(bias)


def _entered(x: torch.Tensor, fellows: Fellows) -> torch.Tensor:
    """All of x, for products with parts."""
    if not isinstance(x, Spread):
        return enter(x, fellows)
    if x.lay.dim < x.ndim - 1:
        fellows.along = x.lay.dim
    return collect(x.local, fellows, x.lay)


def _along(x: torch.Tensor, fellows: Fellows, lay: Lay) -> torch.Tensor:
    """The part of x along its last dimension."""
    if isinstance(x, Spread):
        if x.lay == lay.at(x.ndim - 1):
            return x.local
        x = x.whole()
    return part(x, fellows, lay.at(x.ndim - 1))


def added_up(out: torch.Tensor, fellows: Fellows) -> torch.Tensor:
    """The sum of everyone's: whole, or in parts of the sequence."""
    if fellows.sequence and out.ndim >= 3:
        dim = min(fellows.along, out.ndim - 2)
        lay = Lay(dim, (even(out.shape[dim], fellows.size),))
        return Spread(to_parts(out, fellows, lay), lay, fellows)
    return total(out, fellows)


@rule("addmm")
def addmm(func: Func, args: Args, named: Named) -> Any:
    bias, x, weight = args
    if named or not isinstance(weight, Spread):
        return NotImplemented
    return linear(F.linear, (x, transposed(func, (weight, 0, 1), {}), bias), {})


@rule("matmul", "__matmul__", "__rmatmul__", "bmm", "mm")
def matmul(func: Func, args: Args, named: Named) -> Any:
    a, b = [*args, *named.values()]
    if func.__name__ == "__rmatmul__":
        a, b = b, a
    if a.ndim < 2 or b.ndim < 2:
        return NotImplemented
    first = a if isinstance(a, Spread) else b
    back = first.ndim - first.lay.dim
    fellows = first.fellows
    if back > 2:  # products side by side
        left, right = (_beside(each, first, back) for each in (a, b))
        if left is NotImplemented or right is NotImplemented:
            return NotImplemented
        out = torch.matmul(left, right)
        return Spread(out, first.lay.at(out.ndim - back), fellows)
    if isinstance(a, Spread) and back == 2 and not isinstance(b, Spread):
        out = torch.matmul(a.local, enter(b, fellows))
        return Spread(out, a.lay.at(out.ndim - 2), fellows)
    if isinstance(b, Spread) and b.ndim - b.lay.dim == 1 and not isinstance(a, Spread):
        out = torch.matmul(enter(a, fellows), b.local)
        return Spread(out, b.lay.at(out.ndim - 1), fellows)
    return NotImplemented


@rule("scaled_dot_product_attention")
def attention(func: Func, args: Args, named: Named) -> Any:
    names = ("query", "key", "value", "attn_mask", "dropout_p")
    given = {**dict(zip(names, args)), **named}
    if len(args) > len(names):
        given |= dict(zip(("is_causal", "scale", "enable_gqa"), args[len(names) :]))
    query = given["query"]
    if not all(isinstance(given[n], Spread) and given[n].ndim - given[n].lay.dim == 3 for n in names[:3]):
        return NotImplemented
    if given["key"].lay.blocks != query.lay.blocks and not given.get("enable_gqa"):
        return NotImplemented
    if (mask := given.get("attn_mask")) is not None:
        given["attn_mask"] = _beside(mask, query, 3)
        if given["attn_mask"] is NotImplemented:
            return NotImplemented
    given |= {name: given[name].local for name in names[:3]}
    with own_stream(query.fellows, query.device) if given.get("dropout_p") else contextlib.nullcontext():
        out = func(**given)
    return Spread(out, query.lay, query.fellows)


# ---- layers


@rule("dropout", "alpha_dropout")
def dropout(func: Func, args: Args, named: Named) -> Any:
    x = args[0] if args else named.pop("input")
    if named.get("inplace") or (len(args) > 3 and args[3]):
        return NotImplemented
    with own_stream(x.fellows, x.device):
        return Spread(func(x.local, *args[1:], **named), x.lay, x.fellows)


@rule("layer_norm", "rms_norm")
def normalised(func: Func, args: Args, named: Named) -> Any:
    x, shape, *rest = args
    if not isinstance(x, Spread) or x.lay.dim >= x.ndim - len(shape):
        return NotImplemented
    given = [enter(r, x.fellows) if isinstance(r, torch.Tensor) else r for r in wholes(rest)]
    named = {k: enter(r, x.fellows) if isinstance(r, torch.Tensor) else r for k, r in wholes(named).items()}
    return Spread(func(x.local, shape, *given, **named), x.lay, x.fellows)


@rule("softmax", "log_softmax")
def softmax(func: Func, args: Args, named: Named) -> Any:
    x = args[0]
    dim = args[1] if len(args) > 1 else named.get("dim")
    if dim is None:
        return NotImplemented
    if dim % x.ndim != x.lay.dim:
        return Spread(func(x.local, *args[1:], **named), x.lay, x.fellows)
    mine = x.local.to(named["dtype"]) if named.get("dtype") else x.local
    top = x.fellows.sum(_most(mine, dim), torch.distributed.ReduceOp.MAX)
    low = mine - top
    sums = enter(total(low.exp().sum(dim, keepdim=True), x.fellows), x.fellows)
    return Spread(low - sums.log() if "log" in func.__name__ else low.exp() / sums, x.lay, x.fellows)


def _most(x: torch.Tensor, dim: int) -> torch.Tensor:
    x = x.detach()
    if x.shape[dim]:
        return x.amax(dim, keepdim=True)
    return x.sum(dim, keepdim=True).fill_(-math.inf)


@rule("sum", "mean")
def summed(func: Func, args: Args, named: Named) -> Any:
    if named.keys() - {"dim", "keepdim"}:
        return NotImplemented
    x = args[0]
    dim = args[1] if len(args) > 1 else named.get("dim")
    keep = bool(args[2] if len(args) > 2 else named.get("keepdim", False))
    dims = range(x.ndim) if dim is None else [d % x.ndim for d in (dim if isinstance(dim, tuple | list) else [dim])]
    dims = list(dims)
    count = math.prod(x.shape[d] for d in dims) if func.__name__ == "mean" else 1
    mine = x.local.sum(dims, keepdim=keep)
    if x.lay.dim in dims:
        return total(mine, x.fellows) / count if count != 1 else total(mine, x.fellows)
    moved = x.lay.dim if keep else x.lay.dim - sum(d < x.lay.dim for d in dims)
    return Spread(mine / count if count != 1 else mine, x.lay.at(moved), x.fellows)


@rule("embedding")
def embedding(func: Func, args: Args, named: Named) -> Any:
    names = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
    given = {**dict(zip(names, args)), **named}
    ids, weight, pad = given["input"], given["weight"], given.get("padding_idx")
    odd = given.get("max_norm") is not None or given.get("scale_grad_by_freq") or given.get("sparse")
    if odd or not isinstance(weight, Spread) or isinstance(ids, Spread) or len(weight.lay.blocks) > 1:
        return NotImplemented
    fellows, (sizes,) = weight.fellows, weight.lay.blocks
    if weight.lay.dim == 1:
        out = F.embedding(ids, weight.local, pad)
        return Spread(out, weight.lay.at(out.ndim - 1), fellows)
    first, mine = sum(sizes[: fellows.rank]), sizes[fellows.rank]
    if bool(((ids < 0) | (ids >= weight.lay.whole)).any()):
        raise IndexError(f"index out of range: the embedding has {weight.lay.whole} rows")
    here = (ids >= first) & (ids < first + mine)
    if pad is not None:  # that row has no gradient
        here = here & (ids != pad % weight.lay.whole)
    if mine:
        out = F.embedding((ids - first).masked_fill(~here, 0), weight.local).masked_fill(~here.unsqueeze(-1), 0.0)
    else:
        out = weight.local.sum() * torch.zeros(*ids.shape, weight.shape[1], device=ids.device)  # with a way back
    if pad is not None and first <= pad % weight.lay.whole < first + mine:
        row = weight.local[pad % weight.lay.whole - first].detach()
        out = torch.where((ids == pad % weight.lay.whole).unsqueeze(-1), row, out)
    return added_up(out, fellows)
