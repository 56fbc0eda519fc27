"""Hooks and forward() of modules as they were at one time: a recomputation runs those of its forward, as a graph would."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_module

GONE = object()  # in the place of an attribute that is not there
FORWARD_HOOKS = ("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs")
_OF_MODULES = (*FORWARD_HOOKS, "_backward_hooks", "_backward_pre_hooks")
_OF_ALL = ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks", "_global_backward_pre_hooks")
_LIBRARIES = ("torch.", "transformers.", "peft.", "accelerate.", "tierflow.")

Put = tuple[dict[str, Any], str, Any]
Swap = tuple[dict[Any, Any], Mapping[Any, Any]]  # a dictionary, and what is to be in it


def is_of_a_library(hook: Any) -> bool:
    return (getattr(hook, "__module__", None) or type(hook).__module__).startswith(_LIBRARIES)


class ModuleHooks:
    """modules: the outermost first, whose own hooks run outside of its turn."""

    def __init__(self, modules: list[nn.Module]) -> None:
        self.inner = modules[1:]
        self.of = _hooks(self.inner)
        self.everywhere = _everywhere()  # the user's own hooks of all modules
        self.forwards = [m.__dict__.get("forward", GONE) for m in self.inner]
        self.classes = [type(m).forward for m in self.inner]

    def other_class(self) -> bool:
        return any(type(m).forward is not then for m, then in zip(self.inner, self.classes, strict=True))

    def put_back(self) -> tuple[list[Swap], list[Put]]:
        """What has to be put where for the hooks, and forward() of single modules, to be those of then. A dictionary of hooks stays the one that handles know."""
        swaps: list[Swap] = []
        puts: list[Put] = []
        if (now_everywhere := _everywhere()) != self.everywhere:
            for name in {*self.everywhere, *now_everywhere}:
                kept = [(key, hook) for key, hook in _all(name).items() if is_of_a_library(hook)]
                swaps.append((_all(name), OrderedDict([*kept, *self.everywhere.get(name, {}).items()])))
        now = _hooks(self.inner)
        for number in {*self.of, *now} if self.of or now else ():
            then, here = self.of.get(number, {}), now.get(number, {})
            for name in {*then, *here}:
                if list(then.get(name, {}).items()) != list(here.get(name, {}).items()):
                    swaps.append((getattr(self.inner[number], name), then.get(name, {})))
        for m, then in zip(self.inner, self.forwards, strict=True):
            if m.__dict__.get("forward", GONE) is not then:
                puts.append((m.__dict__, "forward", then))
        return swaps, puts


def put(holder: dict[str, Any], name: str, value: Any) -> None:
    if value is GONE:
        holder.pop(name, None)
    else:
        holder[name] = value


def refill(held: dict[Any, Any], entries: Any) -> None:
    held.clear()
    held.update(entries)


def _hooks(modules: list[nn.Module]) -> dict[int, dict[str, Any]]:
    """Of those modules that have hooks, by their number."""
    found = {}
    for number, m in enumerate(modules):
        if m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks:
            found[number] = {name: hooks.copy() for name in _OF_MODULES if (hooks := getattr(m, name))}
    return found


def _all(name: str) -> dict[Any, Any]:
    return vars(torch_module)[name]


def _everywhere() -> dict[str, Any]:
    """Those of libraries are left out: they count and trace what runs, wherever it runs."""
    return {name: OrderedDict((key, hook) for key, hook in _all(name).items() if not is_of_a_library(hook)) for name in _OF_ALL if _all(name)}
