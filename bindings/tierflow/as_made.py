"""Whether a decoder layer of transformers is as its class makes it from its config, so that another implementation may stand in its place."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from . import _native

_OF_A_RUN = {"training", "gradient_checkpointing"}  # attributes that change nothing of the result


class Departs(Exception):
    """Why a call runs the module's own code. silent: a matter of course, as in generate()."""

    def __init__(self, why: str, silent: bool = False) -> None:
        super().__init__(why)
        self.silent = silent


def architecture_of(layer: nn.Module) -> str | None:
    """The class of the model whose decoder layer this is, where it is a dense decoder whose layers the program computes."""
    folder = re.fullmatch(r"transformers\.models\.(\w+)\.modeling_\1", type(layer).__module__)
    name = re.fullmatch(r"(\w+?)(?:DecoderLayer|Layer|Block)", type(layer).__name__)
    if folder is None or name is None:
        return None
    known = _native.DecoderLayer.architectures()
    return next((model for model in (f"{name[1]}ForCausalLM", f"{name[1]}LMHeadModel") if model in known), None)


def check_untouched(module: nn.Module, kind: type, name: str, outermost: bool = False) -> None:
    what = name or "the layer"
    if type(module) is not kind or kind.forward.__module__ != kind.__module__:
        raise Departs(f"{what} is {type(module).__module__}.{type(module).__name__}, not {kind.__name__} as it was written")
    if not outermost and ("forward" in module.__dict__ or watched(module)):
        raise Departs(f"{what} has hooks or a forward() of its own")


def watched(module: nn.Module) -> bool:
    """Whether a hook is registered, other than what transformers leaves behind where outputs were recorded once."""
    if module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        return True
    for hook in module._forward_hooks.values():
        recorder = sys.modules.get("transformers.utils.output_capturing")
        if recorder is None or getattr(hook, "__module__", "") != recorder.__name__:
            return True
        if set(recorder._active_collector.get() or ()) - {"hidden_states", "_hidden_states_layers"}:
            return True
    return False


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Of a module's or config's attributes those that may decide what is computed: numbers, words, switches."""
    return {k: v for k, v in values.items() if not k.startswith("_") and k not in _OF_A_RUN and isinstance(v, (bool, int, float, str, tuple, list, dict, type(None)))}


class LayerAsMade:
    """What a decoder layer's config makes: its modules, their attributes. Of one layer; `config` and `index` are the layer's."""

    def __init__(self, layer: nn.Module) -> None:
        inner: Any = next((m for m in layer.modules() if hasattr(m, "config") and hasattr(m, "layer_idx")), None)
        if inner is None:
            raise Departs("it does not know its config")
        self._own = inner
        self.config: Any = inner.config
        self.index: int = inner.layer_idx
        self.architecture = architecture_of(layer)
        self._read = _plain(vars(self.config))
        with torch.device("meta"):
            made = type(layer)(self.config, self.index)
        self._expected = {name: (type(m), _plain(vars(m))) for name, m in made.named_modules()}

    def config_text(self) -> str:
        """As config.json has it, with the values that are the class's defaults."""
        return json.dumps({**self.config.to_dict(), "architectures": [self.architecture]})

    def is_current(self) -> bool:
        """Whether the config still says what it said."""
        return self._own.config is self.config and self._own.layer_idx == self.index and _plain(vars(self.config)) == self._read

    def check(self, modules: Mapping[str, nn.Module]) -> None:
        """modules: of the layer, by path. Raises Departs where they are not as they were made."""
        expected = self._expected
        for name in modules:
            if name not in expected:
                raise Departs(f"{name} is no part of it as transformers makes it")
        for name, (kind, values) in expected.items():
            if name not in modules:
                raise Departs(f"{name} is gone")
            module = modules[name]
            check_untouched(module, kind, name, outermost=name == "")
            found = _plain(vars(module))
            if found == values and not _drops(module, found):
                continue
            if module.training and _drops(module, found):
                raise Departs("it has dropout")
            for attribute in {**values, **found}:
                if "dropout" not in attribute and not (attribute == "p" and isinstance(module, nn.Dropout)) and found.get(attribute) != values.get(attribute):
                    where = f"{name}.{attribute}" if name else attribute
                    raise Departs(f"{where} is {found.get(attribute)!r}, where its config makes it {values.get(attribute)!r}")


def _drops(module: nn.Module, values: dict[str, Any]) -> bool:
    names = [name for name in values if "dropout" in name] + (["p"] if isinstance(module, nn.Dropout) else [])
    return any(isinstance(values[name], float | int) and values[name] > 0 for name in names)
