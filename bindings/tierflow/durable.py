"""Runs that survive their process: what a durable model commits, and how the same script goes on with it."""

from __future__ import annotations

import copy
import json
import logging
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from safetensors.torch import load as load_tensors
from safetensors.torch import save as as_safetensors
from torch import nn
from torch.amp import GradScaler
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from . import _native
from .checkpoint import groups_of, put_back, state_of
from .data import Rows
from .functions import digest_of
from .model import save
from .model_requests import ModelRequests
from .optim import AdamW
from .parameter import NO_SCALER
from .result import result_of
from .saving import engine_of, uncompiled

log = logging.getLogger("tierflow")

# What a script may give anew: entries of the optimizer's groups, which schedulers of torch begin from.
_RATES = ("lr", "initial_lr", "max_lr", "min_lr", "swa_lr", "base_momentum", "max_momentum")


def resume(model: nn.Module, opt: AdamW, *schedules: LRScheduler | GradScaler, data: str | Rows = "") -> int:
    """Resumes a durable model, and returns how many optimizer steps (calls of opt.step()) its state has had: 0 for a new one.

    Call it once, after model, optimizer and schedulers are made. load() or wrap() has already restored streamed weights and moments; there a state of another model, one
    in use or a damaged one is refused (UsageError, LockedError, CorruptionError). resume() restores the rest of the last committed step: ordinary parameters and
    buffers, the optimizer's groups, the schedulers, and the random states of torch, numpy and Python. From then on steps are committed.

        done = tierflow.resume(model, opt, schedule)
        for step in range(done, steps):
            ...

    data: the tierflow.data.Rows, whose fingerprint counts, or any text that names the data and how the loop draws from it. A state of a run with other data is refused.

    schedules: the schedulers of the optimizer's groups. A torch.amp.GradScaler made with enabled=False may be among them and has nothing to commit; an enabled one is refused.

    Learning rates and the schedulers' settings are those of this script. If they differ from those of the run so far, each scheduler's step() is called as often as it
    was called in the run, one scheduler after the other in each step.

    Raises UsageError if model, optimizer or schedulers were made in another way than in the run so far; nothing has changed then.
    """
    model, engine = uncompiled(model), engine_of(model)
    if not engine.durable:
        raise _native.UsageError("the model is not durable: nothing of it is committed; plan it with tierflow.Budget(..., storage=[...], durable=True)")
    if engine.journal is not None:
        raise _native.UsageError("resume() was called before: a durable model has one optimizer")
    if not isinstance(opt, AdamW):
        raise _native.UsageError(f"resume() takes the model's tierflow.optim.AdamW, not a {type(opt).__name__}")
    if opt.engines not in ([engine], []):
        raise _native.UsageError("the optimizer has parameters of another streamed model: a durable run trains one")
    mine = {id(p) for group in opt.param_groups for p in group["params"]}
    if left := [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in mine]:
        raise _native.UsageError(f"{left[0]} is not in the optimizer ({len(left)} parameters are not): a durable run has one, for all that train; freeze the others")
    if not isinstance(data, (str, Rows)):
        raise _native.UsageError(f"resume(data=...) takes a text that names the data, or tierflow.data.Rows, not a {type(data).__name__}")
    schedulers = [each for each in schedules if not isinstance(each, GradScaler)]
    if any(each.is_enabled() for each in schedules if isinstance(each, GradScaler)):
        raise _native.UsageError(NO_SCALER)
    journal = Journal(model, opt, schedulers, data.fingerprint if isinstance(data, Rows) else data)
    found = engine.native.resumed
    if found is not None:
        journal.put_back(*found)
    engine.journal = opt.journal = journal
    if found is None:
        journal.end_step(counts=False)
        journal.commit()
    return journal.step


