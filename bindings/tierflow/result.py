"""What a durable model says with each commit of how it is saved: so `tierflow export` writes it when its script is gone."""

from __future__ import annotations

import copy
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from . import _native
from .keys import saved_as
from .parameter import StreamedParameter
from .pretrained import expect_no_adapter, write_configs
from .saving import by_place, engine_of, plain_parts, saved_state


def result_of(model: nn.Module) -> dict[str, Any]:
    """The JSON of runtime/state/script_model.h: what model.save_pretrained() would write now, or tierflow.save() where there is no such method; {"why"} where that
    cannot be said of tensors one by one."""
    try:
        peft = sys.modules.get("peft")
        if peft is not None and isinstance(model, peft.PeftModel):
            return _adapter(model)
        if not hasattr(model, "save_pretrained"):
            state = saved_state(model)
            return _said(model, state, plain_parts(state), {})
        if "save_pretrained" not in vars(model):  # load() and wrap() put it there
            return {"why": f"save_pretrained() of {type(model).__name__} alone writes it otherwise"}
        return _pretrained(model)
    except _native.Error as error:
        return {"why": str(error)}


def _pretrained(model: Any) -> dict[str, Any]:
    expect_no_adapter(model)
    state = saved_state(model)
    parts, made = saved_as(model, state)
    if made:
        return {"why": f"transformers rearranges {made[0][0]} as it saves"}
    said = _said(model, state, parts, _texts(lambda folder: write_configs(model, folder)))
    source = getattr(model.config, "_name_or_path", "")
    return {**said, "folder": os.path.abspath(source)} if source and os.path.isdir(source) else said


def _adapter(model: Any) -> dict[str, Any]:
    from peft import get_peft_model_state_dict
    from peft.utils.other import EMBEDDING_LAYER_NAMES

    if list(model.peft_config) != ["default"]:
        return {"why": f"it has the adapters {', '.join(model.peft_config)}"}
    config = copy.deepcopy(model.peft_config["default"])
    base = model.get_base_model()
    config.base_model_name_or_path = config.base_model_name_or_path or base.__dict__.get("name_or_path") or None
    config.inference_mode = True
    made_from = None if config.task_type is not None else {"base_model_class": type(base).__name__, "parent_library": type(base).__module__}
    embeddings: Any = "auto"  # of a folder; a model of the Hub would be asked for over the network
    if config.base_model_name_or_path and not os.path.isdir(config.base_model_name_or_path):
        embeddings = not set(EMBEDDING_LAYER_NAMES).isdisjoint(getattr(config, "target_modules", None) or ())
    state: dict[str, torch.Tensor] = get_peft_model_state_dict(model, state_dict=model.state_dict(keep_vars=True), save_embedding_layers=embeddings)
    if len({id(value) for value in state.values()}) != len(state):
        return {"why": "a tensor of its adapter has two names"}
    files = _texts(lambda folder: config.save_pretrained(folder, auto_mapping_dict=made_from))
    return {**_said(model, state, plain_parts(state), files), "adapter": True}


def _said(model: nn.Module, state: dict[str, torch.Tensor], parts: dict[str, Any], files: dict[str, str]) -> dict[str, Any]:
    streamed, ordinary = by_place(engine_of(model), state, parts)
    beside = {id(value): name for name, value in [*model.named_parameters(), *model.named_buffers()] if not isinstance(value, StreamedParameter)}
    if left := next((own[0][0] for value, own in ordinary if id(value) not in beside), None):
        return {"why": f"{left} is made as it is saved"}
    return {"adapter": False, "files": files, "streamed": streamed, "beside": {beside[id(value)]: own for value, own in ordinary}}


def _texts(write: Callable[[str], Any]) -> dict[str, str]:
    with tempfile.TemporaryDirectory() as folder:
        write(folder)
        return {path.name: path.read_text(encoding="utf-8") for path in sorted(Path(folder).iterdir())}
