"""Which layers of a model are split, and how: by patterns of names, or found by themselves in transformers.

    column       a Linear's outputs (an Embedding's columns) are shared out; what comes out is in parts
    row          a Linear's inputs are shared out, and the products added up
    qkv          a column layer whose outputs are queries, keys and values, one after the other: each is shared out
    heads        an nn.MultiheadAttention, head by head
    vocabulary   an Embedding's rows, or the outputs of a Linear that makes logits, which leave the model in parts
    branch       a module that is independent of others of this kind: it lives on one member; a number: on that one

A pair of a column layer and a row layer with nothing between them but what acts on each part alone needs one exchange
on the way forward and one on the way back. Where something else stands between them, the plan is not wrong: parts are
put together for it.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from paceline.core.errors import ConfigError, nearest
from paceline.parallel.lay import Lay, even

Plan = Mapping[str, "str | int"]

KINDS = ("branch", "column", "heads", "qkv", "row", "vocabulary")
_QUERIES = [("q_proj", "k_proj", "v_proj"), ("q", "k", "v"), ("wq", "wk", "wv"), ("query", "key", "value")]
_QUERIES += [("to_q", "to_k", "to_v"), ("q_lin", "k_lin", "v_lin")]
_FUSED = ("qkv", "qkv_proj", "c_attn", "in_proj", "Wqkv", "to_qkv", "query_key_value")
_OUT = ("o_proj", "out_proj", "c_proj", "proj", "wo", "out", "to_out", "dense", "o", "out_lin")
_UP = ("up_proj", "up", "gate_proj", "gate", "fc1", "c_fc", "w1", "w3", "linear1", "lin1", "fc_in", "wi")
_DOWN = ("down_proj", "down", "fc2", "c_proj", "w2", "linear2", "lin2", "fc_out", "wo")
_HEADS = ("n_head", "num_heads", "n_heads", "num_attention_heads", "heads", "nhead")
_KV_HEADS = ("n_kv_head", "num_kv_heads", "n_kv_heads", "num_key_value_heads", "kv_heads")
_BETWEEN = (nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.LeakyReLU, nn.ELU, nn.Mish, nn.Dropout, nn.Identity)


def chosen(model: nn.Module, plan: Plan) -> dict[str, str | int]:
    """The kinds of the modules that the patterns match, by name; of several patterns the first counts."""
    if not isinstance(plan, Mapping):
        raise ConfigError(f'split={plan!r}: kinds by patterns of names are wanted, as in {{"*.up": "column"}}')
    if not plan:
        raise ConfigError("split={} names no layers: leave split= out to have them found, or say which")
    names = [name for name, _ in model.named_modules() if name]
    found: dict[str, str | int] = {}
    for pattern, kind in plan.items():
        if kind not in KINDS and type(kind) is not int:
            raise ConfigError(f"split={{{pattern!r}: {kind!r}}}: {nearest(str(kind), KINDS)}")
        matched = fnmatch.filter(names, pattern)
        if not matched:
            known = names if len(names) <= 12 else sorted({name.rpartition(".")[2] for name in names} | set(names[:4]))
            raise ConfigError(f"split={{{pattern!r}: ...}} matches no module of the model: {nearest(pattern, known)}")
        if kind == "branch" or isinstance(kind, int):  # what is within a branch goes with it
            matched = [name for name in matched if not any(name.startswith(f"{other}.") for other in matched)]
        for name in matched:
            found.setdefault(name, kind)
    return found


def by_itself(model: nn.Module) -> dict[str, str | int]:
    """What is known how to split: attention, pairs of linear layers, embeddings and heads of a vocabulary."""
    found: dict[str, str | int] = {}
    for name, module in model.named_modules():
        at = f"{name}." if name else ""
        if isinstance(module, nn.MultiheadAttention):
            found[name] = "heads"
            continue
        children = dict(module.named_children())
        if isinstance(module, nn.Sequential):
            found |= {at + key: kind for key, kind in _pairs(children).items()}
        linear = {key: child for key, child in children.items() if _is_linear(child)}
        out = next((key for key in _OUT if key in linear), None)
        for queries in _QUERIES:
            if out and all(key in linear for key in queries):
                found |= {at + key: "column" for key in queries} | {at + out: "row"}
        for key in _FUSED:
            if out and key in linear and _sizes(linear[key])[1] > _sizes(linear[out])[0]:
                found |= {at + key: "qkv", at + out: "row"}
        down = next((key for key in _DOWN if key in linear and at + key not in found), None)
        ups = [key for key in _UP if key in linear and down and _sizes(linear[key])[1] == _sizes(linear[down])[0]]
        if down and ups:
            found |= {at + key: "column" for key in ups} | {at + down: "row"}
    if found:
        found |= _vocabulary(model)
    if not found:
        raise ConfigError(
            "--mesh split=N: no layers were found that are known to split (attention, pairs of linear layers): say "
            'which, as in run.model(model, split={"*.up": "column", "*.down": "row"}), or cut another way: --mesh '
            "shard=N goes with any layers"
        )
    return found


def _pairs(children: Mapping[str, nn.Module]) -> dict[str, str | int]:
    """Linear, what acts by element, Linear."""
    found: dict[str, str | int] = {}
    last = ""
    for key, child in children.items():
        if isinstance(child, nn.Linear):
            if last and _sizes(children[last])[1] == child.in_features:
                found |= {last: "column", key: "row"}
                last = ""
            else:
                last = key
        elif not isinstance(child, _BETWEEN):
            last = ""
    return found


def _vocabulary(model: nn.Module) -> dict[str, str | int]:
    """Embeddings whose number of rows is that of a linear layer's outputs, with it."""
    embeddings = {n: m for n, m in model.named_modules() if isinstance(m, nn.Embedding) and _plain(m)}
    heads = {n: m for n, m in model.named_children() if isinstance(m, nn.Linear)}
    found: dict[str, str | int] = {}
    for name, embedding in embeddings.items():
        for key, head in heads.items():
            if head.out_features == embedding.num_embeddings:
                found |= {name: "vocabulary", key: "column"}
    return found


