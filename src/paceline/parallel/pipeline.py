"""One batch through the stages of a pipeline, micro-batch by micro-batch, as its schedule says.

    forward    take values from earlier stages, compute, send values to later ones; the last stage makes the loss
    backward   take the gradients of what was sent, compute, send the gradients of what was taken

The gradients of a batch are those of the mean loss over its samples: a micro-batch weighs as many samples as it has.
All batches have the same number of micro-batches; where there are fewer samples, the last ones repeat one with weight
zero.
"""

from __future__ import annotations

import contextlib
import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from paceline.core.errors import ConfigError
from paceline.parallel.alike import fingerprint, refuse_unlike
from paceline.parallel.nested import each
from paceline.parallel.pieces import around, local
from paceline.parallel.post import Post
from paceline.parallel.samples import Micro, Samples, tensors
from paceline.parallel.schedule import Action, Staging, orders
from paceline.parallel.stages import Layout, Stage
from paceline.transport.group import Group

_MICROS_EACH = 4  # per member, where the batch has as many samples
Loss = Callable[[Any, Any], torch.Tensor]
Under = Callable[[], contextlib.AbstractContextManager[Any]]


class Held(NamedTuple):
    """What a stage keeps of a micro-batch until its backward pass."""

    taken: dict[int, list[torch.Tensor]]  # by stage: leaves that want a gradient
    given: list[list[torch.Tensor]]  # what it gave out: tensors that want a gradient, value by value; or the output
    loss: torch.Tensor | None


