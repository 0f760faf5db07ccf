"""Rules for what torch has ready: `nn.MultiheadAttention`, whose heads are shared out, and losses of logits that are in
parts along the classes, which are never put together."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from paceline.parallel.fellows import total
from paceline.parallel.rules import rule
from paceline.parallel.spread import Spread, wholes

_MULTI_HEAD = inspect.signature(F.multi_head_attention_forward)
_LOSS = inspect.signature(F.cross_entropy)
_NLL = inspect.signature(F.nll_loss)


@rule("multi_head_attention_forward")
def multi_head(func: Callable[..., Any], args: Sequence[Any], named: dict[str, Any]) -> Any:
    bound = _MULTI_HEAD.bind(*args, **named)
    bound.apply_defaults()
    it = bound.arguments
    odd = it["add_zero_attn"] or any(it[n] is not None for n in ("bias_k", "bias_v", "static_k", "static_v"))
    if odd or not isinstance(it["out_proj_weight"], Spread):
        return NotImplemented
    query, key, value = (it[n] if it["query"].ndim == 3 else it[n].unsqueeze(1) for n in ("query", "key", "value"))
    num, (length, batch, width) = it["num_heads"], query.shape
    weights = [it[f"{n}_proj_weight"] for n in "qkv"]
    if not it["use_separate_proj_weight"]:
        weights = it["in_proj_weight"].chunk(3)
    biases = [None] * 3 if it["in_proj_bias"] is None else it["in_proj_bias"].chunk(3)
    if it["query"] is it["key"] is it["value"] and not it["use_separate_proj_weight"]:
        made = F.linear(query, it["in_proj_weight"], it["in_proj_bias"]).chunk(3, -1)
    else:
        made = tuple(F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases))
    q, k, v = (x.reshape(x.shape[0], batch, num, width // num).permute(1, 2, 0, 3) for x in made)
    mask = _mask(it, q, batch, num)
    dropped = it["dropout_p_value"] if "dropout_p_value" in it else it["dropout_p"]
    dropped = dropped if it["training"] else 0.0
    seen = None
    if it["need_weights"]:
        scores = (q * math.sqrt(num / width)) @ k.transpose(-2, -1)
        seen = F.softmax(scores if mask is None else scores + mask, dim=-1)
        seen = F.dropout(seen, dropped) if dropped else seen
        out = seen @ v
        seen = seen.mean(1) if it["average_attn_weights"] else wholes(seen)
    else:
        out = F.scaled_dot_product_attention(q, k, v, mask, dropped)
    out = out.permute(2, 0, 1, 3).reshape(length, batch, width)
    out = F.linear(out, it["out_proj_weight"], it["out_proj_bias"])
    if it["query"].ndim == 2:
        return out[:, 0], None if seen is None else seen[0]
    return out, seen


def _mask(it: dict[str, Any], q: torch.Tensor, batch: int, num: int) -> torch.Tensor | None:
    """What is added to scores: for all heads, or for each."""

    def added(mask: torch.Tensor) -> torch.Tensor:
        if mask.dtype == torch.bool:
            return torch.zeros_like(mask, dtype=q.dtype).masked_fill(mask, -math.inf)
        return mask.to(q.dtype)

    mask, padding = it["attn_mask"], it["key_padding_mask"]
    if mask is not None:
        mask = added(mask)
        mask = mask.view(batch, num, *mask.shape[1:]) if mask.ndim == 3 else mask[None, None]
    if padding is not None:
        padding = added(padding).view(batch, 1, 1, -1)
        mask = padding if mask is None else mask + padding
    return mask  # type: ignore[no-any-return]


@rule("cross_entropy")
def cross_entropy(func: Callable[..., Any], args: Sequence[Any], named: dict[str, Any]) -> Any:
    bound = _LOSS.bind(*args, **named)
    bound.apply_defaults()
    it = bound.arguments
    logits, target = it["input"], it["target"]
    if not _by_class(logits) or it["weight"] is not None or target.is_floating_point():
        return NotImplemented
    dim = logits.lay.dim
    low = F.log_softmax(logits, dim)
    loss, kept = _picked(low, target, it["ignore_index"])
    if it["label_smoothing"]:
        every = -low.sum(dim) / logits.shape[dim]
        loss = (1 - it["label_smoothing"]) * loss + it["label_smoothing"] * every * kept
    return _reduced(loss, kept, it["reduction"])


@rule("nll_loss")
def nll_loss(func: Callable[..., Any], args: Sequence[Any], named: dict[str, Any]) -> Any:
    bound = _NLL.bind(*args, **named)
    bound.apply_defaults()
    it = bound.arguments
    if not _by_class(it["input"]) or it["weight"] is not None:
        return NotImplemented
    return _reduced(*_picked(it["input"], it["target"], it["ignore_index"]), it["reduction"])


def _by_class(logits: Any) -> bool:
    return isinstance(logits, Spread) and logits.lay.dim == min(1, logits.ndim - 1) and len(logits.lay.blocks) == 1


def _picked(low: Any, target: torch.Tensor, ignored: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each target the logarithm of its probability, negative; and which targets count."""
    (sizes,), fellows, dim = low.lay.blocks, low.fellows, low.lay.dim
    first, mine = sum(sizes[: fellows.rank]), sizes[fellows.rank]
    kept = target != ignored
    if bool((kept & ((target < 0) | (target >= low.shape[dim]))).any()):
        raise IndexError(f"a target is out of bounds: there are {low.shape[dim]} classes")
    here = kept & (target >= first) & (target < first + mine)
    if mine:
        picked = low.local.gather(dim, (target - first).masked_fill(~here, 0).unsqueeze(dim)).squeeze(dim)
    else:
        picked = low.local.sum(dim)
    return -total(picked.masked_fill(~here, 0.0), fellows), kept


def _reduced(loss: torch.Tensor, kept: torch.Tensor, how: str) -> torch.Tensor:
    if how == "none":
        return loss * kept
    return loss.sum() / kept.sum() if how == "mean" else loss.sum()
