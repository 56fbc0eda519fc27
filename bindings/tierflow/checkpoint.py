"""Checkpoints that a run resumes from bit for bit: streamed state from the tiers into one file, everything else beside it."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from . import _native
from .folders import save_over, standing, written_to
from .optim import AdamW
from .parameter import StreamedParameter
from .saving import engine_of, uncompiled

_STREAMED, _OTHERS, _RECORD = "streamed.safetensors", "others.safetensors", "checkpoint.json"
_FORMAT = 1


def save_checkpoint(model: nn.Module, opt: AdamW, folder: str | os.PathLike) -> None:
    """Writes exactly what training changes: fp32 masters and moments of streamed parameters, every ordinary parameter and buffer, the optimizer's groups and counts,
    and the states of the random numbers of torch, numpy and Python. Call it between two steps.

    Frozen streamed weights are not in the checkpoint: they come from the folder that the model was loaded from. Only ordinary tensors take RAM. An older checkpoint in
    `folder` is replaced when the new one is complete on the drive; other files in it stay. Schedulers and data loaders have state_dict()s of their own.
    Raises EnvironmentError if there is no room or no right to write, StorageError if the drive failed; the older checkpoint is as it was then.
    """
    model, engine = uncompiled(model), engine_of(model)

    def write(partial: Path) -> None:
        engine.native.save_state(str(partial / _STREAMED))
        tensors, record = state_of(model, opt)
        save_file(tensors, partial / _OTHERS)
        (partial / _RECORD).write_text(json.dumps({"format": _FORMAT, **record}, indent=1), encoding="utf-8")

    with written_to(folder):
        save_over(folder, (_STREAMED, _OTHERS, _RECORD), write)


def load_checkpoint(model: nn.Module, opt: AdamW, folder: str | os.PathLike) -> None:
    """Restores a model and its optimizer from the checkpoint of save_checkpoint(). They must have been made in the same way; budgets, storage and device may differ.

    Raises InputError if the checkpoint belongs to another model, optimizer or precision; nothing has changed then.
    """
    model, engine, target = uncompiled(model), engine_of(model), standing(folder)
    if engine.durable and (engine.journal is None or engine.journal.step):
        raise _native.UsageError("a durable model goes on with its own state: load a checkpoint where tierflow.resume(model, opt) says 0, after it")
    if not (target / _RECORD).is_file():
        raise _native.InputError(f"{target}: no {_RECORD} there: not a checkpoint of tierflow.save_checkpoint()")
    try:
        record = json.loads((target / _RECORD).read_text(encoding="utf-8"))
        tensors, _ = load_file(target / _OTHERS), (record["groups"], record["steps"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _native.InputError(f"{target}: cannot be read: {error}") from error
    if record.get("format") != _FORMAT:
        raise _native.InputError(f"{target}: format {record.get('format')} is not this version's, {_FORMAT}")
    if record.get("base", {}) != engine.formats:
        raise _native.InputError(f"{target}: the base had another base_precision there, and so other weights")
    put_back(model, opt, record, tensors, str(target), lambda: engine.native.load_state(str(target / _STREAMED)))
    engine.versions = [version + 1 for version in engine.versions]
    if engine.journal is not None:
        engine.journal.end_step(counts=False)


def state_of(model: nn.Module, opt: AdamW) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """What training changes besides the streamed state, as copies in RAM, and what of it is no tensor, for JSON."""
    engine = engine_of(model)
    tensors = {f"model.{name}": tensor for name, tensor in _ordinary(model)}
    record: dict[str, Any] = {"groups": groups_of(model, opt), "steps": {}, "base": engine.formats}
    for name, p in _trained(model, opt):
        for key, value in opt.state.get(p, {}).items():
            if isinstance(value, torch.Tensor):
                tensors[f"opt.{key}.{name}"] = value
            else:
                record["steps"][name] = value
    tensors["random.cpu"] = torch.get_rng_state()
    tensors.update(random_states())
    if engine.device.type == "cuda":
        tensors["random.cuda"] = torch.cuda.get_rng_state(engine.device)
    return {name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}, record


def put_back(
    model: nn.Module, opt: AdamW, record: dict[str, Any], tensors: dict[str, torch.Tensor], where: str, put_streamed: Callable[[], None] = lambda: None
) -> None:
    """What state_of() gave. put_streamed: called once nothing of it can be refused any more; `where` is named where it is."""
    engine, groups, steps = engine_of(model), record["groups"], record["steps"]
    mine = groups_of(model, opt)
    if [g["params"] for g in mine] != [g["params"] for g in groups]:
        raise _native.InputError(f"{where}: the optimizer's groups hold other parameters there")
    ordinary = dict(_ordinary(model))
    for name, tensor in ordinary.items():
        found = tensors.get(f"model.{name}")
        if found is None or found.shape != tensor.shape:
            raise _native.InputError(f"{where}: {name} is missing there, or has another shape: another model's checkpoint")
    put_streamed()
    with torch.no_grad():
        for name, tensor in ordinary.items():
            tensor.copy_(tensors[f"model.{name}"])
    for group, saved in zip(opt.param_groups, groups, strict=True):
        group.update({key: tuple(value) if key == "betas" else value for key, value in saved.items() if key != "params"})
    for name, p in _trained(model, opt):
        opt.state[p] = {"step": steps[name]} if name in steps else {}
        for key in ("step", "exp_avg", "exp_avg_sq"):
            if (value := tensors.get(f"opt.{key}.{name}")) is not None:
                opt.state[p][key] = value if key == "step" else value.to(p.device)
        if not opt.state[p]:
            del opt.state[p]
    opt.own_moments()
    torch.set_rng_state(tensors["random.cpu"])
    _put_random_states(tensors)
    if engine.device.type == "cuda" and "random.cuda" in tensors:
        torch.cuda.set_rng_state(tensors["random.cuda"], engine.device)


def random_states() -> dict[str, torch.Tensor]:
    """Of the generators of Python's `random` and of `numpy.random` that everybody in the process draws from: their words, and the number each may have in store."""
    _, words, spare = random.getstate()
    states = {"random.python": torch.tensor(words), "random.python.spare": _spare(spare)}
    now = numpy.random.get_state(legacy=False)
    if now["bit_generator"] == "MT19937":  # the one that numpy has, unless set_bit_generator() was called
        states["random.numpy"] = torch.tensor([*now["state"]["key"].tolist(), now["state"]["pos"]])
        states["random.numpy.spare"] = _spare(now["gauss"] if now["has_gauss"] else None)
    return states


