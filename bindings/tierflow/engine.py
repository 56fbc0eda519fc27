"""The streamed parameters of a model: who holds weights when, what gradients there are, when updates are due."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import logging
import math
import os
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from . import _native
from .activations import Activations
from .frames import Frame
from .parameter import StreamedGradient, StreamedParameter
from .turns import Turn
from .units import Cut

log = logging.getLogger("tierflow")
_WHILE = 64  # turns after which the order is looked at
_open: weakref.WeakSet[Engine] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Files do not outlive the process, whatever still refers to a model."""
    for engine in list(_open):
        engine.close(commits=False)  # nobody says that the loop's last step is whole


def _leave_to_parent() -> None:
    """In a forked process: the threads that stream are the parent's. The object stays for ever: its end would wait for them."""
    for engine in list(_open):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(engine.native))
        engine.native = _Gone("the model streams in the process that made it, and this is a fork of it: make the model here, or use it there")
    _open.clear()


os.register_at_fork(after_in_child=_leave_to_parent)


def torch_device(name: str) -> torch.device:
    """The device that computes, as its tensors name it: torch takes a parameter on "cuda" for one that .to("cuda:0") has to move."""
    return torch.device("cuda", 0) if name == "cuda" else torch.device(name)


class _Gone:
    def __init__(self, why: str) -> None:
        self._why = why

    def __getattr__(self, name: str) -> Any:
        raise _native.UsageError(self._why)


