"""The runtime's own session: a model of the program's families, with the program's layers, losses and bits."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from . import _native
from .budget import Budget, parse_size
from .data import Rows
from .losses import as_rows, what_follows


class Session:
    """A model in a folder whose state streams, and its steps: what `tierflow train` runs, without its loop. The model is not a module: its layers are the runtime's.

        session = tierflow.Session("path/to/model", budget, method="lora", adapters={"rank": 8, "alpha": 16}, loss={"kind": "dpo"}, micro_batch=2, sequence_length=1024)
        for batch in torch.utils.data.DataLoader(pairs, batch_size=2, shuffle=True):
            print(session.step([batch]))
        session.save("out")

    method: "full"; "lora", adapters beside a base that is never written; or "galore", projected gradients (docs/galore.md). adapters: of "lora" rank, alpha,
    dropout, rank_stabilised, dora, targets, exclude, layers, parameters, parameters_alone, saved, init; of "galore" rank, update_gap, scale, targets, exclude, layers.
    adapter: PEFT's folder to begin with. base_precision: of "lora". loss: kind "cross-entropy", "dpo", "simpo" or "orpo", with beta and gamma; or with top
    (tokens that a teacher named), alpha, ce_alpha and temperature. With "lora", the reference of dpo is the model without its adapters: each step computes it
    while a layer is there. Else each micro-batch brings a `reference`: `log_probabilities` of evaluate() before the first step.

    A micro-batch is a dictionary of tensors [rows, sequence]: `input_ids`, `labels` as transformers has them (or `targets`, what each position predicts),
    `position_ids` where rows are packed; of pairs also [pairs, 2, sequence]. A step takes exactly micro_batches of them, each of at most micro_batch sequences
    (of pairs: pairs) of at most sequence_length tokens.

    lr_schedule: "constant", or "linear" or "cosine" to 0 after `steps`, the steps of the whole run; warmup: steps in which the learning rate rises to lr. As
    `tierflow train` has them.

    Budget(durable=True) commits every step, durable=N every N: a session that is made in the same way, after this process was killed, goes on behind the last
    step that was committed (`steps`). data: any text that names the data, or the tierflow.data.Rows themselves: a run that was begun with others is refused.

    On the CPU device, torch's tensors of the whole process count within the device budget while the session is there.
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
        loss: Mapping[str, Any] | None = None,
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
        rule = dict(loss or {})
        self._pairs = rule.get("kind", "cross-entropy") != "cross-entropy"
        self._folder = os.fspath(folder)
        run = {
            "by": "tierflow.Session", "data": data.fingerprint if isinstance(data, Rows) else data, "loss": rule, "micro_batch": micro_batch, "micro_batches": micro_batches,
            "sequence_length": sequence_length, "seed": seed, "clip": clip, "betas": list(betas), "eps": eps, "weight_decay": weight_decay,
        }  # fmt: skip
        self._native = _native.Session(
            self._folder,
            {
                "method": method, "adapters": dict(adapters or {}), "adapter": os.fspath(adapter or ""), "base_precision": base_precision, "loss": rule,
                "device": device, "device_memory": parse_size(budget.device), "host_memory": parse_size(budget.host), "storage": [os.fspath(path) for path in budget.storage],
                "allow_any_filesystem": allow_any_filesystem, "precision": precision, "clip": clip, "micro_batch": micro_batch * (2 if self._pairs else 1),
                "micro_batches": micro_batches, "sequence_length": sequence_length, "seed": seed, "train": train, "top": top, "lr": lr, "lr_schedule": lr_schedule,
                "warmup": warmup, "steps": steps, "betas": betas, "eps": eps, "weight_decay": weight_decay, "commit_every": int(budget.durable) if train else 0,
                "go_back": budget.go_back, "run": json.dumps(run),
            },
        )  # fmt: skip

    @staticmethod
    def _as_program(batch: Mapping[str, Any]) -> dict[str, Any]:
        given = {name: as_rows(value) if isinstance(value, torch.Tensor) and name in ("input_ids", "labels", "attention_mask") else value for name, value in batch.items()}
        if "labels" in given and "targets" not in given:
            given["targets"] = what_follows(given["labels"])
        return {name: value for name, value in given.items() if name != "labels"}

    def step(self, micro_batches: Sequence[Mapping[str, Any]], lr: float | None = None) -> dict[str, Any]:
        """One optimizer step, with the learning rate of the schedule unless lr is given. `loss`, `lr`, `grad_norm`, `skipped`, `tokens`, `seconds`; of pairs `rewards/...` with TRL's names; with a teacher `ce_loss` and `kd_loss`; of a mixture with `output_router_logits` `aux_loss`, which is in the loss times its coefficient.

        With "galore", the first step of each window first makes its projections of the same micro-batches' gradient.
        """
        return self._native.step([self._as_program(batch) for batch in micro_batches], lr)

    def evaluate(self, micro_batches: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """`loss`, `perplexity`, `accuracy` and `tokens` over any number of micro-batches, forward only: as `tierflow eval` has them. Up to 32 share each fetch. Of pairs `log_probabilities` of each row, and, where there is a reference, the loss
        of pairs and the rewards. With top=: `top`, for each micro-batch ids and log-probabilities [tokens, top] of what is likeliest to follow each position."""
        return self._native.evaluate([self._as_program(batch) for batch in micro_batches])

    def save(self, folder: str | os.PathLike) -> None:
        """The model as a Hugging Face folder (tokenizer files are yours to copy), or with "lora" its adapters as PEFT's."""
        bad = self._native.export(os.fspath(folder), self._folder)
        if bad:
            raise _native.NumericError(f"{os.fspath(folder)}: {bad} holds an infinity or a NaN")

    @property
    def steps(self) -> int:
        return self._native.steps

    @property
    def computes_reference(self) -> bool:
        """Whether the loss takes the model without its adapters as its reference, computed in the visits of each step."""
        return self._native.computes_reference

    def bytes_moved(self) -> dict[str, int]:
        """Since it began, by lane: `disk_read`, `disk_write`, `upload`, `download`, ..."""
        return self._native.lanes()

    def describe(self) -> str:
        """What lives where."""
        return self._native.describe()

    @property
    def notes(self) -> Any:
        """What your loop wants to find again when it goes on, anything that JSON holds: it is committed with the state. None until it is set."""
        return json.loads(self._native.notes or "null")

    @notes.setter
    def notes(self, notes: Any) -> None:
        self._native.notes = json.dumps(notes)

    def commit(self) -> None:
        """Makes the state durable now, and not with the next step that commits."""
        self._native.commit()

    def close(self, discard: bool = False) -> None:
        """Gives memory and files back. A durable session first commits the last step, unless discard: then its state goes."""
        self._native.close(discard)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