class Pipeline:
    """This member's stages of a model, and its place among the others."""

    def __init__(
        self,
        stages: Sequence[Stage],
        modules: dict[int, fx.GraphModule],
        layout: Layout,
        group: Group,
        post: Post,
        *,
        how: Staging,
        device: torch.device,
        names: Sequence[str],
    ) -> None:
        self.layout, self.group = layout, group
        self._stages, self._modules, self._post = stages, modules, post
        self._schedule, self._wanted, self._device = how.schedule, how.micro, device
        self._names = list(names)  # of the model's inputs
        self._samples = Samples(names, how.whole, how.tell)
        self._micros = 0  # of a batch; 0: not known yet
        self._order: list[Action] = []
        self._held: dict[tuple[int, int], Held] = {}
        self._later: dict[tuple[int, int], Callable[[], object]] = {}  # gradients of weights, still to be computed
        self._whole: dict[int, bool] = {}  # by stage: its backward pass cannot be halved

    @property
    def spent(self) -> tuple[int, float]:
        """Bytes sent to other stages, and seconds waited for them, since the run began."""
        return self._post.sent_bytes, self._post.waited_s

    @property
    def last(self) -> int:
        """The member that has the last stage."""
        return (len(self._stages) - 1) % self.group.size

    # ---- passes

    def backward(
        self, inputs: Sequence[Any], target: Any, loss: Loss, weight: float, everyone: Group, under: Under
    ) -> torch.Tensor:
        """All of a batch: gradients of the mean loss, times `weight`, are added to the parameters'. The mean loss.

        Args:
            everyone: the members of the whole run, which agree on the number of micro-batches in the first pass.
            under: what forward passes run under.
        """
        self._settle(self._samples.count(inputs), everyone, [*inputs, target])
        micros = self._samples.split(self._bound(inputs, {}), target, self._micros)
        self._expect(("F", "B"))
        total = torch.zeros((), dtype=torch.float64)
        with self._seeded():
            for action in self._order:
                at = (action.stage, action.micro)
                micro = micros[action.micro]
                if action.kind == "F":
                    with torch.enable_grad(), under():
                        out = self._forward(*at, micro.inputs)
                    if action.stage == len(self._stages) - 1:
                        total += self._lose(at, out, micro, loss)
                elif action.kind == "W":
                    self._later.pop(at)()
                else:
                    self._backward(*at, micro.share * weight, halved=action.kind == "I")
        self._post.flush()
        self.group.broadcast(total, self.last)
        return total.to(torch.get_default_dtype()).to(self._device)

    def forward(self, inputs: Sequence[Any], named: dict[str, Any]) -> Any:
        """What the model returns, on all members."""
        if torch.is_grad_enabled():
            raise ConfigError(
                "model(...) with gradients: a model in stages computes forward and backward in turns. Write "
                "loss = run.backward(model, x, y, loss=F.cross_entropy), or call the model under torch.no_grad()"
            )
        self._expect(("F",))
        given = self._bound(inputs, named)
        end = len(self._stages) - 1
        out: Any = None
        for number in sorted(self._modules):
            out = self._forward(number, 0, given)
        self._held.clear()
        if self.group.rank == self.last:
            for other in range(self.group.size):
                self._post.send(other, ("out", end, other, 0), [out])
        else:
            self._post.expect(self.last, 1)
        out = self._post.take(("out", end, self.group.rank, 0))[0]
        self._post.flush()
        return out

    def _forward(self, number: int, micro: int, inputs: Sequence[Any]) -> Any:
        stage = self._stages[number]
        args = [inputs[place] for place in stage.inputs]
        taken: dict[int, list[torch.Tensor]] = {}
        for source in stage.takes:
            values, wanted = self._post.take(("F", source, number, micro))
            leaves = _Leaves(wanted, copy=source % self.group.size == self.group.rank)
            args += [each(value, leaves) for value in values]
            taken[source] = leaves.found
        out = self._modules[number](*args)
        given: list[list[torch.Tensor]] = []
        if stage.gives:
            given = [[t for t in tensors(value) if t.requires_grad] for value in out]
        for to, places in stage.gives.items():
            values = [each(out[place], lambda t: t.detach()) for place in places]
            wanted = [t.requires_grad for place in places for t in tensors(out[place])]
            self._post.send(to % self.group.size, ("F", number, to, micro), [values, wanted])
        self._held[number, micro] = Held(taken, given, None)
        return out

    def _lose(self, at: tuple[int, int], out: Any, micro: Micro, loss: Loss) -> torch.Tensor:
        with torch.enable_grad():
            value = loss(out, micro.target)
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            raise ConfigError(
                "run.backward(..., loss=...): it is called with what the model returns and the target, and returns the "
                f"mean over samples, one number; this one returned {_words(value)}"
            )
        self._held[at] = self._held[at]._replace(loss=value, given=[[t for t in tensors(out) if t.requires_grad]])
        return value.detach().double().cpu().reshape(()) * micro.share if micro.share else torch.zeros(())

    def _backward(self, number: int, micro: int, scale: float, *, halved: bool) -> None:
        stage, held = self._stages[number], self._held.pop((number, micro))
        if held.loss is not None:
            outs, grads = [held.loss], [torch.full_like(held.loss, scale)]
            if not scale:  # not even nan times zero
                outs = held.given[0]
                grads = [torch.zeros_like(t) for t in outs]
        else:
            outs, grads = self._gradients(number, micro, held.given)
        leaves = [leaf for found in held.taken.values() for leaf in found]
        parameters = [p for p in self._modules[number].parameters() if p.requires_grad]
        if not halved:
            _run(outs, grads)
        elif not leaves or not outs or not self._separable(number, outs, leaves, parameters):
            self._later[number, micro] = lambda: None
            if leaves:
                _run(outs, grads)
            else:
                self._later[number, micro] = lambda: _run(outs, grads)
        else:
            from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

            _, groups = stage_backward_input(outs, grads, leaves, iter(parameters))
            self._later[number, micro] = lambda: stage_backward_weight(iter(parameters), groups)
        for source in stage.takes:
            found = [leaf.grad for leaf in held.taken[source]]
            self._post.send(source % self.group.size, ("B", number, source, micro), [found])

    def _gradients(
        self, number: int, micro: int, given: list[list[torch.Tensor]]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """What was given out and has a gradient, with the sum of what came back for it."""
        sums: dict[int, torch.Tensor] = {}
        tensors = {id(t): t for value in given for t in value}
        for to, places in self._stages[number].gives.items():
            found = iter(self._post.take(("B", to, number, micro))[0])
            for tensor in [t for place in places for t in given[place]]:
                if (grad := next(found)) is not None:
                    sums[id(tensor)] = sums[id(tensor)] + grad if id(tensor) in sums else grad
        return [tensors[i] for i in sums], list(sums.values())

    def _separable(
        self, number: int, outs: list[torch.Tensor], leaves: list[torch.Tensor], parameters: list[nn.Parameter]
    ) -> bool:
        """Whether all weights act on something that depends on what was taken, and once: others would get no gradient,
        or ask for what is gone."""
        if number not in self._whole:
            from torch.distributed.pipelining import _backward as halves

            node_of: Callable[[Any], Any] = halves._get_grad_fn_or_grad_acc
            ends = [node_of(t) for t in outs]
            reached = _closure(ends, lambda node: [below for below, _ in node.next_functions if below is not None])
            wanted = {node_of(p) for p in parameters} & reached
            edges = halves.construct_reverse_graph(ends)
            inputs = [node_of(t) for t in leaves]
            of_weights = reached - _closure(inputs, lambda node: edges[node])
            twice = any(len(edges[node]) > 1 for node in of_weights)
            groups = halves.get_param_groups(inputs, list(wanted), edges)
            self._whole[number] = twice or wanted != {node for group in groups for node in group["params"]}
        return not self._whole[number]

    def tie(self, parameters: dict[str, nn.Parameter]) -> None:
        """Of weights that several members compute with, each gets the sum of their gradients."""
        rank = self.group.rank
        mine = [(name, members) for name, members in self.layout.tied.items() if rank in members]
        for name, members in mine:
            grad = parameters[name].grad
            for member in members:
                if member != rank:
                    self._post.expect(member, 1)
                    told = None if grad is None else local(grad)
                    self._post.send(member, (f"tied {name}", rank, member, 0), [told])
        for name, members in mine:
            p = parameters[name]
            came = {m: self._post.take((f"tied {name}", m, rank, 0))[0] for m in members if m != rank}
            came[rank] = None if p.grad is None else local(p.grad)
            grads = [came[m] for m in members if came[m] is not None]  # in one order, so that sums are the same bits
            self._post.flush()
            if grads:
                p.grad = around(p, torch.stack(grads).sum(0))

    # ---- around them

    def _settle(self, count: int, everyone: Group, batch: Sequence[Any]) -> None:
        """In the first pass: whether the pipeline's members have one batch, and how many micro-batches all cut."""
        if self._micros:
            return
        prints = self.group.all_gather(torch.tensor([fingerprint(batch)]))
        refuse_unlike(all(torch.equal(one, prints[0]) for one in prints))
        wanted = self._wanted or min(_MICROS_EACH * self.group.size, count)
        most = max(int(n) for n in everyone.all_gather(torch.tensor([wanted])))
        if self._schedule == "interleaved":
            most = -(-most // self.group.size) * self.group.size
        self._micros = most
        self._order = orders(self._schedule, self.group.size, most)[self.group.rank]

    def _expect(self, kinds: tuple[str, ...]) -> None:
        """What will come from whom."""
        due: Counter[int] = Counter()
        for number in self._modules:
            stage = self._stages[number]
            others = [*stage.takes, *(stage.gives if "B" in kinds else ())]
            due.update(other % self.group.size for other in others)
        for member, messages in due.items():
            self._post.expect(member, messages * (self._micros if "B" in kinds else 1))

    def _bound(self, inputs: Sequence[Any], named: dict[str, Any]) -> list[Any]:
        try:
            parameters = [inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD) for n in self._names]
            return list(inspect.Signature(parameters).bind(*inputs, **named).args)
        except TypeError as error:
            raise ConfigError(
                f"a model in stages takes what its forward needs ({', '.join(self._names)}), and nothing else: {error}"
                ". Inputs with a default keep it: take it away from those that are wanted, as in forward(self, x, mask)"
            ) from None

    @contextlib.contextmanager
    def _seeded(self) -> Iterator[None]:
        """Stages draw unlike numbers, each batch others; the script's own go on as if the model were whole."""
        drawn = int(torch.empty((), dtype=torch.int64).random_())
        devices = [self._device] if self._device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            torch.manual_seed((drawn + 1_000_003 * self.group.rank) % 2**63)
            yield


class _Leaves:
    """Makes leaves of the tensors that came, where they want gradients, in their order. What it returns may be changed
    in place; `copy`: what came is used elsewhere."""

    def __init__(self, wanted: Sequence[bool], *, copy: bool) -> None:
        self._wanted, self._copy = iter(wanted), copy
        self.found: list[torch.Tensor] = []

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        leaf = tensor.clone() if self._copy else tensor.detach()
        if not next(self._wanted) or not torch.is_grad_enabled():
            return leaf
        self.found.append(leaf.requires_grad_())
        return _Same.apply(leaf)  # type: ignore[no-any-return, no-untyped-call]


class _Same(torch.autograd.Function):
    """A leaf as a value that is not one, in the same memory."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor) -> torch.Tensor:
        return leaf.data

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def staged(model: nn.Module, pipeline: Pipeline) -> None:
    """Calls of the model go through the pipeline; no wrapper: its class becomes a subclass of its own."""
    kind: Any = type(model)

    def forward(self: Any, *args: Any, **named: Any) -> Any:
        return self._paceline_pipeline.forward(args, named)

    model.__class__ = type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})
    vars(model)["_paceline_pipeline"] = pipeline


def pipeline_of(model: nn.Module) -> Pipeline | None:
    return vars(model).get("_paceline_pipeline")


def _closure(begin: Sequence[Any], beyond: Callable[[Any], Sequence[Any]]) -> set[Any]:
    """All that is reached from somewhere."""
    reached, queue = set(begin), list(begin)
    while queue:
        more = set(beyond(queue.pop())) - reached
        reached |= more
        queue += more
    return reached


def _run(outs: list[torch.Tensor], grads: list[torch.Tensor]) -> None:
    if outs:
        torch.autograd.backward(outs, grads)


def _words(value: Any) -> str:
    return f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
