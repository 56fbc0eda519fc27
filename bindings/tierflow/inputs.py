"""What a turn's module is called with: containers that it fills, tensors that it changes in place, and objects whose tensors nobody sees."""

from __future__ import annotations

import collections
import dataclasses
import types
from collections.abc import Iterator, Mapping, MutableMapping, MutableSequence, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import SUPPORTED_NODES

from . import _native

PLAIN = {type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, range, slice, type(Ellipsis)}
_NEVER = (nn.Module, type, types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.ModuleType)
_FILLED = (list, dict, collections.UserDict, collections.deque)


@dataclasses.dataclass(frozen=True)
class There:
    """In what a container became: the element that it had at this place."""

    place: Any


@dataclasses.dataclass(frozen=True)
class Moved:
    """In what a module returned: the input of this number, which it changed in place."""

    number: int


def filled(args: tuple, kwargs: dict[str, Any]) -> list[Any]:
    """The containers that a module may fill, outer ones first."""
    found: list[Any] = []

    def look(value: Any) -> None:
        kind = type(value)
        if kind is torch.Tensor or kind in PLAIN:
            return
        if isinstance(value, tuple):
            for each in value:
                look(each)
        elif isinstance(value, _FILLED) and kind in SUPPORTED_NODES:
            found.append(value)
            for each in value.values() if isinstance(value, Mapping) else value:
                look(each)

    for value in args:
        look(value)
    for value in kwargs.values():
        look(value)
    return found


def contents(containers: list[Any]) -> list[Any]:
    return [dict(each) if isinstance(each, Mapping) else list(each) for each in containers]


def became(containers: list[Any], before: list[Any]) -> dict[int, list[Any]]:
    """The new contents of the containers that are not as they were, by number; of a mapping pairs."""
    found: dict[int, list[Any]] = {}
    for number, (now, then) in enumerate(zip(containers, before, strict=True)):
        if isinstance(now, Mapping):
            if list(now) != list(then) or any(value is not then[key] for key, value in now.items()):
                found[number] = [(key, There(key) if key in then and then[key] is value else value) for key, value in now.items()]
        elif len(now) != len(then) or any(one is not other for one, other in zip(now, then, strict=True)):
            found[number] = [next((There(place) for place, other in enumerate(then) if other is each), each) for each in now]
    return found


def fill(container: Any, made: list[Any]) -> None:
    """Gives the caller's container what became of the module's."""
    if isinstance(container, MutableMapping):
        pairs = {key: container[value.place] if isinstance(value, There) else value for key, value in made}
        for key in [key for key in container if key not in pairs]:
            del container[key]
        for key, value in pairs.items():
            container[key] = value
        return
    assert isinstance(container, MutableSequence)
    then = list(container)
    container.clear()
    container.extend([then[value.place] if isinstance(value, There) else value for value in made])


def _tensors_in(value: Any, seen: set[int], depth: int = 4) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
        return
    if depth == 0 or type(value) in PLAIN or isinstance(value, _NEVER) or id(value) in seen or len(seen) > 2000:
        return
    seen.add(id(value))
    parts: list[Any] = []
    if isinstance(value, Mapping):
        parts += value.values()
    elif isinstance(value, (Sequence, set, frozenset, collections.deque)):
        parts += value
    parts += getattr(value, "__dict__", {}).values()
    parts += [getattr(value, name, None) for kind in type(value).__mro__ for name in _slots(kind)]
    for part in parts:
        yield from _tensors_in(part, seen, depth - 1)


def _slots(kind: type) -> Sequence[str]:
    slots = kind.__dict__.get("__slots__", ())
    return [slots] if isinstance(slots, str) else list(slots)


def tensors_in(objects: Sequence[Any]) -> list[torch.Tensor]:
    """Tensors within objects that torch's pytree does not know."""
    seen: set[int] = set()
    return [tensor for each in objects for tensor in _tensors_in(each, seen)]


_HOW = "return or pass a tuple or a dictionary, or register the type with torch.utils._pytree.register_pytree_node"


def expect_no_gradient(turn: str, objects: Sequence[Any]) -> None:
    """Raises UsageError where an object that a module is called with has a tensor with a gradient."""
    for each in objects:
        if any(tensor.requires_grad for tensor in tensors_in([each])):
            raise _native.UsageError(f"{turn} is called with a {_kind(each)}, and a gradient would be lost in it, as torch's pytree does not know that type: {_HOW}")


def expect_none_new(turn: str, objects: Sequence[Any], given: Sequence[torch.Tensor]) -> None:
    """Raises UsageError where an object, returned or passed, has a tensor that the module computed. given: those that it was called with."""
    known = {id(tensor) for tensor in given}
    for each in objects:
        if any(tensor.is_floating_point() and id(tensor) not in known for tensor in tensors_in([each])):
            raise _native.UsageError(f"{turn} puts what it computes into a {_kind(each)}, where gradients would be lost, as torch's pytree does not know that type: {_HOW}")


def _kind(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def storages(tensors: Sequence[torch.Tensor]) -> list[int]:
    return [tensor.untyped_storage()._cdata for tensor in tensors]


def is_empty(cache: Any) -> bool:
    """Whether a key-value cache of transformers has nothing yet. That of linear attention does not say."""
    try:
        return cache.get_seq_length() == 0
    except (ValueError, NotImplementedError, IndexError):
        return False


def expect_no_cache(module: Any, args: tuple, kwargs: dict[str, Any]) -> None:
    """Ahead of a transformers model's forward. Raises UsageError for a cache that would stay empty, so that the next call saw its own tokens alone."""
    if not torch.is_grad_enabled() or kwargs.get("use_cache") is False or (cache := kwargs.get("past_key_values")) is None or not hasattr(cache, "get_seq_length") or not is_empty(cache):
        return
    given = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
    if any(value.requires_grad for value in given) or any(p.requires_grad for p in module.parameters()):
        raise _native.UsageError("a cache stays empty while gradients are on, since the backward computes each call again: call the model under torch.no_grad(), or without past_key_values")
