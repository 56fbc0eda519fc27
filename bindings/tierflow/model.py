"""Models in and out: planning, loading, wrapping, saving, closing."""

from __future__ import annotations

import copy
import gc
import hashlib
import json
import logging
import os
import re
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from . import _native
from .budget import UNCONVERTED, Budget, Plan, parse_size
from .copies import let_copy
from .engine import Engine
from .folders import expect_model_folder
from .fused import say_what_is_fused
from .loss import fuse_loss
from .optim import skipped_steps
from .parameter import StreamedParameter, note_replaced
from .pretrained import fit
from .saving import engine_of, plain_parts, uncompiled, write
from .stored import StoredModel
from .units import Cut, check_real, cut, init_empty, move_buffers

log = logging.getLogger("tierflow")


def plan(
    source: str | os.PathLike | nn.Module,
    budget: Budget | str = "auto",
    *,
    storage: Sequence[str | os.PathLike] = (),
    micro_batches: int = 1,
    **options: Any,
) -> Plan:
    """Plans how a model streams under a budget, and what a step costs: `print(plan)`.

    source: a model folder (config.json), or a module. budget: a Budget, or "auto": a third of the free RAM for the device and half for the host (it does not look
        at a GPU's memory). storage: folders for "auto"; a Budget has its own. options: the other fields of Plan.
    Raises UsageError if the budget is too small; it names the smallest that works. Also if the module has no parameters.
    """
    if isinstance(budget, str):
        if budget != "auto":
            raise _native.UsageError(f"budget is a tierflow.Budget or 'auto', not {budget!r}")
        budget = Budget.auto(storage)
    elif storage:
        raise _native.UsageError("give storage in the Budget")
    made = Plan(budget=budget, micro_batches=micro_batches, **options)
    module = source if isinstance(source, nn.Module) else _build(Path(source))
    stored = StoredModel(module, Path(source)) if made.base_precision in UNCONVERTED and not isinstance(source, nn.Module) else None
    units, turns = cut(module, made.blocks, made.trainable, made.base_precision, stored).describe()
    made.estimate = _native.plan(units, turns, made.options(), micro_batches)
    return made


def load(
    path: str | os.PathLike, plan: Plan | Budget, *, model_class: Any = None, config: Any = None, attn_implementation: str | None = None, fused_layers: bool = False
) -> Any:
    """Loads the transformers model in a folder so that its parameters stream. It is in eval mode, as after from_pretrained().

    Weights go from safetensors to storage without being in RAM at once. The model's save_pretrained() streams as well.
    model_class: the class to use if config.json names none, or another one. Its head may be new (a classifier, a reward model): what the folder has nothing of outside
        of the base model begins with random values, as in from_pretrained(), and a warning names it.
    config: a transformers config in the place of the folder's, as for another number of labels.
    attn_implementation: as in from_pretrained(); "tierflow" is the program's own attention for the CPU device, which is faster there and has other bits.
    fused_layers: as in wrap(). Raises InputError if the folder lacks tensors; it names them.
    """
    path = Path(path)
    model: Any = _build(path, model_class, attn_implementation, config)
    source = None
    if model_class is not None:
        source = StoredModel(model, path)
        source.make_heads()
    _wrap(model, plan, path, fused_layers, source)
    generation = path / "generation_config.json"
    if generation.exists() and getattr(model, "generation_config", None) is not None:
        model.generation_config = type(model.generation_config).from_pretrained(path)
    return model.eval()


def wrap(module: nn.Module, plan: Plan | Budget, *, checkpoint: str | os.PathLike | None = None, fused_layers: bool = False) -> Any:
    """Makes a module's parameters stream, in place, and returns the module.

    It then computes in bf16 (fp32 weights become the masters): give it the inputs of a bf16 model. Buffers keep their type,
    and move to the device that computes.
    checkpoint: a folder of safetensors with the module's parameters, for a module made under tierflow.init_empty().
    fused_layers: the program's own layers compute the layers of dense decoders (docs/python.md has the list), plain embeddings and heads, and transformers' causal
        loss. They are faster and have other last bits. A call that they do not cover (padding, the model's own dropout) runs the module's code, and says so once.
    """
    return _wrap(module, plan, checkpoint, fused_layers)


