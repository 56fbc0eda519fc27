"""The micro-batches of a layer-major step: each runs the model's own code in a thread, and stops at every turn."""

from __future__ import annotations

import dataclasses
import queue
import threading
from collections.abc import Callable
from typing import Any

import torch

from .frames import Frame, local
from .modes import Modes, State


class _Stop(BaseException):
    """Unwinds a micro-batch whose step has failed elsewhere."""


@dataclasses.dataclass
class TurnCall:
    """One turn of one micro-batch: what it read (with the graph that leads there) and what came out, as new leaves."""

    frame: Frame
    inputs: list[torch.Tensor]
    outs: list[torch.Tensor]


class _Handed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(leaf.detach() for leaf in leaves)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads


def handed(leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    """What a turn gave, for the model's own code: it may change these in place, which nobody may do to leaves."""
    given = iter(_Handed.apply(*[leaf for leaf in leaves if leaf.requires_grad]))
    return [next(given) if leaf.requires_grad else leaf for leaf in leaves]


class MicroBatchLane:
    """A micro-batch: a thread that runs the model's own code, stopping at every turn. One lane runs at a time; turns are taken by the driver.

    An interrupt reaches the driver between any two lines, so that it can leave a lane running, or asked and not woken: what counts are the two numbers,
    each of which one side alone writes; what the queues bring only says that they may have changed.
    """

    def __init__(self) -> None:
        self._go: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._came: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._work: Callable[[], Any] | None = None
        self._asked = 0  # by the driver: how often it was to run
        self._served = 0  # by the lane: how often it did. Equal: it rests, and the driver may touch it
        self._unfinished = False  # by the lane: it rests within its work
        self._ended = False
        self.frame: Frame | None = None  # the turn it waits for
        self.answer: Any = None
        self.result: Any = None
        self.error: BaseException | None = None
        self.stopping = False
        self.calls: list[TurnCall] = []
        self.turns = 0  # that it took
        self._modes: Modes | None = None
        self.state: State = ([], [], [])  # modes in which it left the model
        threading.Thread(target=self._run, name="tierflow micro-batch", daemon=True).start()

    def _run(self) -> None:
        local.lane = self
        while True:
            self._sleep()
            if self._ended:
                return
            self._unfinished = True
            try:
                assert self._work is not None
                self.result = self._work()
            except _Stop:
                pass
            except BaseException as error:
                self.error = error
            self._work = None  # it refers to the trainer, which ends this thread when nobody does
            self._unfinished = False
            self._rest()

    def _sleep(self) -> None:
        while self._served == self._asked:
            self._go.get()

    def _rest(self) -> None:
        self._served += 1
        self._came.put(None)

    def _wake(self) -> None:
        self._asked = self._served + 1
        self._wait()

    def _wait(self) -> None:
        self._go.put(None)
        while self._served != self._asked:
            self._came.get()

    def begin(self, work: Callable[[], Any], modes: Modes, state: State) -> None:
        """From the beginning, with the model in these modes. It rests."""
        self._work, self.result, self.stopping, self.turns = work, None, False, 0
        self._modes, self.state = modes, state
        self.resume()

    def here(self) -> None:
        """Ahead of anything that is computed for this micro-batch: the model is in the modes in which it left it."""
        assert self._modes is not None
        self._modes.put(self.state)

    def resume(self, answer: Any = None) -> None:
        """Runs until the next turn, or the end."""
        self.frame, self.answer = None, answer
        assert self._modes is not None
        self._modes.put(self.state)
        self._wake()
        self.state = self._modes.now()
        if self.error is not None:
            raise self.error

    def pass_by(self) -> None:
        """A turn without a graph, and on to the next."""
        self.turns += 1
        self.here()
        self.resume(self.at().call())

    def at(self) -> Frame:
        """The turn that it waits for."""
        if self.frame is None:
            raise RuntimeError("the micro-batch is at its end")
        return self.frame

    def call(self, frame: Frame) -> Any:
        """In the lane's thread: a turn."""
        if self.stopping:
            raise _Stop
        self.frame = frame
        self._rest()
        self._sleep()
        if self.stopping:
            raise _Stop
        return self.answer

    def stop(self) -> None:
        self.stopping = True
        self._wait()
        while self._unfinished:
            self._wake()
        self.frame, self.error, self.calls, self._modes = None, None, [], None

    def end(self) -> None:
        self._ended = True
        self._asked = self._served + 1
        self._go.put(None)
