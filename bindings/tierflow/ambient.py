"""What surrounds a computation: autocast and random numbers, which a recomputation has to find as the first computation did, and the kinds of attention that torch may choose."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy
import torch


def autocast_state(device: str) -> tuple[str, bool, torch.dtype]:
    return device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)


def autocast_as(state: tuple[str, bool, torch.dtype]) -> Any:
    device, enabled, dtype = state
    return torch.autocast(device, dtype=dtype, enabled=enabled) if enabled or torch.is_autocast_enabled(device) else contextlib.nullcontext()


def random_state(device: torch.device) -> Any:
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def put_random(state: Any, device: torch.device) -> None:
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1], device)


def other_random_state() -> Any:
    """Of Python's own random numbers and numpy's."""
    return random.getstate(), numpy.random.get_state(legacy=False)


def same_other_random(one: Any, other: Any) -> bool:
    def same(a: Any, b: Any) -> bool:
        if isinstance(a, dict):
            return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
        return numpy.array_equal(a, b) if isinstance(a, numpy.ndarray) else a == b

    return one[0] == other[0] and same(one[1], other[1])


def put_other_random(state: Any) -> None:
    random.setstate(state[0])
    numpy.random.set_state(state[1])


@contextlib.contextmanager
def restored(state: Any, device: torch.device) -> Iterator[None]:
    """Random numbers as they were at `state`; afterwards as they are now."""
    if state is None:
        yield
        return
    now = random_state(device)
    put_random(state, device)
    try:
        yield
    finally:
        put_random(now, device)


@contextlib.contextmanager
def without_cudnn_attention(device: torch.device) -> Iterator[None]:
    """Where torch chooses how attention is computed, not by cuDNN: its gradients with a mask may be NaN (pytorch issue 196678)."""
    chosen = device.type == "cuda" and torch.backends.cuda.cudnn_sdp_enabled()
    if chosen:
        torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        if chosen:
            torch.backends.cuda.enable_cudnn_sdp(True)


@contextlib.contextmanager
def without_fast_path() -> Iterator[None]:
    """torch.nn's attention and encoder layers compute what they would with a graph. Without one, and in eval mode, they have other kernels, with other results where
    there is padding."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)
