"""Copies of modules that stream: ordinary modules with the same values in memory, as PEFT makes them to train some whole beside adapters (modules_to_save)."""

from __future__ import annotations

import copy
import types
from typing import Any

from torch import nn

from . import _native
from .engine import Engine
from .parameter import StreamedParameter


def let_copy(module: nn.Module, engine: Engine, of_streamed: tuple[str, ...], hook: Any) -> None:
    """From now on copy.deepcopy() of a part of the module gives an ordinary module in bf16 that knows nothing of streaming. A part with several turns, such as the
    whole model, raises UsageError: its copy would be in memory at once.

    of_streamed: attributes that only the modules of a streamed model have; hook: what load_state_dict() calls before it, of these alone.
    """

    def deepcopy(self: nn.Module, memo: dict[int, Any]) -> Any:
        inside = {id(part) for part in self.modules()}
        if sum(id(turn.module) in inside for turn in engine.turns) > 1:
            raise _native.UsageError(
                f"{type(self).__name__}: a streamed model cannot be copied, as all of it would be in memory: save_pretrained() and load() a model again; modules that "
                "stream as one (an embedding, a norm, a head) can be"
            )
        for parameter in self._parameters.values():
            if isinstance(parameter, StreamedParameter) and id(parameter) not in memo:
                memo[id(parameter)] = nn.Parameter(parameter.fetch().clone(), requires_grad=parameter.requires_grad)
        memo[id(self)] = made = type(self).__new__(type(self))
        state = {name: value for name, value in self.__dict__.items() if name not in ("__deepcopy__", "forward", *of_streamed)}
        state["_load_state_dict_pre_hooks"] = type(self._load_state_dict_pre_hooks)(
            (key, value) for key, value in self._load_state_dict_pre_hooks.items() if getattr(value, "hook", None) is not hook
        )
        made.__dict__.update(copy.deepcopy(state, memo))
        return made

    for part in module.modules():
        object.__setattr__(part, "__deepcopy__", types.MethodType(deepcopy, part))
