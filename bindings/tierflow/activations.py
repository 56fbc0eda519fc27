"""What a model's own tensors take beside the streamed weights."""

from __future__ import annotations

import logging

import torch

from . import _native
from .budget import human

log = logging.getLogger("tierflow")


class Activations:
    """What the model's own tensors take, measured: nothing enforces their share in a user's process.

    It is what malloc, or on CUDA torch's allocator, has given out since the model first ran, looked at where a module's recomputation has just ended.
    `kept` of it are activations that wait for their backward, `rest` the peak of everything else.
    """

    def __init__(self, device: torch.device, share: int) -> None:
        self.device, self.share, self.peak, self.kept, self.rest = device, share, 0, 0, 0
        self._base: int | None = None

    def begin(self) -> None:
        """The model is about to run: the values that it was made from are gone."""
        if self._base is None:
            self._base = self._now()

    def _now(self) -> int:
        return torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else _native.allocated_bytes()

    def has_room(self, size: int) -> bool:
        """Whether so many bytes more may be kept within the share: known once a backward has shown what everything else takes."""
        return 0 < self.rest <= self.share - self.kept - size

    def look(self, within: int = 0) -> None:
        """within: bytes that what follows is going to take for a moment."""
        taken = self._now() - (self._base or 0) + within
        before, self.peak, self.rest = self.peak, max(self.peak, taken), max(self.rest, taken - self.kept)
        if self.peak > self.share >= before and self.share > 0:
            log.warning(
                f"activations take {human(self.peak)}, more than the {human(self.share)} that Budget(activations=...) leaves to them of the device budget: "
                "nothing stops them; a smaller micro-batch needs less (said once)"
            )
