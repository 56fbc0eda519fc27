"""The optimizer of streamed models."""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch.optim.adamw import adamw as update_ordinary
from torch.optim.optimizer import register_optimizer_step_pre_hook

from . import _native
from .engine import Engine
from .parameter import StreamedParameter, is_replaced

log = logging.getLogger("tierflow")


_made: weakref.WeakSet[AdamW] = weakref.WeakSet()


def _refuse_others(optimizer: Any, args: Any, kwargs: Any) -> None:
    """Before the step of any optimizer: one that is not made for streamed parameters would keep its state in RAM, in bf16; one of parameters that the model had before
    tierflow.wrap() would train nothing."""
    if any(is_replaced(p) for group in optimizer.param_groups for p in group["params"]):
        raise _native.UsageError("the optimizer was made before tierflow.wrap(), and has parameters that the model no longer has: make it from model.parameters() after wrap()")
    if isinstance(getattr(optimizer, "optimizer", optimizer), AdamW):  # accelerate's wrapper has it inside
        return
    if any(isinstance(p, StreamedParameter) and p.requires_grad for group in optimizer.param_groups for p in group["params"]):
        raise _native.UsageError(
            f"{type(optimizer).__module__}.{type(optimizer).__name__} cannot train streamed parameters: use tierflow.optim.AdamW(model.parameters(), lr=...); for a "
            "transformers or trl trainer, Trainer(..., optimizers=(tierflow.optim.AdamW(model.parameters(), lr=...), None))"
        )


register_optimizer_step_pre_hook(_refuse_others)


def skipped_steps(module: torch.nn.Module, engine: Engine) -> int:
    """Of the optimizers of a streamed module: also of those that train none of what streams, such as a PEFT model's."""
    own = {id(p) for p in module.parameters()}
    return engine.skipped + sum(opt.skipped for opt in _made if not opt.engines and any(id(p) in own for group in opt.param_groups for p in group["params"]))


def _check_group(group: dict[str, Any]) -> None:
    """Raises UsageError that names the value which AdamW cannot take."""
    for name in ("lr", "eps", "weight_decay"):
        if not 0 <= _number(group[name]) < math.inf:
            raise _native.UsageError(f"AdamW({name}={group[name]!r}): {name} is a number, at least 0")
    betas = group["betas"]
    if not isinstance(betas, (tuple, list)) or len(betas) != 2 or not all(0 <= _number(beta) < 1 for beta in betas):
        raise _native.UsageError(f"AdamW(betas={betas!r}): betas are two numbers, each at least 0 and less than 1")


def check_clip(clip: Any) -> None:
    """Raises UsageError if gradients cannot be clipped to this norm."""
    if clip is not None and not _number(clip) > 0:
        raise _native.UsageError(f"clip={clip!r}: clip is a number above 0, or None")


def _number(value: Any) -> float:
    """Of Python, numpy or torch; NaN for what is none."""
    try:
        return math.nan if isinstance(value, (str, bytes)) else float(value)
    except (TypeError, ValueError, RuntimeError):
        return math.nan


