"""Turns: the moments in which a module holds its real weights."""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_flatten, tree_unflatten

from . import _native
from .parameter import StreamedGradient, StreamedParameter
from .units import Cut

log = logging.getLogger("tierflow")
_MANY_DEPARTURES = 8  # changes between training and evaluation, say, are nothing to speak of
_local = threading.local()  # .lane: the micro-batch of a layer-major step that this thread runs


_open: weakref.WeakSet[Engine] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Files do not outlive the process, whatever still refers to a model."""
    for engine in list(_open):
        engine.close()


class _Closed:
    def __getattr__(self, name: str) -> Any:
        raise _native.UsageError("the streamed model was closed: its state is gone")


class Turn:
    """A module and the units whose weights it needs while it runs."""

    def __init__(self, engine: Engine, number: int, name: str, module: nn.Module | None, units: list[int]) -> None:
        self.engine, self.number, self.name, self.module, self.units = engine, number, name, module, units
        self.unit_set = set(units)
        self.handles = [handle for unit in units for handle in engine.handles[unit]]
        self.places = [place for unit in units for place in engine.places[unit]]
        # Only places inside of this module are bound: another module's own copy of the name has its own turn.
        inside = set() if module is None else {id(m) for m in module.modules()}
        self.places = [[(m, name) for m, name in places if id(m) in inside] for places in self.places]
        self.recurrent = [m for m in module.modules() if isinstance(m, nn.RNNBase)] if module is not None else []
        self.forward = None if module is None else module.forward
        if module is not None:
            module.forward = self.run  # type: ignore[method-assign]

    def trains(self) -> bool:
        return any(handle.requires_grad for handle in self.handles) or any(p.requires_grad for p in self.module.parameters())

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

    def bind(self, weights: list[torch.Tensor]) -> None:
        for handle, places, weight in zip(self.handles, self.places, weights, strict=True):
            for module, name in places:
                if module._parameters.get(name) is handle:  # the user may have put a parameter of his own there
                    module._parameters[name] = weight
        self._tell_recurrent()

    def unbind(self, weights: list[torch.Tensor]) -> None:
        for handle, places, weight in zip(self.handles, self.places, weights, strict=True):
            for module, name in places:
                if module._parameters.get(name) is weight:
                    module._parameters[name] = handle
        self._tell_recurrent()

    def _tell_recurrent(self) -> None:
        for module in self.recurrent:
            module._flat_weights = [getattr(module, name) for name in module._flat_weights_names]

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """What calling the module does."""
        active = self.engine.active
        if active is not None:
            if self.unit_set <= active.unit_set:
                return self.forward(*args, **kwargs)
            raise _native.UsageError(
                f"{self.name} runs inside of {active.name}: they have to stream as one; name the class of the outer module in plan(blocks=[...])"
            )
        frame = Frame(self, args, kwargs)
        lane = getattr(_local, "lane", None)
        return lane.call(frame) if lane is not None else frame.call()


class Frame:
    """One call of a turn's module: its inputs as a list of tensors, and how to run it on others in their place."""

    def __init__(self, turn: Turn, args: tuple, kwargs: dict[str, Any]) -> None:
        self.turn = turn
        leaves, self.spec = tree_flatten((args, kwargs))
        self.needs_graph = torch.is_grad_enabled()
        self.leaves = [self._checked(leaf) for leaf in leaves]
        self.where = [i for i, leaf in enumerate(self.leaves) if isinstance(leaf, torch.Tensor)]
        self.tensors = [self.leaves[i] for i in self.where]
        for i in self.where:
            self.leaves[i] = None
        self.needs_graph = self.needs_graph and (any(t.requires_grad for t in self.tensors) or turn.trains())
        self.out_spec: Any = None
        self.out_leaves: list[Any] = []
        self.out_where: list[int] = []
        self.random: Any = None
        self.autocast = _autocast_state(turn.engine.device.type)

    def _checked(self, leaf: Any) -> Any:
        if self.needs_graph and hasattr(leaf, "get_seq_length") and hasattr(leaf, "update"):
            # A key-value cache: the recomputation would fill it a second time. An empty one changes nothing.
            if leaf.get_seq_length() == 0:
                return None
            raise _native.UsageError(f"{self.turn.name} was called with a filled cache while gradients are on: pass use_cache=False")
        return leaf

    def call(self) -> Any:
        if not self.needs_graph:
            with torch.no_grad(), self.turn.engine.turn(self.turn, "evaluate"):
                outs = self.compute(self.tensors)
        else:
            outs = _Visit.apply(self, torch.empty(0, requires_grad=True), *self.tensors)
        return self.result(outs)

    def compute(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Runs the module, its weights bound, on tensors in the place of those it was called with."""
        leaves = list(self.leaves)
        for index, tensor in zip(self.where, tensors, strict=True):
            leaves[index] = tensor
        args, kwargs = tree_unflatten(leaves, self.spec)
        out = self.turn.forward(*args, **kwargs)
        self.out_leaves, self.out_spec = tree_flatten(out)
        self.out_where = [i for i, leaf in enumerate(self.out_leaves) if isinstance(leaf, torch.Tensor)]
        outs = [self.out_leaves[i] for i in self.out_where]
        for i in self.out_where:
            self.out_leaves[i] = None
        owns = self.turn.engine.native.owns
        return [out.clone() if owns(out.data_ptr()) else out for out in outs]

    def result(self, outs: Any) -> Any:
        leaves = list(self.out_leaves)
        for index, tensor in zip(self.out_where, outs, strict=True):
            leaves[index] = tensor
        return tree_unflatten(leaves, self.out_spec)

    def remember_random(self) -> None:
        self.random = _random_state(self.turn) if self.turn.module.training else None

    def forward(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """The forward visit: nothing is kept but what backward() recomputes from."""
        self.remember_random()
        with torch.no_grad(), self.turn.engine.turn(self.turn, "forward"):
            return self.compute(tensors)

    def backward(self, tensors: list[torch.Tensor], grads: list[torch.Tensor | None], keep: bool = False) -> list[torch.Tensor | None]:
        """The backward visit: recomputes, adds the weights' gradients to their sums, returns those of the inputs."""
        turn, engine = self.turn, self.turn.engine
        inputs = [t.detach().requires_grad_(t.requires_grad) for t in tensors]
        with _restored(self.random, turn), engine.turn(turn, "backward", keep) as weights:
            with torch.enable_grad(), _autocast(self.autocast):
                outs = self.compute(inputs)
            _differentiate(outs, grads)
            engine.native.add([weight.grad for weight in weights])
        return [t.grad for t in inputs]


def _differentiate(outs: list[torch.Tensor], grads: list[torch.Tensor | None]) -> None:
    pairs = [(out, grad) for out, grad in zip(outs, grads, strict=True) if grad is not None and out.requires_grad]
    if pairs:
        torch.autograd.backward([out for out, _ in pairs], [grad for _, grad in pairs])


class _Visit(torch.autograd.Function):
    """A module in the free loop: forward without a graph, backward by recomputation, so that no graph outlives a visit."""

    @staticmethod
    def forward(ctx: Any, frame: Frame, always: torch.Tensor, *tensors: torch.Tensor) -> Any:
        ctx.frame = frame
        ctx.save_for_backward(*tensors)
        outs = frame.forward(list(tensors))
        ctx.mark_non_differentiable(*[out for out in outs if not out.is_floating_point()])
        frame.tensors = []  # saved above
        return tuple(out.view_as(out) if any(out is t for t in tensors) else out for out in outs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        tensors = list(ctx.saved_tensors)
        inputs = ctx.frame.backward(tensors, list(grads))
        return None, None, *inputs


class Engine:
    """The streamed parameters of one model. One thread at a time."""

    def __init__(self, model: nn.Module, cut: Cut, native: Any, device: str) -> None:
        self.native = native
        self.device = torch.device(device)
        self.active: Turn | None = None
        self.trainable = [unit.trainable for unit in cut.units]
        self.broken: str | None = None  # why this step's gradients cannot be applied
        self.skipped = 0
        self._scales: dict[tuple[int, int], float] = {}
        self._gradients: dict[tuple[int, int], StreamedGradient] = {}
        self._spent: set[tuple[int, int]] = set()  # gradients that step() took and nobody cleared
        self._departures = 0
        self.handles: list[list[StreamedParameter]] = []
        self.places: list[list[list[tuple[nn.Module, str]]]] = []
        for number, unit in enumerate(cut.units):
            handles = []
            for index, tensor in enumerate(unit.tensors):
                wants = tensor.parameter.requires_grad and unit.trainable
                handle = StreamedParameter.make(self, number, index, tensor.names[0], tensor.parameter.shape, wants)
                for module, name in tensor.places:
                    module._parameters[name] = handle
                handles.append(handle)
            self.handles.append(handles)
            self.places.append([tensor.places for tensor in unit.tensors])
        _open.add(self)
        self.turns = [Turn(self, number, name, module, units) for number, (name, module, units) in enumerate(cut.turns)]
        self._loose = {unit: turn for turn in self.turns if turn.module is None for unit in turn.units}
        self.shared = [sum(unit in turn.unit_set for turn in self.turns) > 1 for unit in range(len(cut.units))]
        for unit in range(len(self.handles)):
            for handle in self.handles[unit]:
                if handle.requires_grad:
                    handle.register_post_accumulate_grad_hook(_take_outside_gradient)

    def close(self) -> None:
        """Ends the model: gives memory back and removes its files."""
        self.native = _Closed()
        _open.discard(self)

    @contextlib.contextmanager
    def turn(self, turn: Turn, phase: str, keep: bool = False) -> Iterator[list[torch.Tensor]]:
        """Binds a module's weights; while it lasts they are there. phase: forward, backward, head or evaluate."""
        adds = phase in ("backward", "head")
        wanted = turn.gradient_units() if adds else []
        if adds and self._spent and any((h.unit, h.index) in self._spent for h in turn.handles):
            raise _native.UsageError("backward() after step() without zero_grad() between: gradients of the last step are already applied")
        if self.native.inside:
            raise _native.UsageError("two streamed modules run at the same time: models stream in one thread")
        weights: list[torch.Tensor] = []
        try:  # from here on: a signal that comes while enter() waits is raised as it returns
            weights = self.native.enter(turn.number, phase, wanted, keep)
            self.active = turn
            if adds:
                for handle, weight in zip(turn.handles, weights, strict=True):
                    weight.requires_grad_(handle.requires_grad)
            turn.bind(weights)
            yield weights
        except BaseException as error:
            if adds and self.native.inside:
                self.native.add([None] * len(turn.handles))
                self.broken = f"backward() of {turn.name} ended with {type(error).__name__}"
            raise
        finally:
            self.active = None
            if weights:
                turn.unbind(weights)
            if self.native.inside:
                self.native.leave()
            self._say_departures()

    def _say_departures(self) -> None:
        departures = self.native.departures
        if departures > _MANY_DEPARTURES >= self._departures:
            log.warning("modules run in another order than before: their weights are fetched when they are asked for (said once)")
        self._departures = departures

    # Parameters outside of their turn.

    def read(self, handle: StreamedParameter, master: bool = False) -> torch.Tensor:
        return self.native.read(handle.unit, handle.index, master).to(self.device if not master else "cpu")

    def write(self, handle: StreamedParameter, values: torch.Tensor) -> None:
        self.native.write(handle.unit, handle.index, values.detach().float())

    def add_outside(self, handle: StreamedParameter, grad: torch.Tensor) -> None:
        """A gradient of a parameter that was used outside of any turn's module."""
        turn = self._loose.get(handle.unit) or next(t for t in self.turns if handle.unit in t.unit_set)
        wanted = [unit == handle.unit for unit in turn.units]
        self.native.enter(turn.number, "backward", wanted, False)
        try:
            self.native.add([grad.to(torch.bfloat16) if h is handle else None for h in turn.handles])
        finally:
            self.native.leave()

    # Gradients.

    def grad(self, handle: StreamedParameter) -> StreamedGradient | None:
        key = (handle.unit, handle.index)
        if key not in self._spent and not self.native.touched(*key):
            return None
        if key not in self._gradients:
            self._gradients[key] = StreamedGradient.make(self, *key, handle.label, handle.shape)
            self._gradients[key].life = {"dropped": False}  # shared with its aliases
        return self._gradients[key]

    def set_grad(self, handle: StreamedParameter | StreamedGradient, value: Any) -> None:
        key = (handle.unit, handle.index)
        if value is not None:
            if isinstance(value, StreamedGradient) and value.key() == key and value.engine is self:
                return
            raise _native.UsageError(f"the gradient of {handle.label} comes from backward(); it can be scaled, or dropped by setting it to None")
        self._spent.discard(key)
        if key in self._gradients:
            self._gradients.pop(key).life["dropped"] = True
        self._scales.pop(key, None)
        self.native.forget(*key)
        if not any(self.native.touched(handle.unit, index) for index in range(len(self.handles[handle.unit]))):
            self.native.drop_gradient(handle.unit)
        self.broken = None

    def zero_grad(self) -> None:
        for unit in range(len(self.handles)):
            if self.trainable[unit]:
                self.native.drop_gradient(unit)
        self._spent.clear()
        for gradient in self._gradients.values():
            gradient.life["dropped"] = True
        self._gradients.clear()
        self._scales.clear()
        self.broken = None

    def _live(self, gradient: StreamedGradient) -> tuple[int, int]:
        key = gradient.key()
        if gradient.life["dropped"]:
            raise _native.UsageError(f"the gradient of {gradient.label} was dropped by zero_grad()")
        if key in self._spent:
            raise _native.UsageError(f"the gradient of {gradient.label} was applied by step() and is gone: read it before")
        return key

    def read_grad(self, gradient: StreamedGradient) -> torch.Tensor:
        key = self._live(gradient)
        return (self.native.gradient(*key) * self._scales.get(key, 1.0)).to(gradient.dtype).to(self.device)

    def grad_norm(self, gradient: StreamedGradient) -> float:
        key = self._live(gradient)
        norm = math.sqrt(self.native.squares(*key)) * self._scales.get(key, 1.0)
        return norm if self.native.finite(gradient.unit) or not math.isfinite(norm) else math.inf

    def scale_grad(self, gradient: StreamedGradient, factor: float) -> None:
        key = self._live(gradient)
        self._scales[key] = self._scales.get(key, 1.0) * factor

    def step(self, how: dict[tuple[int, int], dict[str, Any]]) -> bool:
        """Gradients become updates, each ahead of its unit's next turn. how: by tensor, TensorUpdate's arguments without scale.

        False, and nothing changes, where a gradient is not finite.
        """
        if self.broken is not None:
            raise _native.UsageError(f"{self.broken}: this step's gradients are incomplete; call zero_grad() and go on")
        units = [unit for unit in range(len(self.handles)) if self.native.gradients_of(unit)]
        finite = all(self.native.finite(unit) for unit in units) and all(map(math.isfinite, self._scales.values()))
        updates = []
        for unit in units:
            entries = []
            for handle in self.handles[unit]:
                key = (unit, handle.index)
                active = finite and key in how and self.native.touched(*key)
                if self.native.touched(*key):
                    self._spent.add(key)
                entries.append(_native.TensorUpdate(**how[key], scale=self._scales.get(key, 1.0)) if active else _native.TensorUpdate())
            updates.append((unit, entries))
        self._scales.clear()
        if finite:
            self.native.step(updates)
            return True
        for unit in units:
            self.native.drop_gradient(unit)
        self.skipped += 1
        if self.skipped == 1:
            log.warning("a gradient is not finite: the step is skipped whole (said once)")
        return False

    def norm(self) -> float:
        """The global norm of all gradients, as they would be applied."""
        total = 0.0
        for handles in self.handles:
            for handle in handles:
                if (gradient := self.grad(handle)) is not None:
                    total += self.grad_norm(gradient) ** 2
        return math.sqrt(total)

    def __reduce__(self) -> Any:
        raise _native.UsageError("a streamed model cannot be pickled or copied: use save_pretrained() or tierflow.save(), or its state_dict()")

    def __deepcopy__(self, memo: Any) -> Any:
        return self.__reduce__()


def _take_outside_gradient(handle: StreamedParameter) -> None:
    stored = torch.Tensor.grad.__get__(handle)
    torch.Tensor.grad.__set__(handle, None)
    if stored is not None:
        handle.engine.add_outside(handle, stored)


def _autocast_state(device: str) -> tuple[str, bool, torch.dtype]:
    return device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)


def _autocast(state: tuple[str, bool, torch.dtype]) -> Any:
    device, enabled, dtype = state
    return torch.autocast(device, dtype=dtype, enabled=enabled) if enabled or torch.is_autocast_enabled(device) else contextlib.nullcontext()


def _random_state(turn: Turn) -> Any:
    device = turn.engine.device
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


@contextlib.contextmanager
def _restored(state: Any, turn: Turn) -> Iterator[None]:
    """Random numbers as they were at `state`; afterwards as they are now."""
    if state is None:
        yield
        return
    now = _random_state(turn)

    def put(saved: Any) -> None:
        torch.set_rng_state(saved[0])
        if saved[1] is not None:
            torch.cuda.set_rng_state(saved[1], turn.engine.device)

    put(state)
    try:
        yield
    finally:
        put(now)
