"""The runtime's own session: a model of the program's families, with the program's layers, losses and bits."""

from __future__ import annotations

import json
import numbers
import os
from collections.abc import Mapping, Sequence
from typing import Any

from . import _native
from .budget import Budget, parse_size
from .data import Rows
from .micro_batches import as_program


def _dictionary(name: str, value: Any) -> dict[str, Any]:
    if value is not None and not isinstance(value, Mapping):
        raise _native.UsageError(f"{name} takes a dictionary, not {value!r}")
    return dict(value or {})


def _plain(value: Any) -> Any:
    """What JSON does not know: a number of numpy's or torch's as Python's; what the runtime will refuse, in words."""
    return value.item() if hasattr(value, "item") and getattr(value, "size", 1) == 1 else repr(value)


class Session:
    """A model in a folder whose state streams, and its steps: what `tierflow train` runs, without its loop. The model is not a torch module; the runtime computes its layers.

        session = tierflow.Session("path/to/model", budget, method="lora", adapters={"rank": 8, "alpha": 16}, loss={"kind": "dpo"}, micro_batch=2, sequence_length=1024)
        for batch in torch.utils.data.DataLoader(pairs, batch_size=2, shuffle=True):
            print(session.step([batch]))
        session.save("out")

    method: "full"; "lora", adapters beside a base that is never written; or "galore", projected gradients (docs/galore.md).
    adapters: a dictionary. For "lora": rank, alpha, dropout, rank_stabilised, dora, targets, exclude, layers, parameters, parameters_alone, saved, init. For "galore":
        rank, update_gap, scale, targets, exclude, layers. targets: names of linear layers, or "all-linear", the default. adapter: a PEFT folder to begin with. base_precision: for "lora", how the base is stored.
    loss: a dictionary, or the kind alone. kind "cross-entropy", "dpo", "simpo" or "orpo", with beta and gamma; or for distillation top (the number of tokens that the teacher named for
        each position), alpha, ce_alpha and temperature. With "lora", the reference of dpo is the model without its adapters, and each step computes it in its own
        visits. Otherwise each micro-batch brings a `reference`: `log_probabilities` of evaluate() before the first step.

    A micro-batch is a dictionary of tensors (or arrays, or lists) [rows, sequence]: `input_ids`, `labels` as in transformers (or `targets`, what each position predicts), and
    `position_ids` if rows are packed. Pairs may also be [pairs, 2, sequence]. A step takes exactly micro_batches of them, each of at most micro_batch sequences (or pairs) of at
    most sequence_length tokens. Rows are padded on the right, with labels of -100 there; an `attention_mask` that says so may be given. A micro-batch with another mask, with
    other keys, without tokens, or of other shapes is refused (UsageError), and the session stays as it was.

    lr_schedule: "constant", or "linear" or "cosine", which fall to 0 after `steps`, the steps of the whole run. warmup: steps in which the learning rate rises to lr.
    These are as in `tierflow train`.

    Budget(durable=True) commits every step, durable=N every N steps. If the process was killed, a session that is made in the same way resumes after the last committed
    step (`steps`). data: any text that names the data, or the tierflow.data.Rows themselves; a state of a run with other data is refused.

    On the CPU device, all tensors that torch has in the process count within the device budget while the session exists.
    """

    def __init__(
        self,
        folder: str | os.PathLike,
        budget: Budget,
        *,
        method: str = "full",
        adapters: Mapping[str, Any] | None = None,
        adapter: str | os.PathLike | None = None,
        base_precision: str = "bf16",
        loss: Mapping[str, Any] | str | None = None,
        precision: str = "fp32-master+adam8",
        micro_batch: int = 1,
        micro_batches: int = 1,
        sequence_length: int = 512,
        clip: float | None = 1.0,
        lr: float = 1e-5,
        lr_schedule: str = "constant",
        warmup: int = 0,
        steps: int = 0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        seed: int = 0,
        train: bool = True,
        top: int = 0,
        data: str | Rows = "",
        device: str = "cpu",
        allow_any_filesystem: bool = False,
    ) -> None:
        if not isinstance(budget, Budget):
            raise _native.UsageError(f"budget is a tierflow.Budget, not {budget!r}")
        if not isinstance(data, (str, Rows)):
            raise _native.UsageError(f"data is a text that names the data, or tierflow.data.Rows, not of type {type(data).__name__}")
        rule = {"kind": loss} if isinstance(loss, str) else _dictionary("loss", loss)
        self._pairs = rule.get("kind", "cross-entropy") != "cross-entropy"
        self._folder, self._whole_path = os.fspath(folder), os.path.abspath(folder)
        run = {
            "by": "tierflow.Session", "data": data.fingerprint if isinstance(data, Rows) else data, "loss": rule, "micro_batch": micro_batch, "micro_batches": micro_batches,
            "sequence_length": sequence_length, "seed": seed, "clip": clip, "betas": betas, "eps": eps, "weight_decay": weight_decay,
        }  # fmt: skip
        self._native = _native.Session(
            self._folder,
            {
                "method": method, "adapters": _dictionary("adapters", adapters), "adapter": os.fspath(adapter or ""), "base_precision": base_precision, "loss": rule,
                "device": device, "device_memory": parse_size(budget.device), "host_memory": parse_size(budget.host), "storage": [os.fspath(path) for path in budget.storage],
                "allow_any_filesystem": allow_any_filesystem, "precision": precision, "clip": clip, "micro_batch": micro_batch * 2 if self._pairs and isinstance(micro_batch, numbers.Integral) else micro_batch,
                "micro_batches": micro_batches, "sequence_length": sequence_length, "seed": seed, "train": train, "top": top, "lr": lr, "lr_schedule": lr_schedule,
                "warmup": warmup, "steps": steps, "betas": betas, "eps": eps, "weight_decay": weight_decay, "commit_every": int(budget.durable) if train else 0,
                "go_back": budget.go_back, "run": json.dumps(run, default=_plain),
            },
        )  # fmt: skip

    def step(self, micro_batches: Sequence[Mapping[str, Any]], lr: float | None = None) -> dict[str, Any]:
        """One optimizer step, with the learning rate of the schedule unless lr is given. Returns `loss`, `lr`, `grad_norm`, `skipped`, `tokens`, `seconds`; for pairs also
        `rewards/...` with TRL's names; with a teacher also `ce_loss` and `kd_loss`; for a mixture with `output_router_logits` also `aux_loss`, which the loss includes, times its coefficient.

        With "galore", the first step of each window first makes its projectors from the gradient of the same micro-batches.
        """
        return self._native.step(as_program(micro_batches), lr)

    def evaluate(self, micro_batches: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Returns `loss`, `perplexity`, `accuracy` and `tokens` over any number of micro-batches, forward only, as `tierflow eval` does. Up to 32 micro-batches share each
        fetch. For pairs also `log_probabilities` of each row, and, if there is a reference, the preference loss and the rewards. With Session(top=N) also `top`: for each
        micro-batch ids and log-probabilities [tokens, N] of the tokens that are most likely to follow each position."""
        return self._native.evaluate(as_program(micro_batches))

    def save(self, folder: str | os.PathLike) -> None:
        """Writes the model as a Hugging Face folder (copy the tokenizer files yourself), or with "lora" its adapters as a PEFT folder. Raises UsageError for the folder that the session
        was made from, which stays as it is."""
        if os.path.exists(folder) and os.path.exists(self._whole_path) and os.path.samefile(folder, self._whole_path):
            raise _native.UsageError(f"{os.fspath(folder)} holds the model that the session was made from: save to another folder")
        bad = self._native.export(os.fspath(folder), self._folder)
        if bad:
            raise _native.NumericError(f"{os.fspath(folder)}: {bad} holds an infinity or a NaN")

    @property
    def steps(self) -> int:
        return self._native.steps

    @property
    def computes_reference(self) -> bool:
        """Whether each step computes the loss's reference in its own visits: the model without its adapters."""
        return self._native.computes_reference

    def bytes_moved(self) -> dict[str, int]:
        """Bytes since the session began, by lane: `disk_read`, `disk_write`, `upload`, `download`, ..."""
        return self._native.lanes()

    def describe(self) -> str:
        """What lives where."""
        return self._native.describe()

    @property
    def notes(self) -> Any:
        """Any JSON value that your loop wants to find again when it resumes. It is committed with the state. None until it is set."""
        return json.loads(self._native.notes or "null")

    @notes.setter
    def notes(self, notes: Any) -> None:
        self._native.notes = json.dumps(notes)

    def commit(self) -> None:
        """Makes the state durable now, instead of with the next step that commits."""
        self._native.commit()

    def close(self, discard: bool = False) -> None:
        """Gives memory and files back. A durable session first commits the last step. discard: it removes its state instead."""
        self._native.close(discard)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