def _wrap(module: nn.Module, plan: Plan | Budget, checkpoint: str | os.PathLike | None, fused_layers: bool, source: StoredModel | None = None) -> Any:
    """source: of the checkpoint, where it was looked at already."""
    if isinstance(plan, Budget):
        plan = Plan(budget=plan)
    if not isinstance(plan, Plan):
        raise _native.UsageError(f"plan is what tierflow.plan() gives, or a tierflow.Budget, not {plan!r}")
    given, module = module, uncompiled(module)
    if isinstance(getattr(module, "_tierflow", None), Engine) or any(isinstance(p, StreamedParameter) for p in module.parameters()):
        raise _native.UsageError("the module streams already")
    check_real(module)
    if plan.budget.storage:
        gc.collect()  # models that nobody refers to any more give their files up
    if source is None and checkpoint is not None:
        source = StoredModel(module, Path(checkpoint))
    cut_ = cut(module, plan.blocks, plan.trainable, plan.base_precision, source)
    stored, made = source.parameters(cut_) if source is not None else ({}, {})
    if source is not None:
        source.load_buffers()
    tensors: dict[str, Any] = dict(made)
    for unit in cut_.units:
        for tensor in unit.tensors:
            if tensor.names[0] in stored or tensor.names[0] in made:
                continue
            if tensor.parameter.device.type == "meta":
                raise _native.InputError(f"{tensor.names[0]} has no values: name a folder that has them, wrap(..., checkpoint=folder)")
            tensors[tensor.names[0]] = tensor.parameter.data
    units, turns = cut_.describe()
    options = plan.options() | ({"run": _run_of(module, plan, fused_layers, _weights_of(cut_, tensors, source))} if plan.budget.durable else {})
    native = _native.Streamer(units, turns, tensors, str(checkpoint) if checkpoint is not None else "", stored, options, log.warning)
    engine = Engine(module, cut_, native, plan.device, int(parse_size(plan.budget.device) * plan.budget.activations), fused_layers)
    for unit in cut_.units:
        for tensor in unit.tensors:
            note_replaced(tensor.parameter)
    engine.durable, engine.storage = int(plan.budget.durable), [str(folder) for folder in plan.budget.storage]
    object.__setattr__(module, "_tierflow", engine)
    move_buffers(module, engine.device)
    _stay_in_place(module, engine)
    let_copy(module, engine, ("_apply",), _no_assign)
    fit(module, engine)
    if fused_layers:
        say_what_is_fused(engine.turns)
        fuse_loss(module, engine.activations)
    return given


