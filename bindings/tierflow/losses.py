"""Losses for tierflow.Trainer: for pairs of answers (DPO, SimPO, ORPO), and for a teacher's most likely tokens (Distillation).

Each is called with (model, micro_batch), as Trainer's `loss`, and works with any causal model of transformers, streamed or not. Sums over tokens are fp32.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional

from . import _native
from .data import IGNORED

NOT_OF_THE_MODEL = ("labels", "reference", "teacher_ids", "teacher_log_probabilities")


def loss_named(name: str) -> PairLoss:
    """The loss of pairs that is called so, with the defaults of its class."""
    named: dict[str, type[PairLoss]] = {"dpo": DPO, "simpo": SimPO, "orpo": ORPO}
    if name not in named:
        raise _native.UsageError(f'no loss is named "{name}"; there are {", ".join(named)}')
    return named[name]()


def switches(model: nn.Module) -> bool:
    """Whether all that a PEFT model adds lies within its layers, so that each can compute with and without it in one visit. What modules_to_save names has another
    module in its place, and a prompt other inputs."""
    prompts = bool(getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False))
    return not prompts and not any(base.__name__ == "ModulesToSaveWrapper" for module in model.modules() for base in type(module).__mro__)


def as_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Pairs [n, 2, tokens] as rows 2k, chosen, and 2k + 1, rejected."""
    return tensor.flatten(0, 1) if tensor.dim() == 3 else tensor


def _logits(model: nn.Module, batch: Mapping[str, Any]) -> torch.Tensor:
    given = {name: as_rows(value) if isinstance(value, torch.Tensor) else value for name, value in batch.items() if name not in NOT_OF_THE_MODEL}
    return model(**given).logits


def what_follows(labels: torch.Tensor) -> torch.Tensor:
    """What each position predicts."""
    return functional.pad(labels[:, 1:], (0, 1), value=IGNORED)


def _token_losses(logits: torch.Tensor, predicted: torch.Tensor) -> torch.Tensor:
    """-log p of each label [rows, tokens], 0 where none counts. One row's logits are fp32 at a time."""
    return torch.stack([functional.cross_entropy(row.float(), label, reduction="none", ignore_index=IGNORED) for row, label in zip(logits, predicted, strict=True)])


def log_probabilities(model: nn.Module, batch: Mapping[str, Any]) -> torch.Tensor:
    """The log-probability of each pair's chosen and rejected answer [pairs, 2], the sum over the tokens whose labels count. fp32."""
    predicted = what_follows(as_rows(batch["labels"]))
    return -_token_losses(_logits(model, batch), predicted).sum(1).view(-1, 2)


@dataclasses.dataclass
class PairLoss:
    """The common part of the losses for pairs. A micro-batch has `input_ids` and `labels` [pairs, 2, tokens], the chosen and the rejected answer, as a DataLoader
    makes them of tierflow.data.Pairs; or [2 * pairs, tokens], each chosen row followed by its rejected one. Labels count only in the answers."""

    beta: float = 0.1

    def __post_init__(self) -> None:
        if not self.beta > 0:
            raise _native.UsageError(f"beta is above 0, not {self.beta}")
        self.rewards = torch.zeros(0, 2)  # [pairs, 2] of the last micro-batch

    def __call__(self, model: nn.Module, batch: Mapping[str, Any]) -> torch.Tensor:
        labels = as_rows(batch["labels"])
        predicted = what_follows(labels)
        counts = predicted != IGNORED
        if labels.shape[0] % 2 != 0 or not bool(counts.any(1).all()):
            raise _native.UsageError("a micro-batch of pairs has two rows a pair, and each row a label that counts")
        taken = self.taken(as_rows(batch["input_ids"]), predicted)
        losses = _token_losses(_logits(model, batch), taken)
        sums = -(losses * counts).sum(1).view(-1, 2)
        each = self.of_pairs(sums, counts.sum(1).view(-1, 2), batch)
        return each.mean() + self.beside(losses, taken)

    def taken(self, ids: torch.Tensor, predicted: torch.Tensor) -> torch.Tensor:
        return predicted

    def beside(self, losses: torch.Tensor, taken: torch.Tensor) -> torch.Tensor | float:
        return 0.0

    def of_pairs(self, sums: torch.Tensor, counts: torch.Tensor, batch: Mapping[str, Any]) -> torch.Tensor:
        raise NotImplementedError


