"""fused_layers=True: turns that the program's own layers compute, in the place of the module's code.

A module is looked at in each call, so that what was changed since (an adapter, a hook, dropout) runs its own code. Nothing here keeps a graph: the backward is
by hand, and adds gradients to the turn's fp32 sums as it goes.
"""

from __future__ import annotations

import logging
import math
import sys
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from . import _native
from .activations import Activations
from .protocols import ModuleTurn

log = logging.getLogger("tierflow")
_FAMILIES = {f"transformers.models.{name.lower()}.modeling_{name.lower()}": name for name in ("Llama", "Mistral", "Qwen2", "Qwen3")}
_PROJECTIONS = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
_NORMS = ["input_layernorm", "post_attention_layernorm"]


class Departs(Exception):
    """Why a call runs the module's own code. silent: a matter of course, as in generate()."""

    def __init__(self, why: str, silent: bool = False) -> None:
        super().__init__(why)
        self.silent = silent


class Kept:
    """Activations that wait for their backward, counted."""

    def __init__(self, held: Any, size: int, activations: Activations) -> None:
        self.held, self._size, self._activations = held, size, activations
        activations.kept += size

    def __del__(self) -> None:
        self._activations.kept -= self._size


class Layer:
    """What a turn's module is computed with. Weights are those of the turn, in its order."""

    def __init__(self, turn: ModuleTurn) -> None:
        self.turn = turn
        self.roles = turn.roles()

    def operands(self, args: tuple, kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """What a call is computed from: tensors of the call, and constants of its own. Raises Departs where the module's own code has to run."""
        raise NotImplementedError

    def forward(self, weights: list[torch.Tensor], operands: list[torch.Tensor], keep: bool) -> tuple[torch.Tensor, Kept | None]:
        """The result, without a graph. keep: activations may be kept for backward() where there is room."""
        raise NotImplementedError

    def backward(self, weights: list[torch.Tensor], operands: list[torch.Tensor], grad: torch.Tensor, kept: Kept | None) -> torch.Tensor | None:
        """Adds the gradients of the weights to their sums; returns that of the first operand."""
        raise NotImplementedError


def layer_of(turn: ModuleTurn) -> Layer | None:
    """What can compute the turn's module, should its calls allow it."""
    kind = type(turn.module)
    if kind is nn.Linear:
        return _Linear(turn)
    if kind is nn.Embedding:
        return _Embedding(turn)
    if kind.__module__ in _FAMILIES and kind.__name__ == f"{_FAMILIES[kind.__module__]}DecoderLayer":
        return _Decoder(turn)
    return None


def say_what_is_fused(turns: Sequence[ModuleTurn]) -> None:
    if not any(isinstance(turn.layer, _Decoder) for turn in turns):
        log.warning("fused_layers: no decoder layer of Llama, Mistral, Qwen2 or Qwen3 takes a turn here: the model's layers run their own code")


def _one_input(args: tuple, kwargs: dict[str, Any]) -> torch.Tensor:
    if len(args) != 1 or kwargs or not isinstance(args[0], torch.Tensor):
        raise Departs("it is called in an unusual way")
    return args[0]


def _check_untouched(module: nn.Module, kind: type, name: str, outermost: bool = False) -> None:
    what = name or "the layer"
    if type(module) is not kind or kind.forward.__module__ != kind.__module__:
        raise Departs(f"{what} is {type(module).__module__}.{type(module).__name__}, not {kind.__name__} as it was written")
    if not outermost and ("forward" in module.__dict__ or _watched(module)):
        raise Departs(f"{what} has hooks or a forward() of its own")


def _check_autocast(turn: ModuleTurn) -> None:
    device = turn.engine.device.type
    if torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) != torch.bfloat16:
        raise Departs("autocast is on, and not to bfloat16")


def _watched(module: nn.Module) -> bool:
    """Whether a hook is registered, other than what transformers leaves behind where outputs were recorded once."""
    if module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        return True
    for hook in module._forward_hooks.values():
        recorder = sys.modules.get("transformers.utils.output_capturing")
        if recorder is None or getattr(hook, "__module__", "") != recorder.__name__:
            return True
        if set(recorder._active_collector.get() or ()) - {"hidden_states", "_hidden_states_layers"}:
            return True
    return False


class _Linear(Layer):
    def operands(self, args: tuple, kwargs: dict[str, Any]) -> list[torch.Tensor]:
        _check_untouched(self.turn.module, nn.Linear, "", outermost=True)
        if (x := _one_input(args, kwargs)).dtype != torch.bfloat16:
            raise Departs(f"its input is {x.dtype}, not bfloat16")
        _check_autocast(self.turn)
        return [x]

    def _places(self) -> tuple[int, int]:
        return self.roles.index("weight"), self.roles.index("bias") if "bias" in self.roles else -1

    def forward(self, weights: list[torch.Tensor], operands: list[torch.Tensor], keep: bool) -> tuple[torch.Tensor, None]:
        weight, bias = self._places()
        return nn.functional.linear(operands[0], weights[weight], weights[bias] if bias >= 0 else None), None

    def backward(self, weights: list[torch.Tensor], operands: list[torch.Tensor], grad: torch.Tensor, kept: Kept | None) -> torch.Tensor:
        return _native.linear_backward(self.turn.engine.native, weights, *self._places(), operands[0], grad)


