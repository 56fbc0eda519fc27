"""Budgets and plans: how much memory a model may take, and what a step then costs."""

from __future__ import annotations

import dataclasses
import numbers
import os
import re
from collections.abc import Sequence
from typing import Any

from . import _native

# base_precision for what a folder has in it, and nothing is converted to
UNCONVERTED = {"fp8": "FP8 (tiles of 128 x 128)", "fp8-rows": "FP8 with a scale for each row, matrix or tensor", "mxfp4": "MXFP4"}
_UNITS = {"": 1, "B": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}


_MOST = 2**63  # bytes: no machine has so many


def parse_size(size: int | str) -> int:
    """Bytes of a size: an int, or text such as "20GiB", "512 MiB", "1.5TB". Raises UsageError for anything else."""
    if isinstance(size, numbers.Integral) and not isinstance(size, bool) and 0 <= size < _MOST:
        return int(size)
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?I?)B?\s*", size.upper()) if isinstance(size, str) else None
    if match is not None and match[2] in _UNITS and (found := float(match[1]) * _UNITS[match[2]]) < _MOST:
        return int(found)
    raise _native.UsageError(f"{size!r} is no size: write an int of bytes, 0 or more, or text such as '20GiB'")


def _folders_of(storage: Any) -> list[str]:
    """The folders of Budget(storage=...). Raises UsageError if one is no folder, or is named twice."""
    try:
        folders = [os.fspath(folder) for folder in ([storage] if isinstance(storage, (str, os.PathLike)) else storage)]
    except TypeError as error:
        raise _native.UsageError(f"Budget(storage={storage!r}): storage is a list of folders") from error
    for folder in folders:
        if not isinstance(folder, str) or not folder:
            raise _native.UsageError(f"Budget(storage={folders!r}): {folder!r} names no folder")
        if os.path.exists(folder) and not os.path.isdir(folder):
            raise _native.UsageError(f"{folder}: Budget(storage=[...]) names folders, and this is a file")
    if len({os.path.realpath(folder) for folder in folders}) < len(folders):
        raise _native.UsageError(f"Budget(storage={folders!r}) names a folder twice: name one for each drive")
    return folders


