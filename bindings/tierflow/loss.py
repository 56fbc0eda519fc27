"""The loss of causal language models under fused_layers=True: transformers' own, without fp32 copies of the logits."""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch

from . import _native
from .activations import Activations


class _CrossEntropy(torch.autograd.Function):
    """logits: bf16 [tokens, vocab]; labels [tokens], negative where none counts. The sum of the losses over `items`, fp32."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor, items: float, activations: Activations) -> torch.Tensor:
        ctx.save_for_backward(logits, labels)
        ctx.items, ctx.activations = items, activations
        total = _native.cross_entropy_sum(logits, labels)
        return total.div(items).float()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        logits, labels = ctx.saved_tensors
        gradient = _native.cross_entropy_gradient(logits, labels, float(grads[0]) / ctx.items if ctx.items else 0.0)
        ctx.activations.look()
        return gradient, None, None, None


def fuse_loss(model: Any, activations: Activations) -> None:
    """Lets a transformers model whose loss is the usual causal one compute it so."""
    losses = sys.modules.get("transformers.loss.loss_utils")
    theirs = getattr(model, "loss_function", None)
    if losses is None or theirs is not losses.ForCausalLMLoss:
        return

    @functools.wraps(theirs)
    def loss_function(
        logits: torch.Tensor,
        labels: torch.Tensor,
        vocab_size: int,
        num_items_in_batch: torch.Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: torch.Tensor | None = None,
        **others: Any,
    ) -> torch.Tensor:
        targets = shift_labels if shift_labels is not None else torch.nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        targets = targets.reshape(-1).to(logits.device)
        counted = targets != ignore_index
        ours = logits.dtype == torch.bfloat16 and logits.shape[-1] == vocab_size and bool(((targets >= 0) & (targets < vocab_size) | ~counted).all())
        if not ours or ignore_index >= 0:
            return theirs(logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **others)
        items = float(counted.sum() if num_items_in_batch is None else num_items_in_batch)
        return _CrossEntropy.apply(logits.reshape(-1, vocab_size), targets, items, activations)

    model.loss_function = loss_function