class Engine:
    """The streamed parameters of one model. One thread at a time."""

    def __init__(self, model: nn.Module, cut: Cut, native: Any, device: str, workspace: int, fused_layers: bool = False) -> None:
        self.native = native
        self.durable = 0  # a commit after so many optimizer steps each; 0: never
        self.storage: list[str] = []  # folders
        self.journal: Any = None  # who commits
        self.fused_layers = fused_layers
        self.judged: dict[int, Any] = {}  # what fused layers found about tensors that they share
        self.configs: dict[str, Any] = {}  # texts of configs, as fused layers read them
        self._said_departs: set[str] = set()
        self.device = torch_device(device)
        self.activations = Activations(self.device, workspace)
        self.active: Turn | None = None
        self.active_thread = 0
        self.head_open = False  # whether a layer-major step keeps the last module's visit open while its loss is computed
        self._entering: int | None = None  # the thread that waits in enter()
        self._bound: Turn | None = None  # the turn that is being taken
        self.trainable = [unit.trainable for unit in cut.units]
        self.formats = {tensor.names[0]: tensor.format for unit in cut.units for tensor in unit.tensors if tensor.format != "bf16"}
        self.without_cache: list[str] = []  # parts of a transformers model's config whose use_cache was on before it streamed
        self.broken: str | None = None  # how a backward that did not end is named
        self._unended: set[int] = set()  # calls of backward() that added gradients and are not at their end
        self.skipped = 0
        self._scales: dict[tuple[int, int], float] = {}
        self.moments: dict[tuple[int, int], tuple[Any, int]] = {}  # whose they are, as a weak reference, and after how many of its steps
        self._gradients: dict[tuple[int, int], StreamedGradient] = {}
        self._spent: set[tuple[int, int]] = set()  # gradients that step() took and nobody cleared
        self._lost: set[tuple[int, int]] = set()  # gradients that the step() of an optimizer took that is not theirs
        self._alone: set[tuple[int, int]] = set()  # gradients dropped while others of their unit stay: their sums still hold them
        self.versions = [0] * len(cut.units)  # of their weights: steps and writes so far
        self._departures = self._visits = 0
        self._said_departures = False
        self._fetches = native.memory()["storage_bytes"] > 0
        self._said_unused = False
        self.handles: list[list[StreamedParameter]] = []
        self.places: list[list[list[tuple[nn.Module, str]]]] = []
        for number, unit in enumerate(cut.units):
            handles = []
            for index, tensor in enumerate(unit.tensors):
                wants = tensor.parameter.requires_grad and unit.trainable
                handle = StreamedParameter.make(self, number, index, tensor.names[0], tensor.parameter.shape, wants)
                for module, name in tensor.places:
                    module._parameters[name] = handle
                handles.append(handle)
            self.handles.append(handles)
            self.places.append([tensor.places for tensor in unit.tensors])
        _open.add(self)
        self.turns = [Turn(self, number, name, module, units) for number, (name, module, units) in enumerate(cut.turns)]
        self._loose = {unit: turn for turn in self.turns if turn.is_loose for unit in turn.units}
        self.shared = [sum(unit in turn.unit_set for turn in self.turns) > 1 for unit in range(len(cut.units))]
        for handles in self.handles:
            for handle in handles:
                if handle.requires_grad:
                    torch.Tensor.register_post_accumulate_grad_hook(handle, _take_outside_gradient)

    def close(self, commits: bool = True) -> None:
        """Ends the model: gives memory back, and removes its files, unless it is durable: then what its last step left is committed."""
        _open.discard(self)
        journal, self.journal = self.journal, None
        try:
            if journal is not None:
                if commits:
                    journal.commit()
            elif self.durable:
                log.warning("a durable model ends and nothing of it was committed: tierflow.resume(model, opt) was not called")
        finally:
            if journal is not None:
                journal.requests.give_up()  # nobody can ask any more
            self.native = _Gone("the streamed model was closed: its state is gone")

    def call(self, turn: Turn, args: tuple, kwargs: dict[str, Any]) -> Any:
        """What the turn's module returns."""
        return Frame(turn, args, kwargs).take()

    @contextlib.contextmanager
    def turn(self, turn: Turn, phase: str, keep: bool = False) -> Iterator[list[torch.Tensor]]:
        """Binds a module's weights; while it lasts they are there. phase: forward, backward, head or evaluate."""
        adds = phase in ("backward", "head")
        wanted = turn.gradient_units() if adds else []
        if adds and self.durable and self.journal is None:
            raise _native.UsageError("the model is durable: call done = tierflow.resume(model, opt) before the first backward()")
        if adds and self._spent and any((h.unit, h.index) in self._spent for h in turn.handles):
            raise _native.UsageError("backward() after step() without zero_grad() between: gradients of the last step are already applied")
        if adds and self._alone and (alone := next((h for h in turn.handles if (h.unit, h.index) in self._alone), None)) is not None:
            raise _native.UsageError(f"the gradient of {alone.label} was dropped alone; its unit keeps one sum: call zero_grad() before the next backward()")
        if adds and self._scales:
            self._expect_unscaled(turn.handles)
        here = threading.get_ident()
        if self.native.inside or self._entering not in (None, here):  # here: what an interrupt left
            raise _native.UsageError("two streamed modules run at the same time: models stream in one thread")
        if adds and self.journal is not None:
            self.journal.begin_commit()
        self.activations.begin()
        weights: list[torch.Tensor] = []
        try:  # from here on: a signal that comes while enter() waits is raised as it returns
            self._entering = here  # enter() lets other threads run while it waits
            try:
                weights = self.native.enter(turn.number, phase, wanted, keep)
            finally:
                self._entering = None
            self.active, self.active_thread = turn, here
            if adds:
                for handle, weight in zip(turn.handles, weights, strict=True):
                    weight.requires_grad_(handle.requires_grad)
                self.native.collect(weights)
            self._bound = turn
            turn.bind(weights)
            yield weights
        except BaseException as error:
            if adds and self.native.inside:
                self.broken = f"backward() of {turn.name} ended with {type(error).__name__}"
            raise
        finally:
            self.active, self.head_open = None, False
            self._leave()
            self._say_departures()

    def _leave(self) -> None:
        """Ends the turn that is being taken. An interrupt between two of these lines leaves the rest to zero_grad()."""
        bound, self._bound = self._bound, None
        try:
            if bound is not None:
                bound.unbind()
        finally:
            if self.native.inside:
                self.native.leave()

    def _say_departures(self) -> None:
        """Where weights are fetched from storage and most turns of a while came unforeseen: changes between training and evaluation, say, cost nothing to speak of."""
        self._visits += 1
        if self._said_departures or self._visits % _WHILE:
            return
        before, self._departures = self._departures, self.native.departures
        if self._departures - before > _WHILE // 4 and self._fetches:
            self._said_departures = True
            log.warning("modules run in another order each time: their weights are fetched from storage when they are asked for, not ahead (said once)")

    def say_departs(self, turn: Turn, why: str) -> None:
        if why not in self._said_departs:
            self._said_departs.add(why)
            log.warning(f"fused_layers: {turn.name} runs its own code: {why} (a reason is said once)")

    # Parameters outside of their turn.

    def _expect_rest(self, handle: StreamedParameter) -> None:
        if self.active is not None:
            raise _native.UsageError(
                f"{handle.label} was read or written while another module runs ({self.active.name}): do it before or after forward() and backward(); modules share "
                "weights, and weights are reparametrized (pruning, weight_norm), before tierflow.wrap()"
            )

    def _end_head(self) -> None:
        if self.head_open:
            self.head_open = False
            self._leave()

    def read(self, handle: StreamedParameter, master: bool = False) -> torch.Tensor:
        self._expect_rest(handle)
        self._end_head()
        return self.native.read(handle.unit, handle.index, master).to(self.device if not master else "cpu")

    def write(self, handle: StreamedParameter, values: torch.Tensor) -> None:
        self._expect_rest(handle)
        if self.durable and self.journal is None and self.native.resumed is not None:
            raise _native.UsageError(
                f"{handle.label} was written before tierflow.resume(), and its run's state is there already: write where resume() says 0, after it"
            )
        if self.journal is not None:
            if not self.trainable[handle.unit]:
                raise _native.UsageError(
                    f"{handle.label} does not train, and is committed once: it cannot be written any more. To merge an adapter, save it, and merge it into a model "
                    "that is not durable"
                )
            self.journal.commit()  # as the step left it
        self.native.write(handle.unit, handle.index, values.detach().float())
        self.versions[handle.unit] += 1

    def add_outside(self, handle: StreamedParameter, grad: torch.Tensor) -> None:
        """A gradient of a parameter that was used outside of any turn's module."""
        self.expect_end()
        self._expect_unscaled([handle])
        self._end_head()
        turn = self._loose.get(handle.unit) or next(t for t in self.turns if handle.unit in t.unit_set)
        wanted = [unit == handle.unit for unit in turn.units]
        self.native.enter(turn.number, "backward", wanted, False)
        try:
            self.native.add([grad.to(torch.bfloat16) if h is handle else None for h in turn.handles])
        finally:
            self.native.leave()

    # Gradients.

    def _expect_unscaled(self, handles: list[StreamedParameter]) -> None:
        """A gradient's factor is applied when its sum is read, to all of it."""
        scaled = next((h for h in handles if self._scales.get((h.unit, h.index), 1.0) != 1.0), None)
        if scaled is not None:
            raise _native.UsageError(
                f"the gradient of {scaled.label} was scaled or clipped, and a backward() adds to it: scale and clip (clip_grad_norm_) after the last backward() of a step"
            )

    def expect_end(self) -> None:
        """Within a call of backward(): gradients that it adds are incomplete until it has run to its end; where it raises, between two turns too, they stay so."""
        call = torch._C._current_graph_task_id()
        if call not in self._unended:
            self._unended.add(call)
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._unended.discard(call))  # not called where backward() raises

    def grad(self, handle: StreamedParameter) -> StreamedGradient | None:
        key = (handle.unit, handle.index)
        if key not in self._spent and not self.native.touched(*key):
            return None
        if key not in self._gradients:
            self._gradients[key] = StreamedGradient.make(self, *key, handle.label, handle.shape)
            self._gradients[key].life = {"dropped": False}  # shared with its aliases
        return self._gradients[key]

    def set_grad(self, handle: StreamedParameter | StreamedGradient, value: Any) -> None:
        key = (handle.unit, handle.index)
        if value is not None:
            if isinstance(value, StreamedGradient) and value.key() == key and value.engine is self:
                return
            raise _native.UsageError(f"the gradient of {handle.label} comes from backward(); it can be scaled, or dropped by setting it to None")
        self._spent.discard(key)
        self._lost.discard(key)
        if key in self._gradients:
            self._gradients.pop(key).life["dropped"] = True
        self._scales.pop(key, None)
        had = self.native.touched(*key)
        self.native.forget(*key)
        if self._touched(handle.unit):
            self._alone |= {key} if had else set()
        else:
            self._drop(handle.unit)
        if not any(self._touched(unit) for unit in range(len(self.handles))):
            self._mend()

    def _touched(self, unit: int) -> bool:
        return any(self.native.touched(unit, index) for index in range(len(self.handles[unit])))

    def _drop(self, unit: int) -> None:
        self.native.drop_gradient(unit)
        self._alone -= {(unit, index) for index in range(len(self.handles[unit]))}

    def zero_grad(self, trained: set[tuple[int, int]], others: set[tuple[int, int]]) -> None:
        """Drops the gradients of an optimizer that trains these tensors, and those that none of the other optimizers trains."""
        if self.active is None or self.active_thread == threading.get_ident():
            self.active = None
            self._leave()
        if self._incomplete():
            others = set()
        spared = {unit for unit, _ in others} - {unit for unit, _ in trained}
        for unit in range(len(self.handles)):
            if self.trainable[unit] and unit not in spared:
                self._drop(unit)
        self._spent = {key for key in self._spent if key[0] in spared}
        self._lost -= trained if others else self._lost
        for key in [key for key in self._gradients if key[0] not in spared]:
            self._gradients.pop(key).life["dropped"] = True
            self._scales.pop(key, None)
        self._mend()

    def _incomplete(self) -> str | None:
        """Why this step's gradients cannot be applied."""
        return self.broken or ("backward() raised an error" if self._unended else None)

    def _mend(self) -> None:
        """Where all gradients were dropped."""
        self.broken = None
        self._unended = set()

    def _live(self, gradient: StreamedGradient) -> tuple[int, int]:
        key = gradient.key()
        if gradient.life["dropped"]:
            raise _native.UsageError(f"the gradient of {gradient.label} was dropped by zero_grad()")
        if key in self._spent:
            raise _native.UsageError(f"the gradient of {gradient.label} was applied by step() and is gone: read it before")
        return key

    def read_grad(self, gradient: StreamedGradient) -> torch.Tensor:
        key = self._live(gradient)
        return (self.native.gradient(*key) * self._scales.get(key, 1.0)).to(gradient.dtype).to(self.device)

    def grad_norm(self, gradient: StreamedGradient) -> float:
        key = self._live(gradient)
        norm = math.sqrt(self.native.squares(*key)) * self._scales.get(key, 1.0)
        return norm if self.native.finite(gradient.unit) or not math.isfinite(norm) else math.inf

    def scale_grad(self, gradient: StreamedGradient, factor: float) -> None:
        key = self._live(gradient)
        self._scales[key] = self._scales.get(key, 1.0) * factor

    def _stepped(self, trained: set[tuple[int, int]], others: set[tuple[int, int]]) -> tuple[list[int], set[int]]:
        """The units with gradients that an optimizer's step takes, and those that it leaves to the other optimizers."""
        spared = {unit for unit, _ in others} - {unit for unit, _ in trained}
        return [unit for unit in range(len(self.handles)) if self.native.gradients_of(unit) and unit not in spared], spared

    def finite(self, trained: set[tuple[int, int]], others: set[tuple[int, int]]) -> bool:
        """Whether all gradients that step() is going to take are. Raises UsageError where some are missing. trained: what this optimizer trains, others: what the
        other ones do, whose units keep their gradients."""
        if why := self._incomplete():
            raise _native.UsageError(f"{why}: this step's gradients are incomplete; call the optimizer's zero_grad() and go on")
        if lost := next((key for key in trained if key in self._lost), None):
            raise _native.UsageError(
                f"another optimizer's step() took the gradients of {self.handles[lost[0]][lost[1]].label} with those of its module, which streams as one: "
                "put the parameters of a module into groups of one optimizer"
            )
        units, spared = self._stepped(trained, others)
        return all(self.native.finite(unit) for unit in units) and all(math.isfinite(s) for (unit, _), s in self._scales.items() if unit not in spared)

    def step(self, how: dict[tuple[int, int], dict[str, Any]], trained: set[tuple[int, int]], others: set[tuple[int, int]], finite: bool) -> None:
        """Gradients become updates, each ahead of its unit's next turn; where not all of the optimizer's are finite, they go, and nothing changes. how: by tensor,
        TensorUpdate's arguments without scale. trained, others: as in finite()."""
        units, spared = self._stepped(trained, others)
        updates = []
        for unit in units:
            entries = []
            for handle in self.handles[unit]:
                key = (unit, handle.index)
                active = finite and key in how and self.native.touched(*key)
                if self.native.touched(*key):
                    self._spent.add(key)
                    if key in others and key not in trained:
                        self._lost.add(key)
                    else:
                        self._say_unused(handle, key in how)
                entries.append(_native.TensorUpdate(**how[key], scale=self._scales.get(key, 1.0)) if active else _native.TensorUpdate())
            updates.append((unit, entries))
        self._scales = {key: scale for key, scale in self._scales.items() if key[0] in spared}
        if finite:
            if self.journal is not None:
                self.journal.take_gradients()
            self.native.step(updates)
            for unit in units:
                self.versions[unit] += 1
            return
        for unit in units:
            self._drop(unit)
        self.skipped += 1

    def _say_unused(self, handle: StreamedParameter, used: bool) -> None:
        if not used and not self._said_unused:
            self._said_unused = True
            log.warning(f"{handle.label} has a gradient and is not in this optimizer: the step drops it (freeze what is not trained)")

    def __reduce__(self) -> Any:
        raise _native.UsageError("a streamed model cannot be pickled or copied: use save_pretrained() or tierflow.save(), or its state_dict()")

    def __deepcopy__(self, memo: Any) -> Any:
        return self.__reduce__()


def _take_outside_gradient(handle: StreamedParameter) -> None:
    plain: Any = torch.Tensor.grad  # what autograd itself wrote
    stored = plain.__get__(handle)
    plain.__set__(handle, None)
    if stored is not None:
        handle.engine.add_outside(handle, stored)