class _Embedding(Layer):
    def _table(self) -> nn.Embedding:
        assert isinstance(self.turn.module, nn.Embedding)
        return self.turn.module

    def operands(self, args: tuple, kwargs: dict[str, Any]) -> list[torch.Tensor]:
        table = self._table()
        _check_untouched(table, nn.Embedding, "", outermost=True)
        if table.max_norm is not None or table.scale_grad_by_freq:
            raise Departs("max_norm or scale_grad_by_freq is set")
        return [_one_input(args, kwargs)]

    def forward(self, weights: list[torch.Tensor], operands: list[torch.Tensor], keep: bool) -> tuple[torch.Tensor, None]:
        return nn.functional.embedding(operands[0], weights[0]), None

    def backward(self, weights: list[torch.Tensor], operands: list[torch.Tensor], grad: torch.Tensor, kept: Kept | None) -> None:
        padding = self._table().padding_idx
        _native.embedding_backward(self.turn.engine.native, weights, 0, operands[0], grad, -1 if padding is None else padding)


class _Decoder(Layer):
    """A decoder layer of Llama, Mistral, Qwen2 or Qwen3."""

    def __init__(self, turn: ModuleTurn) -> None:
        super().__init__(turn)
        self._shape: dict[str, Any] = {}
        self._layer: Any = None

    def operands(self, args: tuple, kwargs: dict[str, Any]) -> list[torch.Tensor]:
        shape = self._describe()
        if shape != self._shape:
            try:
                self._layer = _native.DecoderLayer(shape, self.roles)
            except _native.UsageError as error:
                raise Departs(str(error)) from error
            self._shape = shape
        given = {**dict(zip(("hidden_states", "attention_mask", "position_ids", "past_key_values", "use_cache", "position_embeddings"), args)), **kwargs}
        if given.get("past_key_values") is not None:
            raise Departs("it fills a cache", silent=True)
        hidden, tables = given.get("hidden_states"), given.get("position_embeddings")
        if not isinstance(hidden, torch.Tensor) or hidden.dim() != 3 or hidden.dtype != torch.bfloat16 or not hidden.numel():
            raise Departs("its input is not bfloat16 [batch, sequence, hidden]")
        _check_autocast(self.turn)
        if tables is None or not all(self._is_table(table, hidden) for table in tables):
            raise Departs("its rotary tables are not in the form of transformers' own")
        if (mask := given.get("attention_mask")) is not None:
            if (positions := self._positions(mask, hidden)) is None:
                raise Departs("its attention mask does more than causal attention within documents does (padding)")
            return [hidden, *tables, positions]
        if (given_positions := given.get("position_ids")) is not None and self._restart(given_positions):
            raise Departs("its positions restart, and no mask says whether its attention does")
        return [hidden, *tables]

    def _describe(self) -> dict[str, Any]:
        """What the layer computes. Raises Departs where it is not as transformers made it."""
        layer: Any = self.turn.module
        code = sys.modules[type(layer).__module__]
        prefix = _FAMILIES[code.__name__]
        modules = dict(layer.named_modules())
        norms = _NORMS + [name for name in ("self_attn.q_norm", "self_attn.k_norm") if prefix == "Qwen3"]
        kinds: dict[str, type] = {
            **dict.fromkeys(_PROJECTIONS, nn.Linear), **dict.fromkeys(norms, getattr(code, f"{prefix}RMSNorm")), "": type(layer),
            "self_attn": getattr(code, f"{prefix}Attention"), "mlp": getattr(code, f"{prefix}MLP"), "mlp.act_fn": _silu(modules),
        }  # fmt: skip
        for name in modules:
            if name not in kinds:
                raise Departs(f"{name} is no part of it as transformers makes it")
        for name, kind in kinds.items():
            _check_untouched(modules[name], kind, name, outermost=name == "")
        if any(m._parameters.get(name) is not handle for handle, places in zip(self.turn.handles, self.turn.places, strict=True) for m, name in places):
            raise Departs("a parameter was put in the place of one that streams")
        attention = layer.self_attn
        window = getattr(attention, "sliding_window", None) if prefix != "Mistral" else getattr(attention.config, "sliding_window", None)
        q, k, gate = attention.q_proj, attention.k_proj, layer.mlp.gate_proj
        eps = {modules[name].variance_epsilon for name in norms}
        if len(eps) != 1 or not math.isclose(attention.scaling, attention.head_dim**-0.5, rel_tol=1e-12) or attention.is_causal is not True:
            raise Departs("its scaling, causality or epsilons are not the usual ones")
        if attention.training and attention.attention_dropout > 0:
            raise Departs("it has dropout")
        return {
            "hidden": q.in_features, "intermediate": gate.out_features, "heads": q.out_features // attention.head_dim,
            "kv_heads": k.out_features // attention.head_dim, "head_dim": attention.head_dim, "window": window or 0, "norm_eps": eps.pop(),
            "qkv_bias": q.bias is not None, "output_bias": attention.o_proj.bias is not None, "mlp_bias": gate.bias is not None,
            "qk_norm": prefix == "Qwen3",
        }  # fmt: skip

    def _is_table(self, table: Any, hidden: torch.Tensor) -> bool:
        """cos or sin [1 or batch, sequence, head_dim], its second half as the first."""
        batch, length = hidden.shape[:2]
        dim = self._shape["head_dim"]
        if not isinstance(table, torch.Tensor) or table.dtype != hidden.dtype or table.requires_grad or table.shape not in ((1, length, dim), (batch, length, dim)):
            return False
        return self._judge(table, 0, lambda: torch.equal(table[..., : dim // 2], table[..., dim // 2 :]))

    def _restart(self, positions: torch.Tensor) -> bool:
        """Whether positions do not only count up: where transformers builds no mask, some kinds of attention look at that."""
        return self._judge(positions, 0, lambda: bool((positions.diff(dim=-1) != 1).any()))

    def _positions(self, mask: Any, hidden: torch.Tensor) -> torch.Tensor | None:
        """Of causal attention within documents, in the layer's window: each token's position in its document [batch, sequence], on the CPU."""
        batch, length = hidden.shape[:2]
        if not isinstance(mask, torch.Tensor) or mask.dim() != 4 or mask.shape[0] not in (1, batch) or mask.shape[-2:] != (length, length):
            return None
        window = self._shape["window"] or length

        def compare() -> torch.Tensor | None:
            if mask.dtype != torch.bool and bool(((mask != 0) & (mask > torch.finfo(mask.dtype).min)).any()):
                return None
            keys = torch.arange(length, device=mask.device)
            follows = nn.functional.pad(_seen(mask[:, 0]).diagonal(-1, -2, -1), (1, 0))  # sees the token before it
            begin = torch.where(follows, 0, keys).cummax(-1).values
            first = torch.maximum(begin, keys - window + 1)
            for queries in keys.split(256):
                expected = (keys <= queries.unsqueeze(1)) & (keys >= first[:, queries].unsqueeze(2))
                found = _seen(mask[:, :, queries])
                if not torch.equal(found, expected.unsqueeze(1).expand_as(found)):
                    return None
            return (keys - begin).cpu()

        positions = self._judge(mask, window, compare)
        return None if positions is None else positions.expand(batch, length)

    def _judge(self, tensor: torch.Tensor, window: int, compare: Any) -> Any:
        """The verdict on a tensor, which the layers of a model share: found once."""
        seen = self.turn.engine.judged
        entry = seen.get(id(tensor))
        version = 0 if tensor.is_inference() else tensor._version
        if entry is None or entry[0]() is not tensor or entry[1:3] != (version, window):
            key = id(tensor)
            entry = seen[key] = (weakref.ref(tensor, lambda _: seen.pop(key, None)), version, window, compare())
        return entry[3]

    def _input(self, operands: list[torch.Tensor]) -> list[torch.Tensor | None]:
        hidden, *tables = operands[:3]
        halves = [table[..., : self._shape["head_dim"] // 2] for table in tables]
        return [hidden, *(half[0] if half.shape[0] == 1 else half for half in halves), operands[3] if len(operands) > 3 else None]

    def forward(self, weights: list[torch.Tensor], operands: list[torch.Tensor], keep: bool) -> tuple[torch.Tensor, Kept | None]:
        activations = self.turn.engine.activations
        size = self._layer.kept_bytes(operands[0].shape[0] * operands[0].shape[1])
        if not keep or not activations.has_room(size):
            return self._layer.forward(weights, *self._input(operands)), None
        out, held = self._layer.forward_keeping(weights, *self._input(operands))
        return out, Kept(held, size, activations)

    def backward(self, weights: list[torch.Tensor], operands: list[torch.Tensor], grad: torch.Tensor, kept: Kept | None) -> torch.Tensor:
        engine, held = self.turn.engine, None if kept is None else kept.held
        # Inside are what the forward computes on its way, unless it was kept, and about as much again of gradients.
        engine.activations.look(within=self._layer.kept_bytes(operands[0].shape[0] * operands[0].shape[1]) * (2 if held is None else 1))
        return self._layer.backward(engine.native, weights, *self._input(operands), grad.to(torch.bfloat16), held)


def _seen(mask: torch.Tensor) -> torch.Tensor:
    return mask if mask.dtype == torch.bool else mask == 0


def _silu(modules: dict[str, nn.Module]) -> type:
    """The class that the activation has to be: torch's silu, or the one of transformers."""
    theirs = getattr(sys.modules.get("transformers.activations"), "SiLUActivation", nn.SiLU)
    return theirs if type(modules.get("mlp.act_fn")) is theirs else nn.SiLU
