"""The layer-major step: every micro-batch passes a module before the next module is fetched."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn

from . import _native
from .ambient import autocast_as, autocast_state
from .frames import Frame
from .lanes import MicroBatchLane, TurnCall, handed
from .losses import loss_named, switches
from .modes import Modes, State
from .optim import AdamW, check_clip
from .saving import engine_of
from .turns import Turn

log = logging.getLogger("tierflow")


@dataclasses.dataclass
class StepResult:
    """loss: the mean over micro-batches, before the update. grad_norm: global, before clipping. skipped: a gradient was not finite, so the step changed nothing."""

    loss: float
    grad_norm: float
    skipped: bool
    seconds: float


@dataclasses.dataclass
class _Beside:
    """What is computed of micro-batches without adapters, beside what is computed of them with: a loss's reference."""

    taken: list[Any]  # the micro-batches of the step, each of its own
    batches: list[Any] = dataclasses.field(default_factory=list)  # those of them that want it
    name: str = ""
    function: Any = None
    of_lane: dict[int, Any] = dataclasses.field(default_factory=dict)

    def note(self, lane: MicroBatchLane) -> None:
        """Where a lane of these is at its end: its micro-batch has what it found."""
        if lane.frame is None and (batch := self.of_lane.pop(id(lane), None)) is not None:
            batch[self.name], lane.result = lane.result, None


