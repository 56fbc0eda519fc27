"""LoRA-GA (Wang et al., 2024) for PEFT's adapters over a frozen streamed base: their first values come from one gradient of each weight, which is there for one
module at a time, and the base stays as it is."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from . import _native
from .saving import engine_of
from .trainer import Trainer

_FACTORS = "tierflow_first_A", "tierflow_first_B"  # buffers of a layer


class LoraGA:
    """Makes the adapters of a PEFT model begin with LoRA-GA's first values, over a base that streams frozen, in whatever format it is stored:

        model = peft.get_peft_model(tierflow.load(folder, plan(trainable=False, base_precision="nf4")), peft.LoraConfig(...))
        first = tierflow.LoraGA(model)
        trainer = tierflow.Trainer(model, tierflow.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4))
        first.begin(trainer, micro_batches)

    From then on a layer gives W x + scale * (B A x - B0 A0 x). A0 and B0 are frozen buffers with the first values of A and B. So without dropout training begins with
    the unchanged model, to the bit. save_pretrained() writes an ordinary LoRA of twice the rank for the unchanged base, [A; A0] and [B, -B0], as the program does
    (docs/adapters.md), and merging adds that.

    method: "lora-ga" as in the paper, or "lora_ga" as in PEFT's LoraGAConfig by default. For a durable model, make the object before tierflow.resume(), and call begin()
    after it, only if it returned 0. Raises UsageError for layers that have other variants of LoRA (DoRA), and for ranks above half of a weight's smaller side.
    """

    def __init__(self, model: nn.Module, *, method: str = "lora-ga", adapter: str = "default", seed: int = 0) -> None:
        if method not in ("lora-ga", "lora_ga"):
            raise _native.UsageError(f'LoRA-GA is "lora-ga" (the paper\'s) or "lora_ga" (PEFT\'s), not "{method}"')
        self._model, self._method, self._adapter, self._seed = model, method, adapter, seed
        self._engine = engine_of(model)
        self._layers: dict[str, _Layer] = {}
        for name, module in model.named_modules():
            if adapter in getattr(module, "lora_A", {}) and hasattr(module, "lora_dropout"):
                path = name.removeprefix("base_model.model.")
                self._layers[path] = _Layer(path, module, adapter)
        if not self._layers:
            raise _native.UsageError(f"the model has no linear layer with an adapter \"{adapter}\": LoRA-GA takes a model of peft.get_peft_model()")
        _double(model, adapter)  # last: nothing is changed where something was refused
        for layer in self._layers.values():
            layer.attach()

    def begin(self, trainer: Trainer, micro_batches: Sequence[Any]) -> None:
        """One forward and backward over the micro-batches of a step, with the trainer's loss and without an update. Only the gradients of one module's adapted weights
        exist at a time, 4 bytes a weight, in torch's memory. Each is decomposed on the CPU as the backward leaves the module. Gradients that the model had are dropped."""
        if trainer.model is not self._model:
            raise _native.UsageError("the trainer is another model's")
        gathering = _Gathering(self._engine, self._finish)
        handles = [layer.module.register_forward_hook(gathering.hook(layer)) for layer in self._layers.values()]
        try:
            trainer.backward(micro_batches)
            gathering.finish()
        finally:
            for handle in handles:
                handle.remove()
            for parameter in self._model.parameters():
                if parameter.requires_grad:
                    parameter.grad = None
        if missing := [path for path, layer in self._layers.items() if layer.found is None]:
            raise _native.UsageError(f"no gradient came to {missing[0]}: does the loss depend on it?")
        for layer in self._layers.values():
            layer.begin()

    def _finish(self, layer: _Layer, gradient: torch.Tensor) -> None:
        """gradient: of W [out, in], fp32."""
        layer.found = _native.lora_ga_factors(
            gradient.cpu(), self._method, f"{layer.path}.weight", layer.rank, layer.scale, layer.transposed, self._seed
        )


