"""Names of tensors in a folder: what transformers' conversions make of them when a model is loaded, and of its parameters when it is saved."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import nn

from . import _native

Make = Callable[[], torch.Tensor]


@dataclasses.dataclass
class Group:
    """Tensors that one conversion takes together, in transformers' order: (pattern, name)."""

    converter: Any
    target: str
    members: list[tuple[str, str]] = dataclasses.field(default_factory=list)

    def convert(self, module: Any, values: Callable[[str], torch.Tensor]) -> dict[str, torch.Tensor]:
        converter = deepcopy(self.converter)
        for pattern, name in self.members:
            converter.add_tensor(self.target, name, pattern, values(name))
        try:
            made = converter.convert(self.target, model=module, config=module.config)
        except Exception as error:
            names = ", ".join(name for _, name in self.members[:3])
            raise _native.InputError(f"transformers' conversion of {names} into {self.target} failed: {error}") from error
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}

    def operations(self) -> list[tuple[str, Any]]:
        return [(type(op).__name__, getattr(op, "dim", None)) for op in self.converter.operations]

    def rows(self) -> list[str] | None:
        """The names in the order in which their elements follow one another in what they are made into; None where they do not."""
        columns = [[name for of, name in self.members if of == pattern] for pattern in self.converter.source_patterns]
        stacked = self.operations() == [("MergeModulelist", 0)] and len(columns) == 1
        paired = self.operations() == [("MergeModulelist", 0), ("Concatenate", 1)]
        if not (stacked or paired) or len({len(column) for column in columns}) != 1:
            return None
        return [name for row in zip(*columns, strict=True) for name in row]


class _Made:
    """What a group is converted into, made when it is asked for; the group converted last is kept."""

    def __init__(self, module: nn.Module, values: Callable[[str], torch.Tensor]) -> None:
        self._module, self._values = module, values
        self._last: Group | None = None
        self._tensors: dict[str, torch.Tensor] = {}

    def maker(self, group: Group, name: str) -> Make:
        def make() -> torch.Tensor:
            if self._last is not group:
                self._last, self._tensors = None, {}
                self._tensors = group.convert(self._module, self._values)
                self._last = group
            return self._tensors[name]

        return make


def is_transformers(module: nn.Module) -> bool:
    try:
        from transformers import PreTrainedModel
    except ImportError:
        return False
    return isinstance(module, PreTrainedModel)


def loaded_from(module: Any, stored: Mapping[str, tuple[list[int], str, str]]) -> tuple[dict[str, list[str]], dict[str, tuple[list[int], Make]]]:
    """What transformers would load a folder's tensors into. stored: shape, file and how it is stored there, by name.

    First: for a parameter, the tensors that follow one another in it (most often one). Second: for one that a conversion rearranges, its shape, and what
    makes it; memory is needed for one such parameter at a time, and its sources.
    """
    if not is_transformers(module):
        return {}, {}
    from safetensors import safe_open
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    conversions = get_model_conversion_mapping(module)
    renamings = [c for c in conversions if isinstance(c, WeightRenaming)]
    converters = [c for c in conversions if isinstance(c, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    wanted = module.state_dict()
    parts: dict[str, list[str]] = {}
    groups: dict[str, Group] = {}
    for name in sorted(stored, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, module.base_model_prefix, wanted)
        if target not in wanted and name in wanted:
            target, pattern = rename_source_key(name, [], [], module.base_model_prefix, wanted)
        if target not in wanted:
            continue
        if pattern is None:
            parts[target] = [name]
        else:
            groups.setdefault(target, Group(by_pattern[pattern], target)).members.append((pattern, name))

    def read(name: str) -> torch.Tensor:
        if stored[name][2] != "plain":
            raise _native.InputError(f"{stored[name][1]}: {name} is quantised, and transformers rearranges it as it is loaded: give the model in bf16")
        with safe_open(stored[name][1], framework="pt") as file:
            return file.get_tensor(name)

    made, whole = _Made(module, read), {}
    for group in groups.values():
        shapes = {name: list(t.shape) for name, t in group.convert(module, lambda name: torch.empty(stored[name][0], device="meta")).items()}
        rows = group.rows()
        for name, shape in shapes.items():
            if rows is not None and len(shapes) == 1:
                parts[name] = rows
            else:
                whole[name] = (shape, made.maker(group, name))
    module._weight_conversions = [c for c in conversions if c.was_used()]  # as from_pretrained() leaves it, for saving
    return parts, whole


def saved_as(
    module: Any, state: Mapping[str, torch.Tensor]
) -> tuple[dict[str, list[tuple[str, list[int]]]], list[tuple[str, torch.Tensor, Make]]]:
    """What transformers saves tensors as, by their names in the module.

    First: for a tensor, the tensors that it is cut into. Second, for those that a conversion rearranges: name, a tensor that shows the shape, what makes it.
    """
    plain = {name: [(name, list(tensor.shape))] for name, tensor in state.items()}
    conversions = _used_conversions(module) if is_transformers(module) else []
    if not conversions:
        return plain, []
    from transformers.core_model_loading import WeightConverter, WeightRenaming, apply_converters, apply_renamings, dot_natural_key

    backwards = [conversion.reverse_transform() for conversion in reversed(conversions)]
    renamings = [c for c in backwards if isinstance(c, WeightRenaming)]
    converters = [c for c in backwards if isinstance(c, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    parts: dict[str, list[tuple[str, list[int]]]] = {}
    groups: dict[str, Group] = {}
    for name in sorted(state, key=dot_natural_key):
        target, pattern = apply_converters(name, converters)
        if pattern is None:
            parts[name] = [(apply_renamings(name, renamings), list(state[name].shape))]
        else:
            groups.setdefault(target, Group(by_pattern[pattern], target)).members.append((pattern, name))
    made, others = _Made(module, lambda name: state[name].detach() + 0), []
    for group in groups.values():
        outs = group.convert(module, lambda name: torch.empty(state[name].shape, dtype=state[name].dtype, device="meta"))
        named = [(name, apply_renamings(name, renamings), tensor) for name, tensor in outs.items()]
        if len(group.members) == 1 and group.operations() in ([("SplitModulelist", 0)], [("Chunk", 1), ("SplitModulelist", 0)]):
            rows = state[group.members[0][1]].shape[0]  # the outs of a pattern come one after the other, a row each
            parts[group.members[0][1]] = [(new, list(t.shape)) for row in range(rows) for _, new, t in named[row::rows]]
        else:
            others += [(new, tensor, made.maker(group, name)) for name, new, tensor in named]
    return parts, others


def _used_conversions(module: Any) -> list[Any]:
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import PrefixChange

    used = getattr(module, "_weight_conversions", None)
    if used is None:  # made from its class: whether a prefix was there nobody knows
        used = [c for c in get_model_conversion_mapping(module, add_legacy=False) if not isinstance(c, PrefixChange)]
    return used
