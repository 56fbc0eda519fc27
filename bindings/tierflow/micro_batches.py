"""Micro-batches as a Session takes them, and as the runtime does."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from . import _native
from .losses import as_rows, what_follows

_OF_TOKENS = ("input_ids", "labels", "targets", "position_ids", "attention_mask")
_OTHERS = ("reference", "teacher_ids", "teacher_log_probabilities")


def as_program(micro_batches: Any) -> list[dict[str, Any]]:
    """The runtime's form: rows [rows, tokens], and `targets` in place of `labels`. Raises UsageError, which names the micro-batch and what is wrong with it."""
    if isinstance(micro_batches, (Mapping, torch.Tensor, str)) or not isinstance(micro_batches, Iterable):
        raise _native.UsageError("micro-batches come in a list, one alone too: session.step([batch])")
    return [_one(batch, f"micro-batch {number}") for number, batch in enumerate(micro_batches)]


def _one(batch: Any, called: str) -> dict[str, Any]:
    if not isinstance(batch, Mapping):
        raise _native.UsageError(f"{called} is a dictionary of tensors, not of type {type(batch).__name__}")
    known = [*_OF_TOKENS, *_OTHERS]
    if others := [name for name in batch if name not in known]:
        raise _native.UsageError(f"{called} has {others[0]!r}, which a Session does not use: leave it out; there are {', '.join(known)}")
    given = {name: _tensor(value, name, called) for name, value in batch.items() if value is not None}
    if "input_ids" not in given or ("labels" in given) == ("targets" in given):
        raise _native.UsageError(f"{called} has input_ids, and either labels or targets")
    shape = list(given["input_ids"].shape)
    for name in _OF_TOKENS:
        if name in given and (len(shape) != 2 or list(given[name].shape) != shape):
            raise _native.UsageError(f"{called}: {name} has the shape {list(given[name].shape)}; all that has tokens is [rows, tokens], of one shape")
    for name, value in given.items():
        if name not in ("attention_mask", "reference", "teacher_log_probabilities") and (value.is_floating_point() or value.is_complex() or value.dtype == torch.bool):
            raise _native.UsageError(f"{called}: {name} are of {value.dtype}; they are integers")
    if 0 in shape:
        raise _native.UsageError(f"{called} has no tokens: leave it out")
    given = {name: value if value.is_floating_point() or value.dtype == torch.bool else value.long() for name, value in given.items()}
    if "attention_mask" in given:
        _check_padding(given["attention_mask"] != 0, given["labels" if "labels" in given else "targets"], called)
    if "labels" in given:
        given["targets"] = what_follows(given.pop("labels"))
    return given


def _tensor(value: Any, name: str, called: str) -> torch.Tensor:
    try:
        tensor = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise _native.UsageError(f"{called}: no tensor can be made of {name}: {str(error).splitlines()[0]}") from error
    pairs = name in _OF_TOKENS and tensor.dim() == 3 and tensor.shape[1] == 2
    return as_rows(tensor) if pairs else tensor


def _check_padding(seen: torch.Tensor, labels: torch.Tensor, called: str) -> None:
    """Padding on the right changes nothing that a causal model predicts before it."""
    if bool((seen[:, 1:] & ~seen[:, :-1]).any()):
        raise _native.UsageError(f"{called}: attention_mask has a 0 before a 1 in a row; a Session hides no such token: pad on the right, or leave attention_mask out")
    if bool(((labels >= 0) & ~seen.to(labels.device)).any()):
        raise _native.UsageError(f"{called}: padding has labels that count: give -100 where attention_mask is 0")
