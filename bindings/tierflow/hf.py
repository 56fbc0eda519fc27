"""For transformers.Trainer and trl.SFTTrainer, which take a streamed model as it is: pass `optimizers=(tierflow.optim.AdamW(...), None)`."""

from __future__ import annotations

import time
from typing import Any

from transformers import TrainerCallback

from .model import stats


class TierflowCallback(TrainerCallback):
    """Adds what moved between the tiers to the Trainer's logs: GB since the log before, by lane, and the share of time each lane was busy.

    TierflowCallback().attach(trainer), rather than callbacks=[...], puts it before the callbacks that write logs elsewhere (TensorBoard, W&B).
    """

    def __init__(self) -> None:
        self._before: dict[str, Any] | None = None
        self._since = 0.0

    def attach(self, trainer: Any) -> None:
        """Adds itself to a transformers.Trainer as the first callback."""
        trainer.callback_handler.callbacks.insert(0, self)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self._before, self._since = stats(model)["lanes"], time.monotonic()

    def on_log(self, args: Any, state: Any, control: Any, model: Any = None, logs: dict[str, Any] | None = None, **_: Any) -> None:
        if logs is None or "loss" not in logs or self._before is None:
            return
        now, seconds = stats(model), max(time.monotonic() - self._since, 1e-9)
        added: dict[str, float] = {}
        for lane in ("disk_read", "disk_write", "upload", "download", "update"):
            was, at = self._before[lane], now["lanes"][lane]
            added[f"tierflow/{lane}_gb"] = (at["bytes"] - was["bytes"]) / 1e9
            added[f"tierflow/{lane}_busy"] = (at["busy_seconds"] - was["busy_seconds"]) / seconds
        added["tierflow/skipped_steps"] = now["skipped_steps"]
        logs.update(added)
        if state.log_history:
            state.log_history[-1].update(added)
        self._before, self._since = now["lanes"], time.monotonic()