class Journal:
    """The commits of a durable model. Of each optimizer step it keeps what does not stream, as the step leaves it. When the next backward begins, the updates of that
    step have run, and the schedulers are where the loop left them: then all of it is committed, beside that backward. The next step waits for its end."""

    def __init__(self, model: nn.Module, opt: AdamW, schedules: Sequence[LRScheduler], data: str) -> None:
        self.model, self.opt, self.schedules, self.engine = model, opt, schedules, engine_of(model)
        self.step = 0
        self._waits: tuple[dict[str, Any], dict[str, Any]] | None = None  # of the last step, not committed yet
        self._begun = False  # its commit, or an attempt at it
        self._torn = False  # between a step's gradients and what it leaves
        self._late = False  # the last commit failed for want of room
        result = result_of(model)
        self._result = json.dumps(result)
        beside = "why" not in result and (self.engine.native.exports_beside or not any(parts for unit in result["streamed"] for parts in unit))
        self.requests = ModelRequests(self.engine, beside, getattr(model, "save_pretrained", lambda partial: save(model, partial)))
        self._check_schedules()
        self._made = _plain({"groups": groups_of(model, opt), "schedulers": [_settings(schedule) for schedule in schedules], "data": data})
        self._settings = [schedule.state_dict() for schedule in schedules]

    def put_back(self, step: int, beside: bytes) -> None:
        """What commit() wrote."""
        header = json.loads(beside[8 : 8 + int.from_bytes(beside[:8], "little")])
        record = json.loads(header["__metadata__"]["record"])
        then = record["made"]
        _expect_same(then, self._made)
        new = _rates(then) != _rates(_as_known_to(then, self._made))
        given = self._go_forward(then, record["schedules"]) if new else []
        put_back(self.model, self.opt, record["state"], load_tensors(beside), "the state of the run")
        if new:
            for group, rates, before, here in zip(self.opt.param_groups, given, then["groups"], self._made["groups"], strict=True):
                if self.schedules or any(before.get(key) != here.get(key) for key in _RATES):
                    group.update(rates)
        else:
            for schedule, changed in zip(self.schedules, record["schedules"], strict=True):
                schedule.load_state_dict(_with(schedule.state_dict(), changed))
        self.step = step

    def _go_forward(self, then: dict[str, Any], places: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Brings schedulers with other settings to where those of the run were. Returns what each group has then of what they set."""
        for before, schedule in zip(then["schedulers"], self.schedules, strict=True):
            for name in (before["class"], type(schedule).__name__):
                if name == ReduceLROnPlateau.__name__ or "last_epoch" not in schedule.state_dict() or "last_epoch" not in before:
                    raise _native.UsageError(
                        f"the run whose state is here has other learning rates or schedulers than now, and a {name} does not go by steps alone: make them as then, "
                        "and change them after tierflow.resume() where other values are meant"
                    )
        before = groups_of(self.model, self.opt)
        groups, states = [dict(group) for group in self.opt.param_groups], copy.deepcopy([schedule.state_dict() for schedule in self.schedules])
        calls = [place.get("last_epoch", schedule.last_epoch) - schedule.last_epoch for place, schedule in zip(places, self.schedules, strict=True)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch expects opt.step() between them
            for call in range(max(calls, default=0)):
                for schedule, wanted in zip(self.schedules, calls, strict=True):
                    if call < wanted:
                        try:
                            schedule.step()
                        except ValueError as error:
                            for group, was in zip(self.opt.param_groups, groups, strict=True):
                                group.clear()
                                group.update(was)
                            for each, state in zip(self.schedules, states, strict=True):
                                each.load_state_dict(state)
                            raise _native.UsageError(f"the {type(schedule).__name__} ends before step {wanted}, where the run is: {error}") from error
        return [
            {key: value for key, value in group.items() if key in _RATES or (key == "betas" and _moves_betas(group)) or (key != "params" and value != old.get(key))}
            for group, old in zip(self.opt.param_groups, before, strict=True)
        ]

    def begin_step(self) -> None:
        """An optimizer step is about to take the gradients."""
        if self._torn:
            raise _native.UsageError("an optimizer step was interrupted half-way: start the script again, it goes on with what was committed before")
        self.begin_commit()
        self.engine.native.end_commit()
        if self._waits is None:
            self.requests.committed()

    def take_gradients(self) -> None:
        self._torn = True

    def end_step(self, counts: bool = True) -> None:
        self.step += counts
        self._waits, self._torn, self._begun = state_of(self.model, self.opt), False, False
        self.requests.hear(self.step)

    def begin_commit(self) -> None:
        """Of the last step, where it is due: it goes on beside what follows. A drive that is full costs commits, not the run: the state has its room, but not what
        lies beside it."""
        if self._begun or not (self._late or self.requests.waits or self.step % self.engine.durable == 0):
            return
        if self.requests.pins():
            self._late = True  # a commit comes when that model is written
            return
        self._begun = True
        try:
            self._commit(self.engine.native.begin_commit)
            self._late = False
        except _native.EnvironmentError as error:
            self._late = True
            self.requests.not_committed(error)
            log.warning("step %d is not committed, the next one is tried again; until then a crash costs all steps since the last commit: %s", self.step, error)

    def commit(self) -> None:
        """Commits the last step, if that was not done, and waits for it, and for a model that somebody asked for."""
        self.requests.finish()
        self._commit(self.engine.native.commit)
        self.engine.native.end_commit()
        if self._waits is None:
            self.requests.committed()
            self.requests.finish()

    def _commit(self, native: Callable[[int, bytes], None]) -> None:
        if self._waits is None or self._torn:
            return
        self._check_schedules()
        tensors, state = self._waits
        schedules = [_changed(schedule.state_dict(), before) for schedule, before in zip(self.schedules, self._settings, strict=True)]
        record = {"made": self._made, "state": {**state, "groups": groups_of(self.model, self.opt)}, "schedules": schedules}
        native(self.step, as_safetensors(tensors, {"record": json.dumps(record), "result": self._result}))
        self._waits = None

    def _check_schedules(self) -> None:
        for schedule in self.schedules:
            if not isinstance(schedule, LRScheduler):
                raise _native.UsageError(f"resume() takes schedulers of torch beside model and optimizer, not a {type(schedule).__name__}")
        if not self.schedules and any("initial_lr" in group for group in self.opt.param_groups):
            raise _native.UsageError("the optimizer has a scheduler: make it before tierflow.resume(model, opt, scheduler), and name it there")


def _settings(schedule: LRScheduler) -> dict[str, Any]:
    asked = _functions(schedule)
    return {"class": type(schedule).__name__, **schedule.state_dict(), **({"functions": asked} if asked else {})}


def _functions(schedule: LRScheduler) -> list[Any]:
    """What a scheduler's state_dict() leaves out: the functions that it asks, and those of the schedulers within it."""
    own = [*getattr(schedule, "lr_lambdas", []), getattr(schedule, "_scale_fn_custom", None)]
    return [digest_of(function) for function in own if function is not None] + [asked for inner in getattr(schedule, "_schedulers", []) for asked in _functions(inner)]


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value, default=lambda other: digest_of(other) if callable(other) else str(other)))


