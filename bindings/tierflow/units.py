"""How a model is cut: which modules take turns, and which parameters stream together."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import nn

from . import _native
from .budget import UNCONVERTED

_CONTAINERS = (nn.ModuleList, nn.ModuleDict)


@dataclasses.dataclass
class Tensor:
    """A parameter: every name it has, and every place (module, attribute) that holds it."""

    parameter: nn.Parameter
    names: list[str]
    places: list[tuple[nn.Module, str]]
    moments_32: bool = False
    format: str = "bf16"  # in which it is stored: what is frozen may have another one
    turns: list[int] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Unit:
    """Parameters that stream together."""

    name: str
    trainable: bool
    tensors: list[Tensor] = dataclasses.field(default_factory=list)

    def describe(self) -> dict[str, Any]:
        tensors = [{"name": t.names[0], "shape": list(t.parameter.shape), "moments_32": t.moments_32, "format": t.format} for t in self.tensors]
        return {"name": self.name, "trainable": self.trainable, "tensors": tensors}


@dataclasses.dataclass
class Cut:
    """turns: the modules that run on their own, with their units; a module of None stands for parameters that are used outside of any."""

    units: list[Unit]
    turns: list[tuple[str, nn.Module | None, list[int]]]

    def describe(self) -> tuple[list[dict[str, Any]], list[list[int]]]:
        return [unit.describe() for unit in self.units], [units for _, _, units in self.turns]


def _owns_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _runs(module: nn.Module) -> bool:
    """Whether the module has a forward() of its own: containers are only looked into."""
    return not isinstance(module, _CONTAINERS) and type(module).forward is not nn.Module.forward


def find_turns(model: nn.Module, blocks: Sequence[str]) -> list[tuple[str, nn.Module]]:
    """Elements of the outermost ModuleLists (or modules of the classes named in `blocks`); of the rest, each module that owns parameters."""
    found: list[tuple[str, nn.Module]] = []

    def is_block(module: nn.Module) -> bool:
        return type(module).__name__ in blocks

    def holds_blocks(module: nn.Module) -> bool:
        if blocks:
            return any(is_block(m) for m in module.modules())
        return any(isinstance(m, _CONTAINERS) and _owns_parameters(m) for m in module.modules())

    def visit(name: str, module: nn.Module) -> None:
        if not _owns_parameters(module) or any(module is seen for _, seen in found):
            return
        if is_block(module):
            found.append((name, module))
        elif isinstance(module, _CONTAINERS) and not blocks:
            for child_name, child in module.named_children():
                if _runs(child):
                    if _owns_parameters(child) and not any(child is seen for _, seen in found):
                        found.append((f"{name}.{child_name}", child))
                else:
                    visit(f"{name}.{child_name}", child)
        elif not holds_blocks(module) and any(True for _ in module.parameters(recurse=False)):
            found.append((name, module))
        else:
            for child_name, child in module.named_children():
                visit(f"{name}.{child_name}" if name else child_name, child)

    visit("", model)
    if blocks and not any(is_block(m) for _, m in found):
        raise _native.UsageError(f"blocks={list(blocks)}: the model has no module of such a class")
    return found


class Keeps(Protocol):
    def keeps(self, names: Sequence[str], format: str) -> bool:
        """Whether a folder has the parameter of these names in the format."""


def _of_linear_layer(tensor: Tensor) -> bool:
    return tensor.parameter.dim() == 2 and all(type(owner) is nn.Linear for owner, _ in tensor.places)


def _of_experts(tensor: Tensor) -> bool:
    """The matrices of a layer's experts, one behind the other: transformers' mixtures have them as one parameter of a module `experts`."""
    return tensor.parameter.dim() == 3 and all(name.split(".")[-2:-1] == ["experts"] for name in tensor.names)


def _store_weights(tensors: Sequence[Tensor], turns: Sequence[tuple[str, nn.Module]], format: str, stored: Keeps | None) -> None:
    """Weights of linear layers and of experts inside of a turn's module, or those that the folder has in the format; a layer that is a module of its own, such as
    the head, stays as it is."""
    inside = [t for t in tensors if len(t.turns) == 1 and all(owner is not turns[t.turns[0]][1] for owner, _ in t.places)]
    if format not in UNCONVERTED:
        chosen = [t for t in inside if _of_linear_layer(t) or _of_experts(t)]
    elif stored is None:
        raise _native.UsageError(f"base_precision={format!r} keeps what a folder has: load() or plan() that folder, or name it in wrap(..., checkpoint=folder)")
    elif not (chosen := [t for t in inside if stored.keeps(t.names, format)]):
        raise _native.UsageError(f"the model's folder has no weights in {UNCONVERTED[format]}: nothing could be kept as it is")
    for tensor in chosen:
        tensor.format = format


def cut(model: nn.Module, blocks: Sequence[str] = (), trainable: bool = True, base_precision: str = "bf16", stored: Keeps | None = None) -> Cut:
    """Cuts a model. A parameter that several turns share, or none has, is a unit of its own. stored: the folder of its weights, if there is one."""
    if base_precision != "bf16" and trainable:
        raise _native.UsageError(f"base_precision={base_precision!r} is for a base that nobody trains: plan with trainable=False")
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point():
            raise _native.UsageError(f"{name} is {parameter.dtype}: quantized and integer parameters cannot be streamed; load the model in bf16")
    turns = find_turns(model, blocks)
    tensors: dict[int, Tensor] = {}
    for module_name, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if trainable and parameter.requires_grad and isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
                raise _native.UsageError(f"{module_name or 'the embedding'} has sparse gradients, and those of streamed parameters are dense: make it with sparse=False, or set .sparse = False")
            entry = tensors.setdefault(id(parameter), Tensor(parameter, [], []))
            entry.names.append(f"{module_name}.{name}" if module_name else name)
            entry.places.append((module, name))
            entry.moments_32 |= parameter.dim() < 2 or isinstance(module, nn.Embedding)
    for number, (_, module) in enumerate(turns):
        for parameter in module.parameters():
            tensors[id(parameter)].turns.append(number)
    _store_weights(list(tensors.values()), turns, base_precision, stored)
    units: list[Unit] = []
    units_of: list[list[int]] = [[] for _ in turns]
    loose: list[tuple[str, nn.Module | None, list[int]]] = []

    def add(name: str, members: list[Tensor], users: list[int]) -> None:
        for trained in (True, False):
            group = [t for t in members if (trainable and t.parameter.requires_grad) == trained]
            if not group:
                continue
            units.append(Unit(name if trained else f"{name} (frozen)", trained, group))
            for user in users:
                units_of[user].append(len(units) - 1)
            if not users:
                loose.append((name, None, [len(units) - 1]))

    for number, (name, _) in enumerate(turns):
        add(name or "model", [t for t in tensors.values() if t.turns == [number]], [number])
    for tensor in tensors.values():
        if len(tensor.turns) != 1:
            add(tensor.names[0], [tensor], tensor.turns)
    listed: list[tuple[str, nn.Module | None, list[int]]] = [(name, module, own) for (name, module), own in zip(turns, units_of, strict=True)]
    return Cut(units, listed + loose)


class init_empty:
    """Context in which modules are made without memory for their parameters; buffers are real. For models larger than RAM.

        with tierflow.init_empty():
            model = MyModel(...)
        tierflow.wrap(model, plan, checkpoint="folder with safetensors")
    """

    def __enter__(self) -> init_empty:
        original = self._original = nn.Module.register_parameter

        def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
            original(module, name, parameter)
            if parameter is not None and parameter.device.type != "meta":
                module._parameters[name] = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)

        setattr(nn.Module, "register_parameter", register)
        return self

    def __exit__(self, *_: object) -> None:
        setattr(nn.Module, "register_parameter", self._original)


def check_real(model: nn.Module) -> None:
    for name, buffer in model.named_buffers():
        if buffer.device == torch.device("meta"):
            raise _native.UsageError(f"the buffer {name} has no memory: make the model under tierflow.init_empty(), not torch.device('meta')")


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """Those on another device; what several modules share stays shared."""
    moved: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device:
                if id(buffer) not in moved:
                    moved[id(buffer)] = buffer.to(device)
                module._buffers[name] = moved[id(buffer)]