class AdamW(torch.optim.Optimizer):
    """AdamW (decoupled weight decay) over streamed parameters, and over ordinary ones such as LoRA adapters.

    Moments of streamed parameters live where the plan puts them. step() does not wait for the updates: each runs before its module's next forward(). If a gradient is
    not finite, the whole step is skipped. params, lr, betas, eps and weight_decay mean what they mean in torch.optim.AdamW, and may differ by parameter group. As in
    torch, weight_decay applies to every parameter of its group. Two defaults differ: lr is 1e-5 (torch: 1e-3), weight_decay is 0 (torch: 0.01). Schedulers work as usual.

    state_dict() has groups, step counts and the state of ordinary parameters. It does not have the moments of streamed parameters; tierflow.save_checkpoint() writes them.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-5,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        _made.add(self)
        self.journal: Any = None  # what commits the steps of a durable model
        self.skipped = 0  # steps
        self.moments_follow = False  # whether load_checkpoint() comes after load_state_dict()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch. Raises UsageError if the group, with the defaults for what it leaves out, has a value that AdamW cannot take; it is not added then."""
        _check_group({**self.defaults, **param_group})
        super().add_param_group(param_group)

    def trains(self, engine: Engine) -> set[tuple[int, int]]:
        """The streamed tensors of a model that this optimizer has."""
        params = (p for group in self.param_groups for p in group["params"])
        return {(p.unit, p.index) for p in params if isinstance(p, StreamedParameter) and p.engine is engine}

    def _others_train(self, engine: Engine) -> set[tuple[int, int]]:
        return {key for other in _made if other is not self for key in other.trains(engine)}

    @property
    def engines(self) -> list[Engine]:
        """The models whose parameters this optimizer has."""
        found: dict[int, Engine] = {}
        for group in self.param_groups:
            for p in group["params"]:
                if isinstance(p, StreamedParameter):
                    found[id(p.engine)] = cast(Engine, p.engine)
        return list(found.values())

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Turns gradients into updates. closure: computes the loss anew, as in torch. For a durable model, first completes the commit of the step before."""
        if self.journal is None and any(engine.durable for engine in self.engines):
            raise _native.UsageError("the model is durable: call done = tierflow.resume(model, opt) with its one optimizer before the first step")
        if self.journal is not None:
            self.journal.begin_step()
        loss = self._step(closure)
        if self.journal is not None:
            self.journal.end_step()
        return loss

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        how: dict[Engine, dict[tuple[int, int], dict[str, Any]]] = {engine: {} for engine in self.engines}
        for group in self.param_groups:
            for p in group["params"]:
                if isinstance(p, StreamedParameter) and (engine := cast(Engine, p.engine)).native.touched(p.unit, p.index):
                    how[engine][(p.unit, p.index)] = {
                        "lr": float(group["lr"]),
                        "beta1": float(group["betas"][0]),
                        "beta2": float(group["betas"][1]),
                        "eps": float(group["eps"]),
                        "weight_decay": float(group["weight_decay"]),
                        "step": self._steps_of(engine, p) + 1,
                    }
        theirs = {engine: (self.trains(engine), self._others_train(engine)) for engine in how}
        finite = self._ordinary_are_finite() and all(engine.finite(*theirs[engine]) for engine in how)
        for engine, entries in how.items():
            engine.step(entries, *theirs[engine], finite)
        if not finite:
            self.skipped += 1
            if self.skipped == 1:
                log.warning("a gradient is not finite: the step is skipped whole (said once)")
            return loss
        for group in self.param_groups:
            for p in group["params"]:
                if isinstance(p, StreamedParameter):
                    entry = how[cast(Engine, p.engine)].get((p.unit, p.index))
                    if entry is not None:
                        self.state[p]["step"] = entry["step"]
                        self._own_moments(p)
            if self.journal is not None:
                self.journal.take_gradients()
            self._step_ordinary(group)
        return loss

    def _steps_of(self, engine: Engine, p: StreamedParameter) -> int:
        """Those that its moments have had of this optimizer."""
        steps = int(self.state[p].get("step", 0))
        owner = engine.moments.get((p.unit, p.index))
        if steps and owner is not None and owner[0]() is not self:
            raise _native.UsageError(
                f"another optimizer has trained {p.label} since this one did, and its moments have one place: go on with that one, or make a new one, whose moments begin at zero"
            )
        return steps

    def _own_moments(self, p: StreamedParameter) -> None:
        engine = cast(Engine, p.engine)
        engine.moments[(p.unit, p.index)] = (weakref.ref(self), int(self.state[p]["step"]))

    def own_moments(self) -> None:
        """Those of all its streamed parameters are this optimizer's, with the counts of its state."""
        for group in self.param_groups:
            for p in group["params"]:
                if isinstance(p, StreamedParameter) and self.state.get(p):
                    self._own_moments(p)

    def _ordinary_are_finite(self) -> bool:
        grads = [p.grad for group in self.param_groups for p in group["params"] if not isinstance(p, StreamedParameter) and p.grad is not None]
        found = [grad.isfinite().all() for grad in grads]
        return not found or bool(torch.stack([each.to(found[0].device) for each in found]).all())  # one wait for the device

    def _step_ordinary(self, group: dict[str, Any]) -> None:
        params = [p for p in group["params"] if not isinstance(p, StreamedParameter) and p.grad is not None]
        if not params:
            return
        for p in params:
            if not self.state[p]:
                self.state[p].update(step=torch.tensor(0.0), exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
        states = [self.state[p] for p in params]
        update_ordinary(
            params,
            [p.grad for p in params],
            [s["exp_avg"] for s in states],
            [s["exp_avg_sq"] for s in states],
            [],
            [s["step"] for s in states],
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=float(group["lr"]),
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Groups and step counts of another run's state_dict()."""
        before = {p: dict(self.state[p]) for group in self.param_groups for p in group["params"] if isinstance(p, StreamedParameter) and p in self.state}
        super().load_state_dict(state_dict)
        anew = False
        for group in self.param_groups:
            for p in group["params"]:
                if not isinstance(p, StreamedParameter) or (steps := self.state[p].get("step", 0)) == before.get(p, {}).get("step", 0):
                    continue
                _, had = cast(Engine, p.engine).moments.get((p.unit, p.index), (None, 0))
                if steps == had:  # of an optimizer whose place this one takes
                    self._own_moments(p)
                    continue
                self.state[p] = before.get(p, {})  # the count goes with the moments, which stay
                anew = True
        if anew and not self.moments_follow:
            log.warning(
                "the optimizer's moments are not part of a state_dict: those of streamed parameters, and their step counts, stay as they are here; "
                "tierflow.load_checkpoint() restores both (under transformers.Trainer, TierflowCallback().attach(trainer) does)"
            )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops all gradients; the streamed ones whatever set_to_none says."""
        for engine in self.engines:
            engine.zero_grad(self.trains(engine), self._others_train(engine))
        for group in self.param_groups:
            for p in group["params"]:
                if not isinstance(p, StreamedParameter) and p.grad is not None:
                    p.grad = None if set_to_none else p.grad.detach().zero_()
