"""What the code of one micro-batch may switch in the model while others wait: train() and eval(), PEFT's adapters with their hooks, and which of their parameters
train."""

from __future__ import annotations

from typing import Any

from torch import nn

from .hooks import FORWARD_HOOKS, GONE, put, refill
from .parameter import StreamedParameter

_NAMES = ("training", "_disable_adapters", "_active_adapter", "active_adapter")

State = tuple[list[Any], list[bool], list[tuple[Any, ...]]]


class Modes:
    """Of a model and all modules in it. Whoever changes them between now() and put() says so with another now()."""

    def __init__(self, model: nn.Module) -> None:
        modules = list(model.modules())
        switched = [m for m in modules if isinstance(getattr(m, "_disable_adapters", None), bool)]
        self._places = [(vars(m), name) for m in modules for name in _NAMES if name in vars(m)]
        self._places += [(vars(m), name) for m in switched for name in _NAMES if name not in vars(m)]
        own = {id(p): p for m in switched for p in m.parameters() if p.requires_grad or not isinstance(p, StreamedParameter)}
        self._parameters = list(own.values())
        self._hooks = [vars(m)[name] for m in switched for name in FORWARD_HOOKS]  # PeftModel.forward() adds some for its call (aLoRA, adapter_names)
        self._state = self._look()

    def _look(self) -> State:
        return [held.get(name, GONE) for held, name in self._places], [p.requires_grad for p in self._parameters], [tuple(held.items()) if held else () for held in self._hooks]

    def now(self) -> State:
        """What is there. The same object for as long as nothing changes."""
        found = self._look()
        if found != self._state:
            self._state = found
        return self._state

    def put(self, state: State) -> None:
        if state is self._state:
            return
        values, trains, hooks = state
        for (held, name), value in zip(self._places, values, strict=True):
            put(held, name, value)
        for p, wants in zip(self._parameters, trains, strict=True):
            if p.requires_grad is not wants:
                p.requires_grad = wants
        for there, entries in zip(self._hooks, hooks, strict=True):
            if there or entries:
                refill(there, entries)
        self._state = state

    def without_adapters(self, state: State) -> State:
        """The same, but every layer computes what it would without adapters. Parameters keep their requires_grad, which disable_adapter() changes, so that a layer may
        compute now with adapters and now without."""
        values, trains, hooks = state
        return [True if name == "_disable_adapters" else value for (_, name), value in zip(self._places, values, strict=True)], trains, hooks
