"""Turns: the moments in which a module holds its real weights."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import nn

from . import _native
from .fused import Departs, layer_of
from .protocols import TurnTaker
from .replays import Parts, version

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

    @torch._disable_dynamo  # compiled code breaks its graph here: weights come and go beside it
    def run(self, *args: Any, **kwargs: Any) -> Any:
        """What calling the module does."""
        if torch.jit.is_tracing():
            raise _native.UsageError("torch.jit.trace of a streamed model: its weights are not in memory while its modules do not run; save it, and trace the saved model")
        active = self.engine.active
        if active is not None:
            if self.engine.active_thread != threading.get_ident():
                raise _native.UsageError("two streamed modules run at the same time: models stream in one thread")
            if self.unit_set <= active.unit_set:
                return self.forward(*args, **kwargs)
            raise _native.UsageError(
                f"{self.name} runs inside of {active.name}: they have to stream as one; name the class of the outer module in plan(blocks=[...])"
            )
        return self.engine.call(self, args, kwargs)
