"""What transformers records of modules inside of a model while it runs (router_logits, attentions): its hooks put it in lists beside what the modules return.

A turn computes without a graph, and again in the backward. So what was recorded in it has to be a result of the turn like any other: else no gradient would
come through it, and a mixture's load-balancing loss would train nothing.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from torch.utils._pytree import SUPPORTED_NODES, register_pytree_node


def _active() -> Any:
    """Where transformers keeps the lists; None before it ever recorded anything."""
    recorder = sys.modules.get("transformers.utils.output_capturing")
    return None if recorder is None else recorder._active_collector


class Recorded:
    """The lists that are in use when a turn is called: the caller's, whichever thread computes the turn."""

    def __init__(self) -> None:
        active = _active()
        self._into: dict[str, Any] = (active.get() if active is not None else None) or {}
        self._lists = {name: len(values) for name, values in self._into.items() if isinstance(values, list)}  # hooks ask for how much there is
        self._settings = {name: value for name, value in self._into.items() if name not in self._lists}

    @contextlib.contextmanager
    def apart(self) -> Iterator[dict[str, list[Any]]]:
        """What the block records goes to the dictionary that this gives, by list, once it has ended. The caller's lists stay as they are."""
        found: dict[str, list[Any]] = {}
        if not self._lists:
            yield found
            return
        lists: dict[str, list[Any]] = {name: [None] * count for name, count in self._lists.items()}
        active = _active()
        token = active.set({**self._settings, **lists})
        try:
            yield found
        finally:
            active.reset(token)
        found.update({name: values[self._lists[name] :] for name, values in lists.items()})

    def join(self, found: dict[str, list[Any]]) -> None:
        """Adds to the caller's lists what the turn has of each, once: they have tensors whose graph leads back to the turn, so it must not keep them."""
        for name, values in found.items():
            self._into[name].extend(values)
        self._into = {}


def know_shared_keys() -> None:
    """Keys and values that layers share in transformers (Gemma 3n, Gemma 4) are in a dictionary that torch's pytree does not know: made known, what is in it is an
    input of a turn like any other, and what a turn adds a result."""
    caches = sys.modules.get("transformers.cache_utils")
    kind = getattr(caches, "KVSharingDict", None)
    if kind is not None and kind not in SUPPORTED_NODES:
        register_pytree_node(
            kind,
            lambda shared: (list(shared.data.values()), list(shared.data)),
            lambda values, keys: kind(zip(keys, values, strict=True)),
            serialized_type_name="transformers.cache_utils.KVSharingDict",
        )
