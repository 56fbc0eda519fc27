"""fused_layers=True: turns that the program's own layers compute, in the place of the module's code.

A module is looked at in each call, so that what was changed since (an adapter, a hook, dropout) runs its own code. Nothing here keeps a graph: the backward is
by hand, and adds gradients to the turn's fp32 sums as it goes.
"""

from __future__ import annotations

import inspect
import logging
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from . import _native
from .activations import Activations
from .as_made import Departs, LayerAsMade, architecture_of, check_untouched
from .peft_layers import LoraPart, without_lora
from .protocols import ModuleTurn

log = logging.getLogger("tierflow")


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

    def found(self) -> Any:
        """What operands() found of the module itself, beside the operands: adapters. A call goes by it whatever later calls find."""
        return None

    def go_by(self, found: Any) -> None:
        """The forward() or backward() that follows belongs to the call that found this."""

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
    if turn.module is not None and architecture_of(turn.module) is not None:
        return _Decoder(turn)
    return None


def say_what_is_fused(turns: Sequence[ModuleTurn]) -> None:
    if not any(isinstance(turn.layer, _Decoder) for turn in turns):
        log.warning("fused_layers: no decoder layer that the program knows takes a turn here: the model's layers run their own code")


def _one_input(args: tuple, kwargs: dict[str, Any]) -> torch.Tensor:
    if len(args) != 1 or kwargs or not isinstance(args[0], torch.Tensor):
        raise Departs("it is called in an unusual way")
    return args[0]


def _check_autocast(turn: ModuleTurn) -> None:
    device = turn.engine.device.type
    if torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) != torch.bfloat16:
        raise Departs("autocast is on, and not to bfloat16")


class _Linear(Layer):
    def operands(self, args: tuple, kwargs: dict[str, Any]) -> list[torch.Tensor]:
        check_untouched(self.turn.module, nn.Linear, "", outermost=True)
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
        check_untouched(table, nn.Embedding, "", outermost=True)
        if table.max_norm is not None or table.scale_grad_by_freq:
            raise Departs("max_norm or scale_grad_by_freq is set")
        return [_one_input(args, kwargs)]

    def forward(self, weights: list[torch.Tensor], operands: list[torch.Tensor], keep: bool) -> tuple[torch.Tensor, None]:
        return nn.functional.embedding(operands[0], weights[0]), None

    def backward(self, weights: list[torch.Tensor], operands: list[torch.Tensor], grad: torch.Tensor, kept: Kept | None) -> None:
        padding = self._table().padding_idx
        _native.embedding_backward(self.turn.engine.native, weights, 0, operands[0], grad, -1 if padding is None else padding)


