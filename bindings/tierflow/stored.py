"""A model's folder: which of its tensors are a module's parameters and buffers."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from . import _native
from .keys import Make, loaded_from
from .units import Cut

log = logging.getLogger("tierflow")
_FP8_ROWS = 128  # of a tile


class StoredModel:
    """The folder of a module's weights."""

    def __init__(self, module: nn.Module, folder: Path) -> None:
        self.folder = folder
        self._module = module
        self._stored = _native.stored_tensors(str(folder))
        self._prefix = getattr(module, "base_model_prefix", "")
        self._parts, self._whole = loaded_from(module, self._stored)
        self.heads: set[str] = set()  # names of parameters that make_heads() made

    def _look_up(self, names: Sequence[str]) -> tuple[list[str], list[int]]:
        """Stored names, and the shape that they have together."""
        if own := next((self._parts[name] for name in names if name in self._parts), None):
            return own, self._stored[own[0]][0] if len(own) == 1 else []
        prefix = self._prefix
        for name in names:
            for candidate in (name, *_native.checkpoint_aliases(name), *([name.removeprefix(prefix + "."), f"{prefix}.{name}"] if prefix else [])):
                if candidate in self._stored:
                    return [candidate], self._stored[candidate][0]
        return [], []

    def keeps(self, names: Sequence[str], format: str) -> bool:
        """Whether the parameter of these names can stay in a format as the folder has it. Of FP8 in tiles, several matrices that make one parameter have to end
        with these."""
        own, _ = self._look_up(names)
        shapes = [shape for shape, _, how in (self._stored[name] for name in own) if how == format]
        if not own or len(shapes) != len(own) or any(name in self._whole for name in names):
            return False
        return len(own) == 1 or format == "fp8-rows" or (format == "fp8" and all(shape[0] % _FP8_ROWS == 0 for shape in shapes))

    def load_buffers(self) -> None:
        """Those in floating point that the folder has."""
        buffers = {id(buffer) for _, buffer in self._module.named_buffers()}
        for name, value in self._module.state_dict(keep_vars=True).items():
            own, shape = self._look_up([name]) if id(value) in buffers and value.is_floating_point() else ([], [])
            if own and shape == list(value.shape):
                with safe_open(self._stored[own[0]][1], framework="pt") as file, torch.no_grad():
                    value.copy_(file.get_tensor(own[0]))
            elif own:
                raise _native.InputError(f"{self.folder}: {own[0]} has the shape {shape}, the model wants {list(value.shape)}")

    def _lacking_heads(self) -> dict[str, nn.Module]:
        """Modules outside of the base model of which the folder has nothing, by what their parameters' names begin with."""
        base = getattr(self._module, self._prefix, None) if self._prefix else None
        if not isinstance(base, nn.Module):
            return {}
        inside = {id(p) for p in base.parameters()}
        lacking = {}
        for path, module in self._module.named_modules():
            begin = f"{path}." if path else ""
            own = {begin + name: p for name, p in module._parameters.items() if p is not None}
            if own and not any(id(p) in inside or name in self._whole or self._look_up([name])[0] for name, p in own.items()):
                lacking[begin] = module
        return lacking

    def make_heads(self) -> None:
        """Makes what the folder has nothing of outside of the base model, as from_pretrained() does: a head of other labels."""
        module: Any = self._module
        for begin, part in self._lacking_heads().items():
            made = {name: p for name, p in part._parameters.items() if p is not None}
            for name, p in made.items():
                part._parameters[name] = nn.Parameter(torch.full_like(p, math.nan, device="cpu"), requires_grad=p.requires_grad)
            with torch.no_grad():
                module._init_weights(part)
            for name in made:
                if not bool(torch.isfinite(part.get_parameter(name)).all()):
                    raise _native.InputError(
                        f"{self.folder} has no {begin}{name}, and transformers gives it no first values: tierflow.wrap(model_class.from_pretrained(folder), plan)"
                    )
            self.heads.update(begin + name for name in made)
        if self.heads:
            log.warning("%s: not in %s; its first values are random, as those of from_pretrained()", ", ".join(sorted(self.heads)), self.folder)

    def parameters(self, cut: Cut) -> tuple[dict[str, list[str]], dict[str, Make]]:
        """Where the folder has each parameter but those of new heads: the tensors that follow one another in it, or what makes it of them."""
        found: dict[str, list[str]] = {}
        made: dict[str, Make] = {}
        missing: list[str] = []
        for tensor in (tensor for unit in cut.units for tensor in unit.tensors):
            first, wanted = tensor.names[0], list(tensor.parameter.shape)
            own, shape = self._look_up(tensor.names)
            if making := next((self._whole[name] for name in tensor.names if name in self._whole), None):
                shape, made[first] = making
            elif own:
                found[first] = own
            else:
                if first not in self.heads:
                    missing.append(first)
                continue
            elements = sum(math.prod(self._stored[name][0]) for name in own)
            if (shape or wanted) != wanted or (own and elements != math.prod(wanted)):
                raise _native.InputError(f"{self.folder}: {(own or tensor.names)[0]} has the shape {shape or [elements]}, the model wants {wanted}")
        if missing:
            raise _native.InputError(
                f"{self.folder} has no {', '.join(missing[:10])}{' ...' if len(missing) > 10 else ''}: another model's weights? Where it is a new head, of other labels, name the "
                "class: tierflow.load(folder, plan, model_class=...)"
            )
        return found, made

