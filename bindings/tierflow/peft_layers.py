"""PEFT's LoRA layers inside of a decoder layer, as fused layers take them: plain ones, one adapter each."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .as_made import Departs, watched


@dataclasses.dataclass(frozen=True)
class LoraPart:
    """The adapter of one linear layer: adds scale * B(A(dropout(x)))."""

    path: str  # of the linear layer in the decoder layer
    a: nn.Parameter  # [rank, in]
    b: nn.Parameter  # [out, rank]
    scale: float
    dropout: float


def is_lora(module: nn.Module) -> bool:
    return type(module).__name__ == "Linear" and type(module).__module__ == "peft.tuners.lora.layer"


def without_lora(modules: dict[str, nn.Module]) -> tuple[dict[str, nn.Module], list[LoraPart]]:
    """A decoder layer's modules by path, with the layers that LoRA stands beside in its place; and what it adds to them. Raises Departs for other forms of it."""
    wrappers = {path: module for path, module in modules.items() if is_lora(module)}
    plain = {path: module for path, module in modules.items() if not any(path == outer or path.startswith(f"{outer}.") for outer in wrappers)}
    parts = []
    for path, wrapper in wrappers.items():
        plain[path] = wrapper.base_layer  # type: ignore[assignment]
        if (part := _part(path, wrapper)) is not None:
            parts.append(part)
    if len({part.dropout for part in parts}) > 1:
        raise Departs("its adapters have different dropouts")
    return plain, parts


def _part(path: str, wrapper: Any) -> LoraPart | None:
    if wrapper.disable_adapters:
        return None
    if wrapper.merged:
        raise Departs(f"the adapter of {path} is merged into the weight")
    active = [name for name in wrapper.active_adapters if name in wrapper.lora_A]
    if not active:
        return None
    if len(active) > 1:
        raise Departs(f"{path} has several active adapters")
    name = active[0]
    a, b, dropout = wrapper.lora_A[name], wrapper.lora_B[name], wrapper.lora_dropout[name]
    if name in wrapper.lora_variant or type(a) is not nn.Linear or type(b) is not nn.Linear or b.bias is not None or a.bias is not None:
        raise Departs(f"the adapter of {path} is more than LoRA")
    if any("forward" in module.__dict__ or watched(module) for module in (wrapper, a, b, dropout)):
        raise Departs(f"the adapter of {path} has hooks or a forward() of its own")
    for parameter in (a.weight, b.weight):
        hooks: Callable[[str], Any] = lambda kind, of=parameter: getattr(of, kind, None)  # noqa: E731
        if type(parameter) is not nn.Parameter or parameter.dtype not in (torch.float32, torch.bfloat16) or hooks("_backward_hooks") or hooks("_post_accumulate_grad_hooks"):
            raise Departs(f"the adapter of {path} is no plain parameter in fp32 or bf16")
    drops = dropout.p if isinstance(dropout, nn.Dropout) and dropout.training else 0.0
    return LoraPart(path, a.weight, b.weight, float(wrapper.scaling[name]), float(drops))