def _changed(now: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """What of a scheduler's state is not as it was when it was made, and so of the schedulers within it. The rest may be anything; this has to survive JSON."""
    changed: dict[str, Any] = {}
    for key, value in now.items():
        if key in before and value == before[key]:
            continue
        was = before.get(key)
        if _are_states(value, was):
            changed[key] = [_changed(one, other) for one, other in zip(value, was or [], strict=True)]
        elif _survives(value):
            changed[key] = value
        else:
            raise _native.UsageError(f"the scheduler's {key} is a {type(value).__name__} that JSON cannot hold: a durable run takes another scheduler")
    return changed


def _with(state: dict[str, Any], changed: dict[str, Any]) -> dict[str, Any]:
    """A scheduler's state as it is made, with what _changed() found."""
    merged = dict(state)
    for key, value in changed.items():
        here = state.get(key)
        merged[key] = [_with(of, part) for of, part in zip(here or [], value, strict=True)] if _are_states(here, value) else value
    return merged


def _are_states(one: Any, other: Any) -> bool:
    """Whether these are the states of as many schedulers, or objects, within one."""
    lists = isinstance(one, list) and isinstance(other, list) and len(one) == len(other)
    return lists and all(isinstance(part, dict) for part in [*one, *other])


def _survives(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _survives(of) for key, of in value.items())
    if isinstance(value, (list, tuple)):
        return all(_survives(of) for of in value)
    return value is None or isinstance(value, (bool, int, float, str))


def _rates(made: dict[str, Any]) -> list[Any]:
    return [made["schedulers"], *({key: group.get(key) for key in _RATES} for group in made["groups"])]


def _as_known_to(then: dict[str, Any], made: dict[str, Any]) -> dict[str, Any]:
    """Without the functions of schedulers of which a state says nothing: an earlier version wrote it."""
    known = [{key: of for key, of in here.items() if key != "functions" or key in was} for was, here in zip(then["schedulers"], made["schedulers"], strict=True)]
    return {**made, "schedulers": known}


def _moves_betas(group: dict[str, Any]) -> bool:
    """Whether a scheduler of the group sets its momentum as well."""
    return group.get("base_momentum") is not None


def _expect_same(then: dict[str, Any], now: dict[str, Any]) -> None:
    if (named := then.get("data", "")) and named != now["data"]:
        raise _native.UsageError(f"the run whose state is here was begun with data={named!r}, not {now['data']!r}: it goes on with the data that it began with")
    for what, name in (("groups", "the optimizer's group"), ("schedulers", "scheduler")):
        if [part.get("params") for part in then[what]] != [part.get("params") for part in now[what]]:
            raise _native.UsageError(f"the run whose state is here had other parameters in {name}s, or another number of these")
    for number, (before, here) in enumerate(zip(then["groups"], now["groups"], strict=True)):
        moved = {"betas"} if _moves_betas(before) or _moves_betas(here) else set()
        for key in sorted({*before, *here} - {"params", *_RATES} - moved):
            if before.get(key) != here.get(key):
                raise _native.UsageError(
                    f"the run whose state is here was begun with {key}={before.get(key)} in the optimizer's group {number}, not {here.get(key)}: make it as then, and "
                    "change it after tierflow.resume() where another value is meant"
                )