@dataclasses.dataclass
class DPO(PairLoss):
    """-log sigmoid(beta * ((log p(c) - log p0(c)) - (log p(r) - log p0(r)))): Rafailov et al., 2023; TRL's DPOTrainer.

    p0 is the reference. A micro-batch may bring it: `reference` [pairs, 2], which log_probabilities() gave before the model's first step. If it does not, and the model
    is a PEFT model, tierflow.Trainer computes it with the adapters switched off, in the visits of the step itself. The base is then read no more often, unless the model
    has modules_to_save or a prompt: these need a pass of their own ahead of each step.
    """

    def of_pairs(self, sums: torch.Tensor, counts: torch.Tensor, batch: Mapping[str, Any]) -> torch.Tensor:
        if "reference" not in batch:
            raise _native.UsageError("DPO: a micro-batch needs its reference: tierflow.Trainer adds it for a PEFT model, else add what tierflow.losses.log_probabilities() gives before the first step")
        rewards = self.beta * (sums - cast(torch.Tensor, batch["reference"]).view(-1, 2).to(sums))
        self.rewards = rewards.detach()
        return -functional.logsigmoid(rewards[:, 0] - rewards[:, 1])

    def computes_beside(self, model: nn.Module, batch: Mapping[str, Any]) -> tuple[str, Callable[[nn.Module, Any], Any]] | None:
        """What the Trainer adds to a micro-batch under this name: what the function gives of the model without its adapters."""
        return ("reference", log_probabilities) if "reference" not in batch and hasattr(model, "disable_adapter") else None


@dataclasses.dataclass
class SimPO(PairLoss):
    """-log sigmoid(beta * (log p(c) / |c| - log p(r) / |r|) - gamma): Meng et al., 2024; TRL's CPOTrainer with loss_type="simpo" and cpo_alpha=0."""

    gamma: float = 0.5

    def of_pairs(self, sums: torch.Tensor, counts: torch.Tensor, batch: Mapping[str, Any]) -> torch.Tensor:
        rewards = self.beta * sums / counts
        self.rewards = rewards.detach()
        return -functional.logsigmoid(rewards[:, 0] - rewards[:, 1] - self.gamma)


@dataclasses.dataclass
class ORPO(PairLoss):
    """-beta * log sigmoid(log odds(c) - log odds(r)), plus the mean cross-entropy of the chosen rows with their prompts: Hong et al., 2024; TRL's ORPOTrainer.

    That mean is over each micro-batch's tokens, as in TRL; in the program it is over the step's.
    """

    def taken(self, ids: torch.Tensor, predicted: torch.Tensor) -> torch.Tensor:
        whole = predicted.clone()
        for row in range(0, len(ids), 2):
            end = int(whole[row].ne(IGNORED).nonzero().max()) + 1
            whole[row, :end] = ids[row, 1 : end + 1]
        return whole

    def beside(self, losses: torch.Tensor, taken: torch.Tensor) -> torch.Tensor:
        return losses[::2].sum() / (taken[::2] != IGNORED).sum()

    def of_pairs(self, sums: torch.Tensor, counts: torch.Tensor, batch: Mapping[str, Any]) -> torch.Tensor:
        means = sums / counts
        self.rewards = self.beta * means.detach()
        odds = means.double() - torch.log(-torch.expm1(means.double()))
        return (-self.beta * functional.logsigmoid(odds[:, 0] - odds[:, 1])).float()


@dataclasses.dataclass
class Distillation:
    """ce_alpha * CE + alpha * KD for each position, with T = temperature: the formula of docs/distillation.md and of `tierflow train --distill`.

    A micro-batch has `labels`, and `teacher_ids` and `teacher_log_probabilities` [rows, tokens, K]: the tokens that the teacher found most likely to follow each
    position, as tierflow.data.Rows(teacher=...) gives them. The loss is the mean over the micro-batch's positions whose label counts.
    """

    alpha: float = 0.9
    ce_alpha: float = 0.1
    temperature: float = 1.0

    def __call__(self, model: nn.Module, batch: Mapping[str, Any]) -> torch.Tensor:
        if "teacher_ids" not in batch:
            raise _native.UsageError("Distillation: a micro-batch has no teacher_ids: open its rows with tierflow.data.Rows(teacher=FILE)")
        logits, predicted, t = _logits(model, batch), what_follows(batch["labels"]), self.temperature
        ids, log_p = batch["teacher_ids"].long(), batch["teacher_log_probabilities"].float()
        total = torch.zeros((), device=logits.device)
        for row, label, of, log in zip(logits, predicted, ids, log_p, strict=True):  # one row's logits are fp32 at a time
            counts = label != IGNORED
            wide, q = row[counts].float(), torch.softmax(log[counts] / t, -1)
            ce = functional.cross_entropy(wide, label[counts], reduction="sum")
            student = wide.gather(1, of[counts]) / t - torch.logsumexp(wide / t, -1, keepdim=True)
            kd = (torch.xlogy(q, q) - q * student).sum() * (t * t)
            total = total + self.ce_alpha * ce + self.alpha * kd
        return total / (predicted != IGNORED).sum().clamp(min=1)
