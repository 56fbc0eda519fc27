"""What of a streamed model is saved, and under which names."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn

from . import _native
from .budget import parse_size
from .engine import Engine
from .folders import written_to
from .parameter import StreamedParameter

log = logging.getLogger("tierflow")


def engine_of(module: nn.Module) -> Engine:
    """The engine of a streamed module, or of one that holds it (a PEFT model)."""
    for parameter in module.parameters():
        if isinstance(parameter, StreamedParameter):
            return cast(Engine, parameter.engine)
    raise _native.UsageError("the module does not stream: make it with tierflow.load() or tierflow.wrap()")


def uncompiled(module: nn.Module) -> nn.Module:
    """What torch.compile() was given, where it returned the module: parameters have their own names there."""
    inner = getattr(module, "_orig_mod", None)
    return inner if isinstance(inner, nn.Module) else module


def plain_parts(state: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Each under its own name."""
    return {name: [(name, list(tensor.shape))] for name, tensor in state.items()}


def saved_state(module: nn.Module) -> dict[str, torch.Tensor]:
    """What of a module is saved: its floating-point parameters and buffers, each under the first of its names."""
    module, engine = uncompiled(module), engine_of(module)
    state: dict[str, torch.Tensor] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        if torch.is_floating_point(value) and not any(value is seen for seen in state.values()):
            state[name] = value
        if isinstance(value, StreamedParameter) and value.engine is not engine:
            raise _native.UsageError(f"{name} belongs to another streamed model: save each of them on its own")
    return state


def by_place(engine: Engine, state: dict[str, torch.Tensor], parts: dict[str, Any]) -> tuple[list[list[Any]], list[tuple[torch.Tensor, Any]]]:
    """The tensors that saved_state()'s are cut into: of those that stream by unit and tensor, and of the others."""
    streamed: list[list[Any]] = [[[] for _ in handles] for handles in engine.handles]
    ordinary: list[tuple[torch.Tensor, Any]] = []
    for name, own in parts.items():
        value = state[name]
        if isinstance(value, StreamedParameter):
            streamed[value.unit][value.index] = own
        else:
            ordinary.append((value, own))
    return streamed, ordinary


def write(module: nn.Module, folder: str | os.PathLike, max_shard_size: int | str, named: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    engine, state = engine_of(module), saved_state(module)
    parts, extra = named(state)
    streamed, ordinary = by_place(engine, state, parts)
    for value, own in ordinary:
        pieces = value.detach().flatten().split([math.prod(shape) for _, shape in own])
        extra += [(new, piece.view(shape), piece.clone) for (new, shape), piece in zip(own, pieces, strict=True)]
    with written_to(folder):
        os.makedirs(folder, exist_ok=True)
    if broken := engine.native.save(os.fspath(folder), streamed, extra, parse_size(max_shard_size)):
        log.warning("the values of %s are not all finite: what was saved in %s is of no use", broken, folder)