def _spare(number: float | None) -> torch.Tensor:
    return torch.tensor([number is not None, number or 0.0], dtype=torch.float64)


def _put_random_states(tensors: dict[str, torch.Tensor]) -> None:
    """What of random_states() is there: earlier versions have none."""
    if (words := tensors.get("random.python")) is not None:
        there, spare = tensors["random.python.spare"].tolist()
        random.setstate((3, tuple(words.tolist()), spare if there else None))
    if (words := tensors.get("random.numpy")) is not None:
        there, spare = tensors["random.numpy.spare"].tolist()
        *key, place = words.tolist()
        numpy.random.set_state(("MT19937", numpy.array(key, numpy.uint32), place, int(there), spare))


def _ordinary(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters that do not stream, and buffers: also those that a state_dict() leaves out."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if not isinstance(tensor, StreamedParameter):
            yield name, tensor


def _trained(model: nn.Module, opt: AdamW) -> list[tuple[str, Any]]:
    names = {id(p): name for name, p in model.named_parameters()}
    found = []
    for group in opt.param_groups:
        for p in group["params"]:
            if id(p) not in names:
                raise _native.UsageError("the optimizer has a parameter that the model does not: a checkpoint goes by the model's names")
            found.append((names[id(p)], p))
    return found


def groups_of(model: nn.Module, opt: AdamW) -> list[dict[str, Any]]:
    """The optimizer's groups, their parameters by name."""
    names = {id(p): name for name, p in _trained(model, opt)}
    made = []
    for group in opt.param_groups:
        plain = {key: value.item() if isinstance(value, torch.Tensor) else value for key, value in group.items() if key != "params"}
        made.append({**plain, "params": [names[id(p)] for p in group["params"]]})
    return made
