"""The program's attention for transformers models on the CPU device: attn_implementation="tierflow"."""

from __future__ import annotations

import math
from typing import Any

import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from . import _native


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """query [batch, heads, length, dim], key and value [batch, kv heads, length, dim]; returns [batch, length, heads, dim].

    Causal attention without a mask in bf16 on the CPU runs in blocks of queries and keys; everything else is sdpa's.
    """
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    ours = (
        causal and attention_mask is None and dropout == 0.0 and query.device.type == "cpu"
        and all(t.dtype == torch.bfloat16 and t.stride(-1) == 1 for t in (query, key, value))
        and query.shape[2] == key.shape[2] > 1 and query.shape[3] == value.shape[3]
        and (scaling is None or math.isclose(scaling, query.shape[3] ** -0.5, rel_tol=1e-12))
        and all(others.get(name) is None for name in ("position_bias", "softcap", "cache"))
    )  # fmt: skip
    if not ours:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **others)
    return _native.attention(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)), None


def register() -> None:
    """Makes the name known to transformers."""
    AttentionInterface.register("tierflow", attention)
    AttentionMaskInterface.register("tierflow", sdpa_mask)