def lays(model: nn.Module, kinds: Mapping[str, str | int], members: int) -> dict[int, Lay]:
    """Where the members' parts of parameters lie, by id; branches left out."""
    found: dict[int, Lay] = {}
    first: dict[int, str] = {}
    modules = dict(model.named_modules())
    for name, kind in kinds.items():
        if kind == "branch" or isinstance(kind, int):
            continue
        for key, p, lay in _of_module(name, modules, str(kind), members):
            before = found.setdefault(id(p), lay)
            if before != lay:
                raise ConfigError(f"split: {name}.{key} and {first[id(p)]} are one tensor, and are to be cut unlike")
            first.setdefault(id(p), f"{name}.{key}")
    for name, module in modules.items():
        for key, own in module._parameters.items():
            if own is not None and id(own) in found and name not in kinds and not _inside(name, kinds, modules):
                raise ConfigError(
                    f"split: {name or 'the model'}.{key} and {first[id(own)]} are one tensor: name both in split="
                )
    return found


def _inside(name: str, kinds: Mapping[str, str | int], modules: Mapping[str, nn.Module]) -> bool:
    above = name.rpartition(".")[0]
    return kinds.get(above) == "heads" and isinstance(modules[above], nn.MultiheadAttention)


def _of_module(
    name: str, modules: Mapping[str, nn.Module], kind: str, members: int
) -> list[tuple[str, torch.Tensor, Lay]]:
    module = modules[name]
    if kind == "heads":
        return _of_heads(name, module, members)
    if isinstance(module, nn.Embedding) and kind in ("column", "vocabulary"):
        if not _plain(module):
            raise ConfigError(f"split: {name} has max_norm, scale_grad_by_freq or sparse, which need whole rows")
        dim = 1 if kind == "column" else 0
        return [("weight", module.weight, Lay(dim, (even(module.weight.shape[dim], members),)))]
    if not _is_linear(module):
        wanted = "an Embedding or a Linear" if kind in ("vocabulary", "column") else "a Linear"
        within = f"name the layers within it, as in {f'{name}.*'!r}"
        raise ConfigError(
            f"split={{...: {kind!r}}} matches {name!r}, a {type(module).__name__}: {kind} goes with {wanted}; "
            f"{within if any(True for _ in module.children()) else 'leave it out'}"
        )
    weight: Any = module.weight
    bias: Any = module.bias
    wide = 0 if isinstance(module, nn.Linear) else 1  # the dimension of outputs
    if kind == "row":
        return [("weight", weight, Lay(1 - wide, (_shared(name, modules, _sizes(module)[0], members),)))]
    blocks = _blocks(name, modules, kind, members)
    found = [("weight", weight, Lay(wide, blocks))]
    return found if bias is None else [*found, ("bias", bias, Lay(0, blocks))]