def human(size: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def memory_available() -> int:
    """Bytes of RAM that are free, or could be freed without swapping."""
    with open("/proc/meminfo", encoding="ascii") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


@dataclasses.dataclass
class Budget:
    """How much of each tier Tierflow may take.

    device: bytes of device memory, or text such as "20GiB".
    activations: the share of `device` that is left to the model's own tensors. It is not enforced in your process: stats() says what was measured, and there is a
        warning if it was more.
    host: bytes of RAM for streaming buffers and for state that stays there.
    storage: folders for the state, one for each drive. Without any, the whole state must fit `host`. Its files have no names and disappear with the process.
    durable: True: the files have names, and the state is committed after every optimizer step; a number N: after every N steps. The same script then resumes after
        the process was killed, see tierflow.resume(). Storage holds two copies of what is trained.
    go_back: if the drive cannot read the newest of these two copies, resume from the one before. Without it that is an error, because the drive may be back soon.
    Raises UsageError, which names the value that cannot be.
    """

    device: int | str
    host: int | str
    storage: Sequence[str | os.PathLike] = ()
    activations: float = 0.5
    durable: bool | int = False
    go_back: bool = False

    def __post_init__(self) -> None:
        self.storage = _folders_of(self.storage)
        self.device = parse_size(self.device)
        self.host = parse_size(self.host)
        if not isinstance(self.activations, numbers.Real) or not 0 <= self.activations < 1:
            raise _native.UsageError("Budget(activations=...) is a share of the device budget, at least 0 and less than 1")
        if not isinstance(self.durable, numbers.Integral) or self.durable < 0 or (self.durable and not self.storage):
            raise _native.UsageError("Budget(durable=...) is True or a number of steps, and takes storage=[...]: folders in which the state survives")

    @classmethod
    def auto(cls, storage: Sequence[str | os.PathLike] = ()) -> Budget:
        """A third of the free RAM for the (CPU) device, and half for the host."""
        free = memory_available()
        return cls(device=free // 3, host=free // 2, storage=storage)


@dataclasses.dataclass
class Plan:
    """How a model will be streamed. `print(plan)` says what it costs.

    precision: "fp32-master+adam8" (6.03 bytes a parameter), "fp32-master+adam32" (12, the reference), "bf16-sr+adam8" (4.03).
    blocks: names of module classes whose modules take turns, instead of the elements of `ModuleList`s.
    trainable: False keeps a frozen base without optimizer state, which is never written again. For LoRA.
    base_precision: with trainable=False, how the weights of linear layers and experts are stored and streamed. "bf16", "int8", "nf4" and "nf4-double" take 2, 1.02,
        0.56 and 0.52 bytes a weight. "fp8", "fp8-rows" and "mxfp4" (1, 1, 0.53) keep the weights that the folder has in FP8 with scales for tiles of 128 x 128 or
        for rows, or in MXFP4. The weights are dense bf16 while their module runs.
    device: "cpu" or "cuda".
    micro_batches: in a step, for the printed costs.
    seed: of stochastic rounding. allow_any_filesystem: accept storage on any file system, and without O_DIRECT.
    """

    budget: Budget
    precision: str = "fp32-master+adam8"
    blocks: Sequence[str] = ()
    trainable: bool = True
    base_precision: str = "bf16"
    device: str = "cpu"
    micro_batches: int = 1
    seed: int = 0
    allow_any_filesystem: bool = False
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)
    estimate: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.budget, Budget):
            raise _native.UsageError(f"budget is a tierflow.Budget, not {self.budget!r}")
        if not isinstance(self.micro_batches, numbers.Integral) or not 1 <= self.micro_batches < 2**31:
            raise _native.UsageError(f"micro_batches is an integer, at least 1, not {self.micro_batches!r}")
        if self.device not in ("cpu", "cuda"):
            raise _native.UsageError(f"device is 'cpu' or 'cuda', not {self.device!r}")
        if self.base_precision not in ("bf16", *UNCONVERTED, "int8", "nf4", "nf4-double"):
            raise _native.UsageError(f"base_precision is 'bf16', 'fp8', 'fp8-rows', 'mxfp4', 'int8', 'nf4' or 'nf4-double', not {self.base_precision!r}")

    def options(self) -> dict[str, Any]:
        budget = self.budget
        return {
            "device": self.device,
            "device_memory": budget.device,
            "workspace_share": budget.activations,
            "host_memory": budget.host,
            "storage": budget.storage,
            "durable": bool(budget.durable),
            "go_back": budget.go_back,
            "precision": self.precision,
            "seed": self.seed,
            "allow_buffered": self.allow_any_filesystem,
            "allow_any_filesystem": self.allow_any_filesystem,
            **self.extra,
        }

    def __str__(self) -> str:
        text = [f"Tierflow plan: {self.precision}, device {human(parse_size(self.budget.device))}, host {human(parse_size(self.budget.host))}"]
        if self.estimate is None:
            return text[0]
        e, passes = self.estimate, self.micro_batches
        text.append(
            f"  {e['parameters']:,} parameters, {e['trainable_parameters']:,} of them trained: "
            f"{human(e['state_bytes'])} of state, {human(e['gradient_bytes'])} of gradients"
        )
        text.append(
            f"  device: {human(e['device_bytes'])} of slots; host: {human(e['host_bytes'])}, in it {e['hi_resident']:.0%} of the weights, "
            f"{e['state_resident']:.0%} of the optimizer state; storage: {human(e['storage_bytes'])}"
        )
        text.append(
            f"  activations: {human(parse_size(self.budget.device) * self.budget.activations)} of the device budget are left to the model's own tensors; "
            "measured as it runs (tierflow.stats), not enforced"
        )
        text.append(
            f"  a step of {passes} micro-batch{'es' * (passes > 1)}, storage read + written, and copied to and from the device:"
        )
        for name, key in (("tierflow.Trainer", "layer_major"), ("your own loop", "loop")):
            text.append(
                f"    {name:17} {human(e[key + '_read'])} + {human(e[key + '_write'])}, {human(e[key + '_link'])} on the link"
            )
        if passes > 1 and e["trainable_parameters"]:
            text.append(
                f"  (your own loop passes the weights {passes} times, and keeps gradient sums in fp32: "
                f"{human(4 * e['trainable_parameters'])}, read and written each micro-batch)"
            )
        return "\n".join(text)
