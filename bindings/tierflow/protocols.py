"""What parameters, turns and fused layers ask of the engine and of a turn, so that they need not import what imports them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import nn

from .activations import Activations


class Values(Protocol):
    """Where the values and gradients of streamed parameters live. A handle is a StreamedParameter, a gradient a StreamedGradient."""

    durable: int  # as of an engine

    @property
    def device(self) -> torch.device: ...
    def read(self, handle: Any, master: bool = False) -> torch.Tensor: ...
    def write(self, handle: Any, values: torch.Tensor) -> None: ...
    def add_outside(self, handle: Any, grad: torch.Tensor) -> None: ...
    def grad(self, handle: Any) -> Any: ...
    def set_grad(self, handle: Any, value: Any) -> None: ...
    def read_grad(self, gradient: Any) -> torch.Tensor: ...
    def grad_norm(self, gradient: Any) -> float: ...
    def scale_grad(self, gradient: Any, factor: float) -> None: ...


class TurnTaker(Protocol):
    """Whose turns they are: an engine. Lists are by unit."""

    native: Any
    fused_layers: bool
    judged: dict[int, Any]
    configs: dict[str, Any]
    activations: Activations
    active_thread: int
    versions: list[int]  # of the units' weights: steps and writes so far

    @property
    def device(self) -> torch.device: ...
    @property
    def active(self) -> Any: ...
    @property
    def handles(self) -> Sequence[Sequence[Any]]: ...
    @property
    def places(self) -> Sequence[Sequence[list[tuple[nn.Module, str]]]]: ...
    @property
    def trainable(self) -> Sequence[bool]: ...
    def turn(self, turn: Any, phase: str, keep: bool = False) -> AbstractContextManager[list[torch.Tensor]]: ...
    def expect_end(self) -> None: ...
    def say_departs(self, turn: Any, why: str) -> None: ...


class ModuleTurn(Protocol):
    """The turn of a module as a fused layer sees it. Lists are by parameter of the turn."""

    name: str
    module: nn.Module
    places: list[list[tuple[nn.Module, str]]]
    units: list[int]
    parts: Any  # of replays.py

    @property
    def engine(self) -> TurnTaker: ...
    @property
    def handles(self) -> Sequence[Any]: ...
    @property
    def layer(self) -> Any: ...
    def roles(self) -> list[str]: ...
    def others_in_place(self) -> list[Any]: ...
