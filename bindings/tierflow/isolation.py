"""Rows that share a sequence must not see each other. Most of transformers' models see to it where position_ids begin anew; a few do not look, and compute on. So
models that stream are looked at as they run."""

from __future__ import annotations

import functools
import threading
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from . import _native

_OWN_WAYS = ("flash", "flex")  # kinds of attention that take the positions themselves

local = threading.local()  # .begins: of the call that this thread runs (row, column), where a document begins behind another; None


def watch(module: nn.Module) -> None:
    """From now on a call of a transformers model with several documents a row, by its position_ids, raises UsageError at a layer that does not keep them apart."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    module.register_forward_pre_hook(_note, with_kwargs=True)
    for layer in module.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.register_forward_pre_hook(functools.partial(_look, module), with_kwargs=True)


def _note(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    local.begins = None
    positions, mask = kwargs.get("position_ids"), kwargs.get("attention_mask")
    if not isinstance(positions, torch.Tensor) or positions.dim() != 2 or positions.shape[1] < 2:
        return
    if isinstance(mask, torch.Tensor) and (mask.dim() != 2 or not mask.all()):
        return  # positions of padded rows, or a mask that says who sees what
    anew = torch.nonzero(positions.diff(dim=1) != 1)
    if len(anew):
        local.begins = int(anew[0, 0]), int(anew[0, 1]) + 1


def _look(model: nn.Module, layer: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    begins = getattr(local, "begins", None)
    if begins is None or any(way in str(getattr(getattr(model, "config", None), "_attn_implementation", "")) for way in _OWN_WAYS):
        return
    row, column = begins
    for mask in tree_leaves((args, kwargs)):
        if isinstance(mask, torch.Tensor) and mask.dim() == 4 and mask.shape[2] == mask.shape[3] > column:
            sees = mask[min(row, mask.shape[0] - 1), 0, column, column - 1]
            if not sees if mask.dtype == torch.bool else sees < -1e4:
                return
    raise _native.UsageError(
        f"position_ids put several documents into a sequence, and {type(layer).__name__} of transformers lets them see each other: give it one a sequence, "
        'tierflow.data.Rows(packing="none"); and where an attention_mask of ones is passed with position_ids, leave it out'
    )