def _blocks(name: str, modules: Mapping[str, nn.Module], kind: str, members: int) -> tuple[tuple[int, ...], ...]:
    width = _sizes(modules[name])[1]
    if kind != "qkv":
        return (_shared(name, modules, width, members),)
    above = modules[name.rpartition(".")[0]]
    heads, fewer = _number(above, _HEADS), _number(above, _KV_HEADS)
    if heads and fewer and heads != fewer:
        if width % (heads + 2 * fewer):
            raise ConfigError(f"split: {name} has {width} outputs for {heads} and twice {fewer} heads: not a multiple")
        each = width // (heads + 2 * fewer)
        sizes = [heads * each, fewer * each, fewer * each]
    elif width % 3:
        raise ConfigError(f"split: {name} has {width} outputs, not three times as many as there are queries")
    else:
        sizes = [width // 3] * 3
    for number in (heads, fewer):
        _refuse_heads(name, number, members)
    return tuple(even(size, members) for size in sizes)


def _shared(name: str, modules: Mapping[str, nn.Module], size: int, members: int) -> tuple[int, ...]:
    above, _, key = name.rpartition(".")
    of_attention = any(key in queries for queries in _QUERIES)
    if of_attention:
        parent = modules[above]
        number = _number(parent, _HEADS)
        if key not in {queries[0] for queries in _QUERIES}:
            number = _number(parent, _KV_HEADS) or number
        _refuse_heads(name, number, members)
    return even(size, members)


def _refuse_heads(name: str, heads: int | None, members: int) -> None:
    if heads and heads % members:
        raise ConfigError(f"split={members}: {name} has {heads} heads, which {members} members cannot share evenly")


def _of_heads(name: str, module: nn.Module, members: int) -> list[tuple[str, torch.Tensor, Lay]]:
    if not isinstance(module, nn.MultiheadAttention):
        raise ConfigError(f"split: {name!r} is a {type(module).__name__}: heads goes with nn.MultiheadAttention")
    _refuse_heads(name, module.num_heads, members)
    if module.bias_k is not None or module.add_zero_attn:
        raise ConfigError(f"split: {name} has add_bias_kv or add_zero_attn, which are not split; leave it out")
    each = even(module.embed_dim, members)
    found = [
        (key, p, Lay(0, (each,)))
        for key in ("q_proj_weight", "k_proj_weight", "v_proj_weight")
        if (p := getattr(module, key)) is not None
    ]
    found += [
        (key, p, Lay(0, (each,) * 3))
        for key in ("in_proj_weight", "in_proj_bias")
        if (p := getattr(module, key)) is not None
    ]
    return [*found, ("out_proj.weight", module.out_proj.weight, Lay(1, (each,)))]


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def _sizes(module: Any) -> tuple[int, int]:
    """Inputs and outputs."""
    rows, columns = module.weight.shape
    return (columns, rows) if isinstance(module, nn.Linear) else (rows, columns)


def _plain(module: nn.Embedding) -> bool:
    return module.max_norm is None and not module.scale_grad_by_freq and not module.sparse


def _number(module: nn.Module, names: tuple[str, ...]) -> int | None:
    found = next((getattr(module, name) for name in names if isinstance(getattr(module, name, None), int)), None)
    return found if found is not None and found > 0 else None
