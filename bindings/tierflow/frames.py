"""Calls of a turn's module: what each has to keep between its forward and its backward."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from . import _native
from .ambient import autocast_as, autocast_state, without_cudnn_attention, without_fast_path
from .fused import Kept, Layer
from .inputs import PLAIN, Moved, There, became, contents, expect_no_gradient, expect_none_new, fill, filled, is_empty, storages, tensors_in
from .parameter import StreamedParameter
from .recorded import Recorded
from .replays import Moment, version
from .turns import Turn

local = threading.local()  # .lane: the micro-batch of a layer-major step that this thread runs


class Frame:
    """One call of a turn's module: its inputs as a list of tensors, and how to run it on others in their place."""

    def __init__(self, turn: Turn, args: tuple, kwargs: dict[str, Any]) -> None:
        self.turn = turn
        leaves, self.spec = tree_flatten((args, kwargs))
        self.needs_graph = torch.is_grad_enabled()
        self.filled = filled(args, kwargs)  # the caller's containers that the module may fill, until it has
        self.fills = bool(self.filled)
        self.opaque: list[Any] = []  # what pytree does not look into
        self.leaves = [leaf if type(leaf) is torch.Tensor or type(leaf) in PLAIN else self._checked(leaf) for leaf in leaves]
        self.where = [i for i, leaf in enumerate(self.leaves) if isinstance(leaf, torch.Tensor)]
        self.tensors = [self.leaves[i] for i in self.where]
        operands = turn.fused(*tree_unflatten(self.leaves, self.spec))
        self.layer: Layer | None = turn.layer if operands is not None else None
        self.found = self.layer.found() if self.layer is not None else None
        self.operands = [next((i for i, t in enumerate(self.tensors) if t is operand), operand) for operand in operands or []]
        self.kept: Kept | None = None
        for i in self.where:
            self.leaves[i] = None
        self.may_grow = self.needs_graph
        self.needs_graph = self.needs_graph and (any(t.requires_grad for t in self.tensors) or turn.trains())
        if self.opaque and self.needs_graph:
            expect_no_gradient(turn.name, self.opaque)
        self.recorded = Recorded()
        self.out_spec: Any = None
        self.out_leaves: list[Any] = []
        self.out_where: list[int] = []
        self.moment: Any = None  # what surrounds the forward, if a backward may follow
        self.written: list[int] = []  # inputs that the module changes in place
        self.callers: list[torch.Tensor] = []  # these, until they are changed
        self.sink: Any = None  # what a backward() that adds gradients runs to, and torch.autograd.grad() does not
        self.autocast = autocast_state(turn.engine.device.type)

    def _checked(self, leaf: Any) -> Any:
        if isinstance(leaf, StreamedParameter):
            return leaf.clone()  # fetched ahead of the turn; its gradient comes as that of any use outside of one
        if isinstance(leaf, torch.Tensor):
            return leaf
        if self.needs_graph and hasattr(leaf, "get_seq_length") and hasattr(leaf, "update"):
            # A key-value cache: the recomputation would fill it a second time. An empty one changes nothing.
            if is_empty(leaf):
                return None
            raise _native.UsageError(f"{self.turn.name} was called with a cache while gradients are on: pass use_cache=False (PEFT's prefix tuning is such a cache, and does not train)")
        self.opaque.append(leaf)
        return leaf

    def _of(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """The operands of the fused layer in a call with these tensors."""
        return [tensors[operand] if isinstance(operand, int) else operand for operand in self.operands]

    def evaluate(self) -> Any:
        """What the call gives without a graph. Where a hook in it adds what needs a gradient, needs_graph is true afterwards, and all that this forward changed is put
        back: it has to be made with a graph."""
        before = [version(t) for t in self.tensors]
        rewinds = self.may_grow and (not self.turn.seen or any(m._forward_hooks or m._forward_pre_hooks for m in self.turn.parts.now().inner))
        if rewinds:
            self.remember_random()
        with torch.set_grad_enabled(self.may_grow), self.turn.engine.turn(self.turn, "evaluate") as weights:
            outs = self.compute(self.tensors, weights)
        if not any(out.requires_grad for out in outs):
            self.turn.seen, self.moment = True, None
            return self.result(outs)
        self.turn.grows = self.needs_graph = True
        if not rewinds or self.opaque or self.fills or before != [version(t) for t in self.tensors]:
            raise _native.UsageError(f"{self.turn.name}: a hook in it adds what needs a gradient, though nothing of the module does: make the forward once more")
        self.moment.rewind()
        return None

    def take(self) -> Any:
        lane = getattr(local, "lane", None)
        return lane.call(self) if lane is not None else self.call()

    def call(self) -> Any:
        if not self.needs_graph:
            found = self.evaluate()
            if not self.needs_graph:
                return found
        always = torch.empty(0, requires_grad=True)
        self.sink = get_gradient_edge(always).node
        return self.result(_Visit.apply(self, always, *self.tensors))

    def compute(self, tensors: list[torch.Tensor], weights: list[torch.Tensor], keep: bool = False) -> list[torch.Tensor]:
        """Runs the module, its weights bound, on tensors in the place of those it was called with. keep: differentiate() follows."""
        if self.layer is not None:
            self.layer.go_by(self.found)
            with torch.no_grad():
                out, self.kept = self.layer.forward(weights, self._of(tensors), keep)
            beside: Any = None
        else:
            out, beside, given = self._run(tensors, keep)
        self.out_leaves, self.out_spec = tree_flatten((out, beside))
        self.out_where = [i for i, leaf in enumerate(self.out_leaves) if isinstance(leaf, torch.Tensor)]
        if keep and (len(self.out_where) < len(self.out_leaves) or self.opaque) and self.layer is None:
            objects = [leaf for leaf in self.out_leaves if type(leaf) not in PLAIN and not isinstance(leaf, (torch.Tensor, There, Moved))]
            if objects or self.opaque:
                expect_none_new(self.turn.name, [*objects, *self.opaque], given)
        outs = [self.out_leaves[i] for i in self.out_where]
        if keep:
            self.moment.ended(outs)
        for i in self.out_where:
            self.out_leaves[i] = None
        owns = self.turn.engine.native.owns
        return [out.clone() if owns(out.data_ptr()) else out for out in outs]

    def _run(self, tensors: list[torch.Tensor], keep: bool) -> tuple[Any, Any, list[torch.Tensor]]:
        """What the module returns. If there is any: what was recorded in it, what became of the containers that it filled, and of the inputs that it changed in
        place. And the tensors that it was called with."""
        handed, writes = tensors, set(self.written)
        copies: list[torch.Tensor] = []
        if keep and (writes := self.moment.learned.writes) is None:  # the first forward
            if torch.is_grad_enabled():
                handed = [t.clone() for t in tensors]
            else:
                copies = [t.clone() for t in tensors]
        elif self.needs_graph and writes:
            handed = [t.clone() if number in writes else t for number, t in enumerate(tensors)]
        leaves = list(self.leaves)
        for index, tensor in zip(self.where, handed, strict=True):
            leaves[index] = tensor
        args, kwargs = tree_unflatten(leaves, self.spec)
        containers = filled(args, kwargs) if self.fills else []
        before = contents(containers)
        given = [*handed, *tensors_in(self.opaque)] if keep and self.opaque else handed
        versions = [version(t) for t in handed] if self.needs_graph else []
        with self.recorded.apart() as beside, without_cudnn_attention(self.turn.engine.device):
            out = self.turn.forward(*args, **kwargs)
        if versions:
            now = [version(t) for t in handed]
            changed = {number for number, then in enumerate(versions) if now[number] != then} if now != versions else set()
            if writes is None:
                self.moment.learned.writes = changed
                if changed and copies:  # as if that had been known
                    for number in changed:
                        handed[number].copy_(copies[number])
                    self.moment.rewind()
                    return self._run(tensors, keep)
            elif not changed <= writes:
                self._refuse_writes(changed - writes)
            if keep and (changed or writes):
                self._note_writes(tensors)
        moved = [handed[number] for number in self.written]
        if moved and any(t.requires_grad and not tensors[number].requires_grad for number, t in zip(self.written, moved, strict=True)):
            raise _native.UsageError(f"{self.turn.name} writes what it computes into an input that has no gradient: let it return that instead")
        filled_now = became(containers, before)
        if moved:
            numbers = {id(t): Moved(number) for number, t in zip(self.written, moved, strict=True)}
            out, filled_now = tree_map(lambda leaf: numbers.get(id(leaf), leaf), (out, filled_now))
        return out, (beside, filled_now, moved) if beside or filled_now or moved else None, given

    def _refuse_writes(self, changed: set[int]) -> None:
        if self.moment.learned.writes is not None:
            self.moment.learned.writes |= changed  # the next call is made with copies
        raise _native.UsageError(
            f"{self.turn.name} changed an input in place, which it did not in its first call; the backward computes the call again, from what is no longer there: pass a "
            "copy (x.clone()), or let the module not work in place"
        )

    def _note_writes(self, tensors: list[torch.Tensor]) -> None:
        self.written = sorted(self.moment.learned.writes)
        own = storages(tensors) if self.written else []
        if any(own.count(own[number]) > 1 for number in self.written):
            raise _native.UsageError(f"{self.turn.name} changes an input in place, and two of its inputs share memory: pass copies (x.clone())")

    def result(self, outs: Any) -> Any:
        leaves = list(self.out_leaves)
        for index, tensor in zip(self.out_where, outs, strict=True):
            leaves[index] = tensor
        out, beside = tree_unflatten(leaves, self.out_spec)
        recorded, filled_now, moved = beside or ({}, {}, [])
        if moved:
            for caller, now in zip(self.callers, moved, strict=True):
                with torch.set_grad_enabled(caller.requires_grad):
                    caller.copy_(now)
            callers = dict(zip(self.written, self.callers, strict=True))
            out, filled_now = tree_map(lambda leaf: callers[leaf.number] if isinstance(leaf, Moved) else leaf, (out, filled_now))
        for number, made in filled_now.items():
            fill(self.filled[number], made)
        self.callers, self.filled = [], []
        self.recorded.join(recorded)
        return out

    def remember_random(self) -> None:
        """Ahead of a forward that a backward may follow: what surrounds it."""
        self.moment = Moment(self.turn, self.layer is None)

    def kept_inputs(self) -> list[torch.Tensor]:
        """After the forward, ahead of result(): what backward() computes again from. The frame lets its inputs go."""
        tensors, self.tensors = self.tensors, []
        self.callers = [tensors[number] for number in self.written]
        for number in self.written:
            tensors[number] = tensors[number].clone()
        return tensors

    def forward(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """The forward visit: nothing is kept but what backward() recomputes from."""
        self.remember_random()
        with torch.no_grad(), without_fast_path(), self.turn.engine.turn(self.turn, "forward") as weights:
            return self.compute(tensors, weights, keep=True)

    def backward(self, tensors: list[torch.Tensor], grads: list[torch.Tensor | None], keep: bool = False) -> list[torch.Tensor | None]:
        """The backward visit: adds the weights' gradients to their sums, returns those of the inputs. Computes again what was not kept."""
        turn, engine = self.turn, self.turn.engine
        inputs = [t.detach().requires_grad_(t.requires_grad) for t in tensors]
        with self.moment.again(), engine.turn(turn, "backward", keep) as weights:
            outs: list[torch.Tensor] = []
            if self.layer is None:
                with torch.enable_grad(), autocast_as(self.autocast):
                    outs = self.compute(inputs, weights)
                self.moment.look(outs)
                engine.activations.look()
            return self.differentiate(inputs, weights, outs, grads)

    def differentiate(
        self, tensors: list[torch.Tensor], weights: list[torch.Tensor], outs: list[torch.Tensor], grads: list[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """Within a visit that computed `outs` from `tensors` (a fused layer need not have): the gradients of these from those of the results."""
        if self.layer is None:
            pairs = [(out, grad) for out, grad in zip(outs, grads, strict=True) if grad is not None and out.requires_grad]
            if pairs:
                torch.autograd.backward([out for out, _ in pairs], [grad for _, grad in pairs])
            return [t.grad for t in tensors]
        found: list[torch.Tensor | None] = [None] * len(tensors)
        if grads[0] is not None:
            self.layer.go_by(self.found)
            with torch.no_grad():
                gradient = self.layer.backward(weights, self._of(tensors), grads[0], self.kept)
                if isinstance(first := self.operands[0], int):
                    found[first] = gradient
        self.kept = None
        return found


class _Visit(torch.autograd.Function):
    """A module in the free loop: forward without a graph, backward by recomputation, so that no graph outlives a visit."""

    @staticmethod
    def forward(ctx: Any, frame: Frame, always: torch.Tensor, *tensors: torch.Tensor) -> Any:
        ctx.frame = frame
        outs = frame.forward(list(tensors))
        saved = [kept if kept is t else kept.requires_grad_(t.requires_grad) for kept, t in zip(frame.kept_inputs(), tensors, strict=True)]
        ctx.save_for_backward(*saved)
        # A result is a tensor of its own to the caller, who may change it in place: no view, and none of the inputs.
        outs = [out.detach() if out._is_view() or any(out is t for t in tensors) else out for out in outs]
        ctx.mark_non_differentiable(*[out for out in outs if not out.is_floating_point()])
        return tuple(outs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        tensors = list(ctx.saved_tensors)
        if not torch._C._will_engine_execute_node(ctx.frame.sink):
            raise _native.UsageError(
                f"torch.autograd.grad through {ctx.frame.turn.name} is not there, nor backward(inputs=...): the gradients of its weights would be added as well; "
                "call backward(), read .grad of what you need, and drop the weights' with zero_grad()"
            )
        ctx.frame.turn.engine.expect_end()
        inputs = ctx.frame.backward(tensors, list(grads))
        return None, None, *inputs