class _Decoder(Layer):
    """A dense decoder layer of transformers."""

    def __init__(self, turn: ModuleTurn) -> None:
        super().__init__(turn)
        assert turn.module is not None
        self._module: nn.Module = turn.module
        self._calls = inspect.signature(type(turn.module).forward)
        self._made: LayerAsMade | None = None
        self._layer: Any = None
        self._refused = ""  # why the config's layer cannot be computed
        self._lora: list[LoraPart] = []  # adapters, as the last call found them
        self._shape: tuple = ()  # what of them the native layer is made for
        self._steps: tuple[int | None, ...] = ()  # of the rotary tables of the last call
        self._used: Any = None  # the layer, the adapters and the steps of the call that computes
        self._used_lora: list[LoraPart] = []
        self._used_steps: tuple[int | None, ...] = ()

    def operands(self, args: tuple, kwargs: dict[str, Any]) -> list[torch.Tensor]:
        self._look()
        given = self._calls.bind(self._module, *args, **kwargs).arguments
        given.update(given.pop("kwargs", {}))
        if given.get("past_key_values") is not None or given.get("layer_past") is not None:
            raise Departs("it fills a cache", silent=True)
        hidden, tables = given.get("hidden_states"), given.get("position_embeddings")
        if not isinstance(hidden, torch.Tensor) or hidden.dim() != 3 or hidden.dtype != torch.bfloat16 or not hidden.numel():
            raise Departs("its input is not bfloat16 [batch, sequence, hidden]")
        _check_autocast(self.turn)
        if tables is None and self._layer.rotated == 0:
            tables = (hidden, hidden)  # nothing looks at them
        if tables is None or not all(self._is_table(table, hidden) for table in tables):
            raise Departs("its rotary tables are not in the form of transformers' own")
        self._steps = tuple(self._step(table) for table in tables) if self._layer.rotated else ()
        if (mask := given.get("attention_mask")) is not None:
            if (positions := self._positions(mask, hidden)) is None:
                raise Departs("its attention mask does more than causal attention within documents does (padding)")
            return [hidden, *tables, positions]
        if (given_positions := given.get("position_ids")) is not None and self._restart(given_positions):
            raise Departs("its positions restart, and no mask says whether its attention does")
        return [hidden, *tables]

    def _look(self) -> None:
        """Raises Departs where the layer is not as transformers made it, but for plain LoRA beside its linear layers."""
        plain, self._lora = without_lora(dict(self._module.named_modules()))
        shape = tuple((part.path, part.a.shape[0], part.scale) for part in self._lora), self._lora[0].dropout if self._lora else 0.0
        if self._made is None or not self._made.is_current() or shape != self._shape:
            self._made, self._refused, self._shape = LayerAsMade(self._module), "", shape
            roles = [*self.roles, *(f"{part.path}.lora_{which}.weight" for part in self._lora for which in "AB")]
            try:
                text, configs = self._made.config_text(), self.turn.engine.configs
                if text not in configs:
                    configs[text] = _native.DecoderConfig(text)
                self._layer = _native.DecoderLayer(configs[text], self._made.index, roles, *shape)
            except (_native.UsageError, _native.InputError) as error:
                self._refused = str(error)
        if self._refused:
            raise Departs(self._refused)
        self._made.check(plain)
        if any(m._parameters.get(name) is not handle for handle, places in zip(self.turn.handles, self.turn.places, strict=True) for m, name in places):
            raise Departs("a parameter was put in the place of one that streams")

    def found(self) -> Any:
        return self._layer, self._lora, self._steps

    def go_by(self, found: Any) -> None:
        self._used, self._used_lora, self._used_steps = found

    def _with_lora(self, weights: list[torch.Tensor]) -> list[torch.Tensor]:
        return [*weights, *(factor.detach().to(torch.bfloat16) for part in self._used_lora for factor in (part.a, part.b))]

    def _is_table(self, table: Any, hidden: torch.Tensor) -> bool:
        """cos or sin [1 or batch, sequence, rotated]: its second half as the first, or, of neighbouring pairs, each value twice."""
        batch, length = hidden.shape[:2]
        rotated = self._layer.rotated
        if rotated == 0:
            return True
        dtype = hidden.dtype if self._layer.rounded else torch.float32
        if not isinstance(table, torch.Tensor) or table.dtype != dtype or table.requires_grad or table.shape not in ((1, length, rotated), (batch, length, rotated)):
            return False
        return self._step(table) is not None

    def _step(self, table: torch.Tensor) -> int | None:
        """How the value of each pair is found in a table: 1, in its first half; 2, in every other place; None: in neither."""

        def compare() -> int | None:
            half = table.shape[-1] // 2
            if self._layer.interleaved and torch.equal(table[..., ::2], table[..., 1::2]):
                return 2
            return 1 if torch.equal(table[..., :half], table[..., half:]) else None

        return self._judge(table, -1 if self._layer.interleaved else 0, compare)

    def _restart(self, positions: torch.Tensor) -> bool:
        """Whether positions do not only count up: where transformers builds no mask, some kinds of attention look at that."""
        return self._judge(positions, 0, lambda: bool((positions.diff(dim=-1) != 1).any()))

    def _positions(self, mask: Any, hidden: torch.Tensor) -> torch.Tensor | None:
        """Of causal attention within documents, in the layer's window: each token's position in its document [batch, sequence], on the CPU."""
        batch, length = hidden.shape[:2]
        if not isinstance(mask, torch.Tensor) or mask.dim() != 4 or mask.shape[0] not in (1, batch) or mask.shape[-2:] != (length, length):
            return None
        window = self._layer.window or length

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
        halves = tables
        if half := self._used.rotated // 2:
            halves = [table[..., ::2] if step == 2 else table[..., :half] for table, step in zip(tables, self._used_steps, strict=True)]
        return [hidden, *(half[0] if half.shape[0] == 1 else half for half in halves), operands[3] if len(operands) > 3 else None]

    def forward(self, weights: list[torch.Tensor], operands: list[torch.Tensor], keep: bool) -> tuple[torch.Tensor, Kept | None]:
        activations = self.turn.engine.activations
        size = self._used.kept_bytes(operands[0].shape[0] * operands[0].shape[1])
        if not keep or not self._used.keeps or not activations.has_room(size):
            return self._used.forward(self._with_lora(weights), *self._input(operands)), None
        out, held = self._used.forward_keeping(self._with_lora(weights), *self._input(operands))
        return out, Kept(held, size, activations)

    def backward(self, weights: list[torch.Tensor], operands: list[torch.Tensor], grad: torch.Tensor, kept: Kept | None) -> torch.Tensor:
        engine, held = self.turn.engine, None if kept is None else kept.held
        # Inside are what the forward computes on its way, unless it was kept, and about as much again of gradients.
        engine.activations.look(within=self._used.kept_bytes(operands[0].shape[0] * operands[0].shape[1]) * (2 if held is None else 1))
        factors = [factor for part in self._used_lora for factor in (part.a, part.b)]
        sums = [torch.zeros(factor.shape, dtype=torch.float32, device=factor.device) if factor.requires_grad else None for factor in factors]
        gradient = self._used.backward(engine.native, self._with_lora(weights), *self._input(operands), grad.to(torch.bfloat16), held, sums)
        for factor, found in zip(factors, sums, strict=True):
            if found is not None:
                factor.grad = found.to(factor.dtype) if factor.grad is None else factor.grad + found.to(factor.dtype)
        return gradient


def _seen(mask: torch.Tensor) -> torch.Tensor:
    return mask if mask.dtype == torch.bool else mask == 0
