"""Turns: the moments in which a module holds its real weights, and what a call of it has to keep between forward and backward."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from . import _native
from .ambient import autocast_as, autocast_state, without_cudnn_attention, without_fast_path
from .fused import Departs, Kept, Layer, layer_of
from .inputs import PLAIN, Moved, There, became, contents, expect_no_gradient, expect_none_new, fill, filled, is_empty, storages, tensors_in
from .parameter import StreamedParameter
from .protocols import TurnTaker
from .recorded import Recorded
from .replays import Moment, Parts, version

local = threading.local()  # .lane: the micro-batch of a layer-major step that this thread runs


class Turn:
    """A module and the units whose weights it needs while it runs."""

    def __init__(self, engine: TurnTaker, number: int, name: str, module: nn.Module | None, units: list[int]) -> None:
        self.engine, self.number, self.name, self.units = engine, number, name, units
        self.is_loose = module is None  # stands for parameters that are used outside of any module's turn
        self.module = nn.Module() if module is None else module
        self.unit_set = set(units)
        self.parts = Parts(self.module)
        self.handles = [handle for unit in units for handle in engine.handles[unit]]
        self.places = [place for unit in units for place in engine.places[unit]]
        # Only places inside of this module are bound: another module's own copy of the name has its own turn.
        inside = {id(m) for m in self.module.modules()}
        self.places = [[(m, name) for m, name in places if id(m) in inside] for places in self.places]
        self.recurrent = [m for m in self.module.modules() if isinstance(m, nn.RNNBase)]
        self.bound: list[tuple[nn.Module, str, Any, Any, int]] = []  # what bind() put where, in the place of which handle, and its version
        self.touched: dict[int, Any] = {}  # by id of their handle: weights that had another version after a visit, as they are ahead of this one
        self.replaced = ""  # why the turn cannot be taken any more
        self.harmless: dict[int, set[int]] = {}  # likewise: by how many versions they came on without being written
        self.seen = False  # whether a visit without a graph needed none
        self.grows = False  # what a hook adds needs a gradient, though nothing of the module does
        self.layer = layer_of(self) if engine.fused_layers else None
        self.forward = self.module.forward
        self.module.forward = self.run  # type: ignore[method-assign]

    def roles(self) -> list[str]:
        """What each of the turn's parameters is called within its module."""
        paths = {id(m): f"{path}." if path else "" for path, m in self.module.named_modules()}
        return [next((paths[id(m)] + name for m, name in places), "") for places in self.places]

    def fused(self, args: tuple, kwargs: dict[str, Any]) -> list[torch.Tensor] | None:
        """What the turn's fused layer computes a call from; None where the module's own code has to run."""
        if self.layer is None or self.others_in_place():
            return None
        try:
            return self.layer.operands(args, kwargs)
        except Departs as why:
            if not why.silent:
                self.engine.say_departs(self, str(why))
            return None

    def trains(self) -> bool:
        return self.grows or any(handle.requires_grad for handle in self.handles) or any(p.requires_grad for p in self.module.parameters())

    def gradient_units(self) -> list[bool]:
        """Which units get gradients now."""
        wanted = []
        for unit in self.units:
            asks = any(handle.requires_grad for handle in self.engine.handles[unit])
            if asks and not self.engine.trainable[unit]:
                name = next(h.label for h in self.engine.handles[unit] if h.requires_grad)
                raise _native.UsageError(
                    f"{name} requires a gradient, but was frozen when the model was loaded and has no optimizer state: load it with "
                    "plan(trainable=True), or set requires_grad before tierflow.wrap()"
                )
            wanted.append(asks)
        return wanted

    def others_in_place(self) -> list[Any]:
        """What stands where its streamed parameters belong, between visits."""
        if self.bound:
            self._take_back()  # what a Ctrl-C in unbind() left
        return [held for handle, places in zip(self.handles, self.places, strict=True) for m, name in places if (held := m._parameters.get(name)) is not handle]

    def bind(self, weights: list[Any]) -> None:
        """Puts the weights where the module looks for its parameters, and as such: what takes one out and puts it back (a parametrization) finds its place again."""
        self._take_back()  # what a Ctrl-C in unbind() left
        for handle, places, weight in zip(self.handles, self.places, weights, strict=True):
            weight._is_param = True
            if id(handle) in self.touched:
                self.touched[id(handle)] = weight.detach().clone()
            for module, name in places:
                if module._parameters.get(name) is handle:  # the user may have put a parameter of his own there
                    self.bound.append((module, name, handle, weight, version(weight)))  # first: a Ctrl-C may come between the two
                    module._parameters[name] = weight
        self._tell_recurrent()

    def unbind(self) -> None:
        """Puts the handles back. Raises UsageError where a place has something else by now: it may refer to memory that the next visit reuses; and for a weight that
        was written, which the next visit would not find."""
        written = self._take_back()
        if written:
            raise _native.UsageError(
                f"{written} was written while its module ran, which is lost (nn.Embedding(max_norm=...) does that, too): write it between steps, or keep what a "
                "forward changes in a buffer"
            )

    def _take_back(self) -> str:
        """Returns the name of a weight that was written, if that is known."""
        written = ""
        for _, _, handle, weight, before in self.bound:
            values = self.touched.get(id(handle))
            if version(weight) != before:  # written, or Tensor.set_() to itself, as by a parametrization: the next visit tells
                steps = version(weight) - before
                if steps in self.harmless.get(id(handle), ()):
                    continue
                if values is None:
                    self.touched[id(handle)] = None
                elif torch.equal(values.reshape(-1).view(torch.uint8), weight.detach().reshape(-1).view(torch.uint8)):
                    self.harmless.setdefault(id(handle), set()).add(steps)
                    del self.touched[id(handle)]
                else:
                    written, self.touched[id(handle)] = handle.label, None
            elif values is not None:
                self.touched[id(handle)] = None
        for module, name, handle, weight, _ in self.bound:
            held: dict[str, Any] = module._parameters
            if held.get(name) is weight:
                held[name] = handle
            elif held.get(name) is not handle:
                self.replaced = self.replaced or (
                    f"{handle.label} was replaced while its module ran, or taken out of it: what streams has to stay in its place; change a module before tierflow.wrap()"
                )
        self.bound = []
        self._tell_recurrent()
        if self.replaced:
            raise _native.UsageError(self.replaced)
        return written

    def _tell_recurrent(self) -> None:
        for module in self.recurrent:
            module._flat_weights = [getattr(module, name) for name in module._flat_weights_names]

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """What calling the module does."""
        active = self.engine.active
        if active is not None:
            if self.engine.active_thread != threading.get_ident():
                raise _native.UsageError("two streamed modules run at the same time: models stream in one thread")
            if self.unit_set <= active.unit_set:
                return self.forward(*args, **kwargs)
            raise _native.UsageError(
                f"{self.name} runs inside of {active.name}: they have to stream as one; name the class of the outer module in plan(blocks=[...])"
            )
        frame = Frame(self, args, kwargs)
        lane = getattr(local, "lane", None)
        return lane.call(frame) if lane is not None else frame.call()


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