def _weights_of(cut_: Cut, tensors: dict[str, Any], source: StoredModel | None) -> str:
    """Tells other weights of the same shapes apart: some values of what the folder has, and of what is frozen. Trained parameters that were made here may be random,
    and new ones are."""
    found = hashlib.blake2b(digest_size=8)
    if source is not None:
        found.update(str(_native.weights_hash(str(source.folder))).encode())
    new = source.heads if source is not None else ()
    for tensor in (tensor for unit in cut_.units if not unit.trainable for tensor in unit.tensors):
        if tensor.names[0] not in new and isinstance(values := tensors.get(tensor.names[0]), torch.Tensor):
            flat = values.detach().flatten()
            for first in (0, max(0, len(flat) - 1024) // 2, max(0, len(flat) - 1024)):
                found.update(flat[first : first + 1024].float().cpu().numpy().tobytes())
    return found.hexdigest()


def _run_of(module: nn.Module, plan: Plan, fused_layers: bool, weights: str) -> str:
    """What has to be equal for a run to go on with the bits of another, besides parameters, precision and seed."""
    config = getattr(module, "config", None)
    values = config.to_dict() if config is not None and hasattr(config, "to_dict") else {}
    kept = {key: value for key, value in values.items() if not key.startswith("_") and key not in ("transformers_version", "use_cache", "architectures")}
    run = {"class": f"{type(module).__module__}.{type(module).__qualname__}", "attention": getattr(config, "_attn_implementation", None)}
    return json.dumps({**run, "weights": weights, "configuration": kept, "fused_layers": fused_layers, "blocks": list(plan.blocks)}, default=str, sort_keys=True)


def close(module: nn.Module, *, discard: bool = False) -> None:
    """Ends streaming: memory and files are given back, and the module's weights are gone. A module that is garbage-collected gives them back too, but commits nothing.

    A durable module first commits its last step, and its state stays. discard: the state is removed instead; use it when the result is saved.
    """
    engine = engine_of(module)
    if discard and engine.durable:
        engine.native.discard()
        if engine.journal is not None:
            engine.journal.requests.finish_without_commit()
            engine.journal.requests.give_up()
            engine.journal.opt.journal = None
        engine.journal, engine.durable = None, 0
    engine.close()


def stats(module: nn.Module) -> dict[str, Any]:
    """What a streamed module has done so far, as a dictionary. memory: bytes by tier, with activations_share and activations_peak. lanes: for each lane tasks, bytes
    and busy_seconds. skipped_steps: their number. departures: turns that came in another order than the last time. where: a text that says what lives where.

    activations_peak: the most bytes that the model's own tensors took; activations_share is their share of the device budget. On the CPU the peak is read where a
    module's recomputation ends.
    """
    engine = engine_of(module)
    return {
        "memory": {**engine.native.memory(), "activations_share": engine.activations.share, "activations_peak": engine.activations.peak},
        "lanes": engine.native.lanes(),
        "skipped_steps": skipped_steps(module, engine),
        "departures": engine.native.departures,
        "where": engine.native.describe(),
    }


def save(module: nn.Module, folder: str | os.PathLike, max_shard_size: int | str = "5GB") -> None:
    """Writes the module's weights (bf16) and floating-point buffers as safetensors to a folder, streamed, owed updates included: what it computes with now, under
    the names of its state_dict()."""
    write(module, folder, max_shard_size, lambda state: (plain_parts(state), []))


def merge(model: str | os.PathLike, adapter: str | os.PathLike, out: str | os.PathLike) -> None:
    """Writes the model in a folder with the adapters of a PEFT folder added to its weights, as `tierflow merge` does: W + scale * B A in fp32, rounded to bf16 once,
    streamed, without the model in RAM. out: a folder that does not exist yet, or is empty; it gets the tokenizer too. Raises InputError if the adapters do not fit."""
    if broken := _native.merge(os.fspath(model), os.fspath(adapter), os.fspath(out)):
        log.warning("the values of %s are not all finite: what was merged in %s is of no use", broken, os.fspath(out))


def _build(path: Path, model_class: Any = None, attn_implementation: str | None = None, config: Any = None) -> nn.Module:
    try:
        import transformers
    except ImportError as error:
        raise _native.UsageError("loading a model folder takes the transformers package: pip install transformers") from error
    from .attention import register

    expect_model_folder(path)
    config = transformers.AutoConfig.from_pretrained(path) if config is None else copy.deepcopy(config)
    if model_class is None:
        names = getattr(config, "architectures", None) or []
        model_class = getattr(transformers, names[0], None) if names else None
    if model_class is None:
        raise _native.InputError(f"{path}/config.json: transformers has no class for it; pass model_class=")
    for of in (config, getattr(config, "text_config", None)):
        if (quantised := getattr(of, "quantization_config", None)) is not None:  # of the folder, not of the model
            _native.check_quantised(json.dumps(quantised), f"{path}/config.json")
            delattr(of, "quantization_config")
    register()
    how: dict[str, Any] = {"dtype": torch.bfloat16}
    if attn_implementation is not None:
        how["attn_implementation"] = attn_implementation
    with init_empty():
        make = model_class._from_config if hasattr(model_class, "_from_config") else model_class.from_config
        model = make(config, **how)
    _keep_fp32(model)
    return model


def _keep_fp32(model: nn.Module) -> None:
    """Buffers that transformers has in fp32 whatever the model's type is, as from_pretrained() does: what chooses experts would choose others in bf16."""
    kept = [pattern.replace("*", ".*") for pattern in getattr(model, "_keep_in_fp32_modules_strict", None) or ()]
    for path, module in model.named_modules() if kept else ():
        for name, buffer in module._buffers.items():
            stored = buffer is not None and buffer.is_floating_point() and name not in module._non_persistent_buffers_set
            if stored and any(re.search(pattern, f"{path}.{name}") for pattern in kept):
                module._buffers[name] = buffer.float()


def _no_assign(part: nn.Module, state: Any, prefix: str, metadata: Any, *_: Any) -> None:
    if metadata.get("assign_to_params_buffers"):
        raise _native.UsageError("load_state_dict(assign=True) would put ordinary parameters in the place of those that stream: leave out assign=True")


def _stay_in_place(module: nn.Module, engine: Engine) -> None:
    """Lets .to() and its like raise before they have changed anything: torch would put new parameters in the place of those that stream."""
    sample = min((handle for handles in engine.handles for handle in handles), key=lambda handle: handle.numel(), default=None)
    if sample is None:
        return

    def _apply(self: nn.Module, fn: Any, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            moved = fn(sample)
        if (moved.device, moved.dtype) != (sample.device, sample.dtype) or not isinstance(moved, StreamedParameter):
            raise _native.UsageError(
                f"a streamed model stays in {sample.dtype} on {sample.device}, where its parameters have no memory of their own: leave out .to(), .to_empty(), .half(), "
                ".float() and .cuda(), or choose the device in tierflow.plan(device=...); tierflow.close(model) gives memory and files back"
            )
        return type(self)._apply(self, fn, *args, **kwargs)

    for part in module.modules():
        object.__setattr__(part, "_apply", types.MethodType(_apply, part))
        part.register_load_state_dict_pre_hook(_no_assign)