class _Layer:
    """A linear layer of PEFT's with its adapter."""

    def __init__(self, path: str, module: Any, adapter: str) -> None:
        if adapter in module.lora_variant or getattr(module, "parameter_name", None) is not None:
            raise _native.UsageError(f"{path}: LoRA-GA is for plain LoRA of linear layers, not for its variants (DoRA) and parameters of experts")
        self.path, self.module, self.adapter = path, module, adapter
        self.a, self.b = module.lora_A[adapter], module.lora_B[adapter]
        self.rank, self.scale = module.r[adapter], module.scaling[adapter]
        self.transposed = bool(getattr(module, "fan_in_fan_out", False))
        self.found: tuple[torch.Tensor, torch.Tensor] | None = None
        side = min(self.a.in_features, self.b.out_features)
        if 2 * self.rank > side:
            raise _native.UsageError(f"{path}: LoRA-GA takes a gradient's first {2 * self.rank} singular vectors, and the smaller side of this weight is {side}: give it a rank of at most {side // 2}")
        if hasattr(module, _FACTORS[0]):
            raise _native.UsageError(f"{path} has first values of LoRA-GA already")
        self._local = threading.local()  # .x: what the layer takes in the call that runs

    def attach(self) -> None:
        for name, linear in zip(_FACTORS, (self.a, self.b), strict=True):
            self.module.register_buffer(name, torch.zeros_like(linear.weight, requires_grad=False), persistent=False)
        self.module.register_forward_pre_hook(self._remember)
        self.b.register_forward_hook(self._without_first)
        self.module.register_state_dict_post_hook(lambda *arguments: self._join(*arguments))  # a method takes no attribute
        plain = self.module.get_delta_weight
        self.module.get_delta_weight = lambda adapter: plain(adapter) - self._first_delta() if adapter == self.adapter else plain(adapter)

    @property
    def _first(self) -> tuple[torch.Tensor, torch.Tensor]:
        return getattr(self.module, _FACTORS[0]), getattr(self.module, _FACTORS[1])

    def _remember(self, module: nn.Module, args: tuple) -> None:
        self._local.x = args[0]

    def _without_first(self, b: nn.Module, args: tuple, out: torch.Tensor) -> torch.Tensor:
        a0, b0 = self._first
        return out - nn.functional.linear(nn.functional.linear(self._local.x.to(a0.dtype), a0), b0)

    def _join(self, module: nn.Module, values: dict[str, Any], prefix: str, local_metadata: Any) -> None:
        a0, b0 = self._first
        a, b = (f"{prefix}lora_{which}.{self.adapter}.weight" for which in "AB")
        if a in values and b in values:
            values[a], values[b] = torch.cat([values[a], a0]), torch.cat([values[b], -b0], 1)

    def _first_delta(self) -> torch.Tensor:
        a0, b0 = (factor.float() for factor in self._first)
        delta = (b0 @ a0) * self.scale
        return (delta.T if self.transposed else delta).to(self.a.weight.dtype)

    def begin(self) -> None:
        assert self.found is not None
        with torch.no_grad():
            for value, parameter, first in zip(self.found, (self.a.weight, self.b.weight), self._first, strict=True):
                first.copy_(value)
                parameter.copy_(value)
        self.found = None


class _Gathering:
    """Sums up gradients of weights from what their layers take and what comes back, until the backward goes on to another turn."""

    def __init__(self, engine: Any, finish: Any) -> None:
        self._engine, self._finish = engine, finish
        self._turn: Any = None
        self._sums: dict[_Layer, torch.Tensor] = {}

    def hook(self, layer: _Layer) -> Any:
        def watch(module: nn.Module, args: tuple, out: torch.Tensor) -> None:
            if torch.is_grad_enabled() and out.requires_grad:
                x = args[0].detach()
                out.register_hook(lambda gradient: self._add(layer, x, gradient))

        return watch

    def _add(self, layer: _Layer, x: torch.Tensor, gradient: torch.Tensor) -> None:
        if self._engine.active is not self._turn:
            self.finish()
            self._turn = self._engine.active
        if layer.found is not None:
            raise _native.UsageError(f"{layer.path} runs more than once in a pass: LoRA-GA takes layers that run once")
        with torch.no_grad():
            product = gradient.flatten(0, -2).T.float() @ x.flatten(0, -2).float()
            self._sums[layer] = self._sums[layer].add_(product) if layer in self._sums else product

    def finish(self) -> None:
        for layer, gradient in self._sums.items():
            self._finish(layer, gradient)
        self._sums = {}


def _double(model: Any, adapter: str) -> None:
    """What save_pretrained() writes is of twice the rank, with the same scale."""
    config = model.peft_config[adapter]
    alpha = math.sqrt(2) if config.use_rslora else 2
    config.r *= 2
    config.lora_alpha *= alpha
    config.rank_pattern = {name: 2 * rank for name, rank in (config.rank_pattern or {}).items()}
    config.alpha_pattern = {name: alpha * value for name, value in (config.alpha_pattern or {}).items()}
    config.init_lora_weights = True  # for who reads the folder: an ordinary LoRA