class Trainer:
    """Layer-major steps: for all micro-batches of a step, each module's weights are fetched once in each direction.

    The model's code is unchanged. Each micro-batch runs in a thread of its own, which stops at every streamed module. Only one thread runs at a time, so nothing in the
    model needs to be thread-safe; but if one forward() leaves a value in the model for a later call, another micro-batch may have replaced it. train() and eval(), and
    PEFT's adapters, are each micro-batch's own. Losses and gradients are bit for bit those of a loop that calls `(loss / len(micro_batches)).backward()` for each
    micro-batch in turn, with two exceptions for more than one micro-batch: gradients of tied weights, and of those that a loss uses outside of their module, add up in
    another order; and dropout draws its random numbers layer by layer.

    model: a streamed model, or a PEFT model over one. opt: a tierflow.optim.AdamW. loss: a function of (model, micro_batch) that returns the micro-batch's loss, by
    default `model(**micro_batch).loss`; or "dpo", "simpo" or "orpo" (tierflow.losses). clip: largest global gradient norm, above 0; None: no clipping.
    """

    def __init__(
        self, model: nn.Module, opt: AdamW, *, loss: Callable[[nn.Module, Any], torch.Tensor] | str | None = None, clip: float | None = 1.0
    ) -> None:
        self._lanes: list[MicroBatchLane] = []
        check_clip(clip)
        self.model, self.opt, self.clip = model, opt, clip
        self.engine = engine_of(model)
        named = loss_named(loss) if isinstance(loss, str) else loss
        self._loss: Callable[[nn.Module, Any], torch.Tensor] = named or (lambda model, batch: model(**batch).loss)
        self._head: int | None = None  # the turn that came last in the step before
        self._without_head = False  # whether a loss read parameters, or used them, once the last module had run
        self._multiple: set[int] = set()
        self._calls: collections.Counter[int] = collections.Counter()  # of each turn, that wait for their backward
        self._said = False

    def step(self, micro_batches: Sequence[Mapping[str, Any] | Any]) -> StepResult:
        """One optimizer step over the micro-batches. Afterwards there are no gradients, as after zero_grad(). Put the model into train() mode yourself."""
        started = time.monotonic()
        loss = self.backward(micro_batches)
        norm = self._clip()
        skipped = self._skipped()
        self.opt.step()
        self.opt.zero_grad()
        return StepResult(loss, norm, self._skipped() != skipped, time.monotonic() - started)

    def _skipped(self) -> int:
        """Steps of the optimizer; one of torch's own, of adapters alone, skips none."""
        return getattr(self.opt, "skipped", 0)

    def backward(self, micro_batches: Sequence[Any]) -> float:
        """Only forward and backward: afterwards there are gradients, as after a loop of backward(). Returns the mean loss."""
        if not micro_batches or isinstance(micro_batches, Mapping):
            raise _native.UsageError("a step takes at least one micro-batch, in a list")
        if torch.is_inference_mode_enabled():
            raise _native.UsageError("a step has gradients: call it outside of torch.inference_mode()")
        beside = self._beside(micro_batches)
        lanes = self._lanes_for(len(micro_batches) + len(beside.batches))
        modes = Modes(self.model)
        begun = ended = modes.now()
        count, grad_mode = len(micro_batches), torch.is_grad_enabled()
        try:
            with torch.enable_grad():
                loss = self._run(lanes[:count], lanes[count:], beside, modes)
            ended = lanes[count - 1].state
            return loss
        except BaseException:
            torch.set_grad_enabled(grad_mode)  # Ctrl-C may come between a with statement's block and its end
            self.engine.broken = self.engine.broken or "a layer-major step was broken off"
            raise
        finally:
            self._end(lanes, modes, ended)

    def evaluate(self, micro_batches: Sequence[Any], function: Callable[[nn.Module, Any], Any] | None = None) -> list[Any]:
        """Returns the result of `function(model, micro_batch)` for each micro-batch, without gradients; by default the loss, as a number. All micro-batches pass a module
        before the next module is fetched. Put the model into eval() mode yourself."""
        find = function or (lambda model, batch: float(self._loss(model, batch)))
        beside = self._beside(micro_batches) if function is None else _Beside(list(micro_batches))
        lanes = self._lanes_for(len(micro_batches) + len(beside.batches))
        count = len(micro_batches)
        modes = Modes(self.model)
        begun = ended = modes.now()
        try:
            others = self._begun_beside(beside, lanes[count:], modes)
            for lane, batch in zip(lanes, beside.taken, strict=False):
                lane.begin(self._without_graph(find, batch), modes, begun)
            while waiting := [lane for lane in [*others, *lanes[:count]] if lane.frame is not None]:
                turn = min(waiting, key=lambda lane: lane.turns).at().turn
                for lane in waiting:
                    if lane.at().turn is turn:
                        lane.pass_by()
                        beside.note(lane)
            ended = lanes[count - 1].state if count else begun
            return [lane.result for lane in lanes[:count]]
        finally:
            self._end(lanes, modes, ended)

    def _without_graph(self, function: Callable[[nn.Module, Any], Any], batch: Any) -> Callable[[], Any]:
        autocast = autocast_state(self.engine.device.type)

        def run() -> Any:
            with torch.no_grad(), autocast_as(autocast):
                return function(self.model, batch)

        return run

    def _beside(self, micro_batches: Sequence[Any]) -> _Beside:
        """What the loss wants of the model without its adapters."""
        beside = _Beside(list(micro_batches))
        if (wanted := getattr(self._loss, "computes_beside", None)) is None:
            return beside
        beside.taken = [dict(batch) for batch in micro_batches]
        for batch in beside.taken:
            if (found := wanted(self.model, batch)) is not None:
                beside.name, beside.function = found
                beside.batches.append(batch)
        if not beside.batches:
            return beside
        if not switches(self.model):
            self._say_ahead()
            with cast(Any, self.model).disable_adapter():
                found_ahead = self.evaluate(beside.batches, beside.function)
            for batch, value in zip(beside.batches, found_ahead, strict=True):
                batch[beside.name] = value
            beside.batches = []
        return beside

    def _say_ahead(self) -> None:
        if not self._said:
            log.warning("the reference of this loss is computed in a pass of its own ahead of each step, and the base is read once more for it: the adapters have modules_to_save or a prompt; "
                        "with adapters in layers alone, or in tierflow.Session, it is computed in the step's visits")  # fmt: skip
        self._said = True

    def _begun_beside(self, beside: _Beside, lanes: list[MicroBatchLane], modes: Modes) -> list[MicroBatchLane]:
        """The lanes that compute it. They pass each module ahead of the others, in the same visit."""
        without = modes.without_adapters(modes.now())
        for lane, batch in zip(lanes, beside.batches, strict=True):
            beside.of_lane[id(lane)] = batch
            lane.begin(self._without_graph(beside.function, dict(batch)), modes, without)
            beside.note(lane)
        return lanes

    def _lanes_for(self, count: int) -> list[MicroBatchLane]:
        while len(self._lanes) < count:
            self._lanes.append(MicroBatchLane())
        for lane in self._lanes:
            lane.stop()  # an interrupt may have left it where it was
        return self._lanes[:count]

    def _end(self, lanes: list[MicroBatchLane], modes: Modes, ended: State) -> None:
        for lane in lanes:
            lane.stop()
            lane.result = None
        modes.now()  # what a lane did as it was stopped
        modes.put(ended)

    def _clip(self) -> float:
        parameters = [p for group in self.opt.param_groups for p in group["params"]]
        if self.clip is not None:
            return float(torch.nn.utils.clip_grad_norm_(parameters, self.clip))
        return float(torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]))

    def _run(self, lanes: list[MicroBatchLane], others: list[MicroBatchLane], beside: _Beside, modes: Modes) -> float:
        autocast, count = autocast_state(self.engine.device.type), len(lanes)

        def work(batch: Any) -> Callable[[], torch.Tensor]:
            def run() -> torch.Tensor:
                with torch.enable_grad(), autocast_as(autocast):
                    return self._loss(self.model, batch)

            return run

        losses: dict[int, torch.Tensor] = {}
        begun = modes.now()
        self._begun_beside(beside, others, modes)
        for lane, batch in zip(lanes, beside.taken, strict=True):
            lane.begin(work(batch), modes, begun)
            self._finish(lane, lanes, losses, count)
        while waiting := [lane for lane in [*others, *lanes] if lane.frame is not None]:
            turn = min(waiting, key=lambda lane: lane.turns).at().turn
            together = self._keeps(turn) and all(lane.at().turn is turn and lane.at().needs_graph for lane in waiting if lane not in others)
            for lane in waiting:
                if lane.at().turn is not turn:
                    continue
                if lane in others:
                    lane.pass_by()
                    beside.note(lane)
                elif turn.number == self._head and lane.at().needs_graph:
                    self._take_head(turn, lane, lanes, losses, count, together)
                else:
                    lane.resume(self._take(lane))
                    self._finish(lane, lanes, losses, count)
        self._learn(lanes)
        while waiting := [lane for lane in lanes if lane.calls]:
            turn = max(waiting, key=lambda lane: len(lane.calls)).calls[-1].frame.turn
            group = [lane for lane in waiting if lane.calls[-1].frame.turn is turn]
            together = self._keeps(turn) and self._calls[turn.number] == len(group)
            for position, lane in enumerate(group):
                lane.here()
                self._back(lane.calls.pop(), keep=together and position + 1 < len(group))
        return sum(float(loss) for loss in losses.values()) / count

    def _take(self, lane: MicroBatchLane) -> Any:
        """A forward visit for one micro-batch."""
        frame = lane.at()
        lane.turns += 1
        lane.here()
        if not frame.needs_graph:
            found = frame.evaluate()
            if not frame.needs_graph:
                return found
        with torch.no_grad():
            outs = frame.forward([t.detach() for t in frame.tensors])
        return self._record(lane, frame, outs)

    def _record(self, lane: MicroBatchLane, frame: Frame, outs: list[torch.Tensor]) -> Any:
        leaves = [out.detach().requires_grad_(out.is_floating_point()) for out in outs]
        lane.calls.append(TurnCall(frame, frame.kept_inputs(), leaves))
        return frame.result(handed(leaves))

    def _take_head(self, turn: Turn, lane: MicroBatchLane, lanes: list[MicroBatchLane], losses: dict[int, torch.Tensor], count: int, together: bool) -> None:
        """The last module: forward, loss and backward of one micro-batch in one visit, without recomputation."""
        frame = lane.at()
        lane.turns += 1
        lane.here()
        inputs = [t.detach().requires_grad_(t.requires_grad) for t in frame.tensors]
        frame.remember_random()
        later = any(other.frame is not None and other.frame.turn is turn for other in lanes if other is not lane)
        with self.engine.turn(turn, "head", together and later) as weights:
            with autocast_as(frame.autocast):
                outs = frame.compute(inputs, weights, keep=True)
            self.engine.activations.look()
            answer = self._record(lane, frame, outs)
            call = lane.calls[-1]
            self.engine.active, self.engine.head_open = None, True  # the lane's own code may not take turns now; if it asks for one, it waits
            lane.resume(answer)
            self._finish(lane, lanes, losses, count)
            if lane.frame is not None or not self.engine.head_open:  # not the last after all, or the loss needs parameters: this call is an ordinary one
                self._without_head = self._without_head or not self.engine.head_open
                self._head = None
                return
            self.engine.active, self.engine.head_open = turn, False
            grads = frame.differentiate(inputs, weights, outs, [leaf.grad for leaf in call.outs])
        lane.calls.pop()
        self._pass_on(call, grads)

    def _finish(self, lane: MicroBatchLane, lanes: list[MicroBatchLane], losses: dict[int, torch.Tensor], count: int) -> None:
        """Where the micro-batch has its loss: its gradient, back to the last module's output."""
        if lane.frame is not None:
            return
        loss, lane.result = lane.result, None
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise _native.UsageError("the loss of a micro-batch is a tensor with one element; does the micro-batch have labels?")
        losses[lanes.index(lane)] = loss.detach()  # read in the end: the host would wait for the device
        if not loss.requires_grad:
            raise _native.UsageError("the loss needs no gradient: is every parameter frozen, or is the loss detached?")
        (loss / count).backward(retain_graph=bool(lane.calls))

    def _back(self, call: TurnCall, keep: bool) -> None:
        grads = [leaf.grad for leaf in call.outs]
        if all(grad is None for grad in grads):
            return
        with contextlib.ExitStack() as stack:
            stack.enter_context(autocast_as(call.frame.autocast))
            self._pass_on(call, call.frame.backward(call.inputs, grads, keep))

    def _pass_on(self, call: TurnCall, grads: list[torch.Tensor | None]) -> None:
        """Gradients of a call's inputs, through the model's code between the modules, to the outputs they came from."""
        pairs = [(t, grad) for t, grad in zip(call.inputs, grads, strict=True) if t.requires_grad and grad is not None]
        if pairs:
            torch.autograd.backward([t for t, _ in pairs], [grad for _, grad in pairs], retain_graph=True)

    def _keeps(self, turn: Turn) -> bool:
        """Whether the micro-batches' gradients may add up on the device, where their sum is rounded: nothing else adds to them, or has."""
        return turn.number not in self._multiple and not any(self.engine.shared[unit] or self.engine.native.gradients_of(unit) for unit in turn.units)

    def _learn(self, lanes: list[MicroBatchLane]) -> None:
        """What the next step may rely on: modules that run once, and which comes last."""
        self._multiple = set()
        self._calls = collections.Counter(call.frame.turn.number for lane in lanes for call in lane.calls)
        for lane in lanes:
            seen: set[int] = set()
            for call in lane.calls:
                number = call.frame.turn.number
                (self._multiple if number in seen else seen).add(number)
        last = {lane.calls[-1].frame.turn.number for lane in lanes if lane.calls}
        if self._head is None and not self._without_head and len(last) == 1 and not last & self._multiple:
            self._head = last.pop()

    def __del__(self) -> None:
        for lane in self._lanes:
            lane.end()
