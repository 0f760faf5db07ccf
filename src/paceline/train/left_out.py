"""What a model trains and no optimizer steps, and the other way round: an optimizer that was made too early.

A head that is swapped, or adapters that are added, after the optimizer was made would stay as they are in silence.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from paceline.strategies.replicas import names_of

_SHOWN = 4


def left_out(models: Sequence[torch.nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[str]:
    """In words, what should be said of it.

    >>> model = torch.nn.Linear(2, 2)
    >>> list(left_out([model], [torch.optim.SGD([model.weight], lr=0.1)]))
    ['bias is trained (requires_grad) and in no optimizer of the run, so it will not change. Make the optimizer after \
the model has its last form, or freeze it']
    """
    stepped = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    names = {i: name for model in models for i, name in names_of(model).items()}
    trained = [
        name for model in models for name, p in model.named_parameters() if p.requires_grad and id(p) not in stepped
    ]
    if trained:
        more = f" and {len(trained) - _SHOWN} more" if len(trained) > _SHOWN else ""
        verb, what = ("is", "it") if len(trained) == 1 else ("are", "they")
        yield (
            f"{', '.join(trained[:_SHOWN])}{more} {verb} trained (requires_grad) and in no optimizer of the run, so "
            f"{what} will not change. Make the optimizer after the model has its last form, or freeze "
            f"{'it' if len(trained) == 1 else 'them'}"
        )
    gone = len(stepped - names.keys())
    if gone and trained:  # a parameter beside the model, such as a temperature of the loss, is the user's right
        yield (
            f"{gone} of the optimizer's parameters are in no model of the run: was a part of the model replaced after "
            "the optimizer was made?"
        )
