"""What transformers' models, and PEFT's over them, do in another way once they stream."""

from __future__ import annotations

import copy
import os
import sys
import types
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from . import _native
from .engine import Engine
from .folders import written_to
from .inputs import expect_no_cache
from .isolation import watch
from .keys import saved_as
from .parameter import StreamedParameter
from .recorded import know_shared_keys
from .saving import engine_of, saved_state, write


# Arguments of transformers' save_pretrained(), as they are here.
_AS_THEY_ARE = {"push_to_hub": False, "variant": None, "safe_serialization": True, "save_original_format": True, "distributed_checkpoint": False}


def _expect_own(model: nn.Module, given: Mapping[str, Any]) -> None:
    """Raises UsageError where a state_dict is not that of the model as it is."""

    def same(one: Any, own: Any) -> bool:
        if isinstance(one, StreamedParameter) and isinstance(own, StreamedParameter):
            return (one.engine, one.unit, one.index) == (own.engine, own.unit, own.index)
        if isinstance(one, StreamedParameter) or isinstance(own, StreamedParameter) or not isinstance(one, torch.Tensor):
            return one is own
        return (one.data_ptr(), one.shape, one.dtype) == (own.data_ptr(), own.shape, own.dtype)

    own = model.state_dict()
    if given.keys() != own.keys() or not all(same(value, own[name]) for name, value in given.items()):
        raise _native.UsageError(
            "save_pretrained(state_dict=...): a streamed model writes its own values, all of them, and no others: leave state_dict out; to save other values "
            "(averaged weights), write them into the model first, model.load_state_dict(values)"
        )


def with_adapters_read(model: Any, state: Mapping[str, Any], adapters: list[str], **how: Any) -> dict[str, Any]:
    """A state_dict in which adapters that stream are tensors in memory: those entries that PEFT takes for them."""
    from peft import get_peft_model_state_dict

    taken = {id(value) for name in adapters for value in get_peft_model_state_dict(model, state_dict=dict(state), adapter_name=name, **how).values()}
    return {name: value.clone() if isinstance(value, StreamedParameter) and id(value) in taken else value for name, value in state.items()}


def _save_streamed_adapters(model: Any) -> None:
    """For a PEFT model that was wrapped with its adapters in it, so that they stream like the rest."""

    def save_pretrained(self, save_directory, safe_serialization=True, selected_adapters=None, save_embedding_layers="auto", **others):
        """PEFT's own, of values that are read from where they stream."""
        state = others.pop("state_dict", None) or self.state_dict()
        adapters = list(self.peft_config) if selected_adapters is None else [name for name in selected_adapters if name in self.peft_config]
        values = with_adapters_read(self, state, adapters, save_embedding_layers=save_embedding_layers)
        type(self).save_pretrained(self, save_directory, safe_serialization, selected_adapters, save_embedding_layers, state_dict=values, **others)

    model.save_pretrained = types.MethodType(save_pretrained, model)


def expect_no_adapter(model: nn.Module) -> None:
    if any(".base_layer." in name or ".original_module." in name for name, _ in model.named_parameters()):
        raise _native.UsageError("an adapter is inside of the model: save_pretrained() of the PEFT model writes the adapter; to write both as one, merge_and_unload() first")


def write_configs(model: Any, folder: str | os.PathLike) -> None:
    """config.json, with use_cache as it was before the model streamed, and what transformers writes beside it."""
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.dtype = torch.bfloat16
    for part in engine_of(model).without_cache:
        _caching(config)[part].use_cache = True
    config.save_pretrained(folder)
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.save_pretrained(folder)


def _caching(config: Any) -> dict[str, Any]:
    """The parts of a transformers model's config that may have use_cache."""
    parts = {"model": config, "text": getattr(config, "text_config", None)}
    return {part: of for part, of in parts.items() if of is not None}


def fit(module: Any, engine: Engine) -> None:
    """What a transformers model has to know: caches do not go with recomputation, and saving streams."""
    peft = sys.modules.get("peft")
    if peft is not None and isinstance(module, peft.PeftModel):
        _save_streamed_adapters(module)
        module = module.get_base_model()
    config = getattr(module, "config", None)
    if config is None or not hasattr(module, "save_pretrained"):
        return
    know_shared_keys()
    module.register_forward_pre_hook(expect_no_cache, with_kwargs=True)
    for part, of in _caching(config).items():
        if getattr(of, "use_cache", None):
            of.use_cache = False
            engine.without_cache.append(part)

    def save_pretrained(self, save_directory, is_main_process=True, state_dict=None, *, max_shard_size="5GB", save_peft_format=True, **others):
        """Writes config.json and streams the weights as safetensors; where add_adapter() or load_adapter() gave the model an adapter, writes that as transformers does.
        Of transformers' other arguments those that would change what is written raise UsageError, and so does a state_dict with other values than the model's own."""
        if changed := [name for name, plain in _AS_THEY_ARE.items() if others.get(name, plain) not in (plain, None)]:
            raise _native.UsageError(f"a streamed model's save_pretrained() has no {changed[0]}={others[changed[0]]!r}: leave it out, and change or upload the folder that it writes")
        if getattr(self, "_hf_peft_config_loaded", False):
            values = with_adapters_read(self, self.state_dict() if state_dict is None else state_dict, self.active_adapters())
            type(self).save_pretrained(self, save_directory, is_main_process, values, max_shard_size=max_shard_size, save_peft_format=save_peft_format)
            return
        expect_no_adapter(self)
        if state_dict is not None:
            _expect_own(self, state_dict)
        if is_main_process:
            write(self, save_directory, max_shard_size, lambda state: saved_as(self, state))
            with written_to(save_directory):
                write_configs(self, save_directory)

    watch(module)
    tie = module.tie_weights

    def tie_weights(self, *args, **kwargs):
        places = {(owner, name): p for owner in self.modules() for name, p in owner._parameters.items()}
        tied = tie(*args, **kwargs)
        moved = [(owner, name, p) for (owner, name), p in places.items() if owner._parameters.get(name) is not p]
        for owner, name, p in moved:
            owner._parameters[name] = p
        if moved:
            raise _native.UsageError("weights of a streamed model are tied before it streams: set config.tie_word_embeddings in the model's folder, or tie, then tierflow.wrap()")
        return tied

    def resize_token_embeddings(self, new_num_tokens=None, *args, **kwargs):
        embeddings = self.get_input_embeddings()
        if new_num_tokens is None or new_num_tokens == embeddings.weight.shape[0]:
            return embeddings
        raise _native.UsageError(
            f"a streamed model keeps its {embeddings.weight.shape[0]} token embeddings: resize the model that from_pretrained() loads, save_pretrained() it, and "
            "tierflow.load() that folder; or resize, then tierflow.wrap()"
        )

    module.tie_weights = types.MethodType(tie_weights, module)
    module.resize_token_embeddings = types.MethodType(resize_token_embeddings, module)

    def nothing_to_checkpoint(self, *_, **__):
        """Nothing to do: a streamed module keeps no activations but its inputs, and what its budget has room for."""

    module.save_pretrained = types.MethodType(save_pretrained, module)
    for name in ("gradient_checkpointing_enable", "activation_checkpointing_enable"):  # transformers 5 calls it by the second
        setattr(module, name, types.MethodType(nothing_to_checkpoint, module))
