"""Loops that end in order when they are told to: Ctrl-C, a `kill`, a closed terminal."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from . import _native

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stop:
    """True after a signal has asked the loop to end. signal: its number; 0 before."""

    def __init__(self) -> None:
        self.signal = 0

    def __bool__(self) -> bool:
        return self.signal != 0


@contextlib.contextmanager
def stop_signals() -> Iterator[Stop]:
    """Context in which the first SIGINT, SIGTERM or SIGHUP interrupts nothing, but makes the Stop that it gives true, so that the loop can end where it looks at it.
    A second signal does what it did before.

        with tierflow.stop_signals() as stop:
            for step in range(done, steps):
                ...
                if stop:
                    break
        tierflow.close(model)  # for a durable model, commits the last step

    A signal that is ignored, as SIGHUP under nohup, stays ignored. Only for the main thread, because Python handles signals nowhere else.
    """
    if threading.current_thread() is not threading.main_thread():
        raise _native.UsageError("stop_signals() is for the main thread: Python handles signals nowhere else")
    stop = Stop()
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    taken = [number for number, handler in before.items() if handler not in (signal.SIG_IGN, None)]

    def put_back() -> None:
        for number in taken:
            signal.signal(number, before[number])

    def note(number: int, frame: FrameType | None) -> None:
        stop.signal = number
        put_back()

    try:
        for number in taken:
            signal.signal(number, note)
        yield stop
    finally:
        put_back()
