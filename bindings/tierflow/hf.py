"""For transformers.Trainer, trl.SFTTrainer and accelerate, which take a streamed model as it is. To the trainers pass
`optimizers=(tierflow.optim.AdamW(...), None)`; to accelerate.Accelerator.prepare() a tierflow.optim.AdamW.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint

from . import _native
from .attention import register
from .checkpoint import load_checkpoint, save_checkpoint
from .model import stats
from .optim import AdamW
from .parameter import StreamedParameter

register()


class TierflowCallback(TrainerCallback):
    """Lets a Trainer resume from its checkpoints bit for bit, and adds to its logs for each lane the GB that moved since the last log and the share of time in which the
    lane was busy.

    Use TierflowCallback().attach(trainer), not callbacks=[...], with which training raises UsageError: the callback needs the trainer, and must come before the callbacks
    that write logs elsewhere (TensorBoard, W&B). Each checkpoint folder then has a folder `tierflow` (tierflow.save_checkpoint()), which train(resume_from_checkpoint=...) loads again.
    """

    def __init__(self) -> None:
        self._before: dict[str, Any] | None = None
        self._since = 0.0
        self._trainer: Any = None
        self._resume: Path | None = None

    def attach(self, trainer: Any) -> None:
        """Adds itself to a transformers.Trainer as the first callback."""
        self._trainer, train = trainer, trainer.train
        trainer.callback_handler.callbacks.insert(0, self)

        def resuming(resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
            last = get_last_checkpoint(trainer.args.output_dir) if resume_from_checkpoint is True else resume_from_checkpoint
            self._resume = Path(last) if last else None
            opt = self._optimizer()
            if not isinstance(opt, AdamW) or self._resume is None:
                return train(resume_from_checkpoint, *args, **kwargs)
            opt.moments_follow = True  # on_train_begin() restores them
            try:
                return train(resume_from_checkpoint, *args, **kwargs)
            finally:
                opt.moments_follow = False

        trainer.train = resuming

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if not args.save_only_model:
            folder = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
            save_checkpoint(self._trainer.model, self._optimizer(), folder / "tierflow")

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if self._trainer is None:
            raise _native.UsageError("a TierflowCallback needs the trainer, which callbacks=[...] and add_callback() do not give it: leave it out there, and call TierflowCallback().attach(trainer)")
        if self._resume is not None:
            load_checkpoint(self._trainer.model, self._optimizer(), self._resume / "tierflow")
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

    def _optimizer(self) -> Any:
        optimizer = self._trainer.optimizer
        return getattr(optimizer, "optimizer", optimizer)  # accelerate's wrapper has ours inside


def attach_accelerator(accelerator: Any, opt: AdamW) -> None:
    """Lets accelerator.save_state() and load_state() stream the model that `opt` trains, to and from a folder `tierflow` in their folder, so that a loop resumes bit for bit."""

    def is_streamed(model: Any) -> bool:
        return any(isinstance(p, StreamedParameter) for p in model.parameters())

    def save(models: list[Any], weights: list[Any], folder: str) -> None:
        for position in reversed(range(len(models))):
            if is_streamed(models[position]):
                save_checkpoint(models[position], opt, Path(folder) / "tierflow")
                weights.pop(position)  # nothing of it is left for accelerate to write

    def load(models: list[Any], folder: str) -> None:
        for position in reversed(range(len(models))):
            if is_streamed(models[position]):
                load_checkpoint(models.pop(position), opt, Path(folder) / "tierflow")

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
