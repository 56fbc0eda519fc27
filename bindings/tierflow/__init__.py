"""Tierflow: models larger than memory, trained with their state on NVMe.

    plan = tierflow.plan("path/to/model", budget=tierflow.Budget(device="20GiB", host="64GiB", storage=["/mnt/a"]))
    model = tierflow.load("path/to/model", plan)
    opt = tierflow.optim.AdamW(model.parameters(), lr=1e-5)

Then train as usual, or with tierflow.Trainer(model, opt), which fetches each layer once a step.
"""

import torch as _torch  # before _native: it brings the libraries that _native is linked to

from . import _native, data, losses, optim
from ._native import (
    CancelledError,
    CorruptionError,
    EnvironmentError,
    Error,
    InputError,
    LockedError,
    NumericError,
    OutOfMemoryError,
    StorageError,
    UsageError,
)
from .budget import Budget, Plan
from .checkpoint import load_checkpoint, save_checkpoint
from .durable import resume
from .lora_ga import LoraGA
from .model import close, load, merge, plan, save, stats, wrap
from .session import Session
from .stopping import stop_signals
from .trainer import StepResult, Trainer
from .units import init_empty

if _torch.__version__.split("+")[0] != _native.torch_version.split("+")[0]:
    raise ImportError(f"tierflow was built with torch {_native.torch_version}; this is {_torch.__version__}: build it again (pip install .)")

__all__ = [
    "Budget", "CancelledError", "CorruptionError", "EnvironmentError", "Error", "InputError", "LockedError", "LoraGA", "NumericError", "OutOfMemoryError", "Plan",
    "Session", "StepResult", "StorageError", "Trainer", "UsageError", "close", "data", "init_empty", "load", "load_checkpoint", "losses", "merge", "optim", "plan", "resume", "save",
    "save_checkpoint", "stats", "stop_signals", "wrap",
]  # fmt: skip
__version__ = "0.1.0"
