"""Who asks a durable model for itself while it trains: `tierflow export` in another terminal."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import _native
from .engine import Engine
from .folders import expect_empty, save_whole

log = logging.getLogger("tierflow")


class ModelRequests:
    """One is heard at a time. What is asked for after a step is written by a thread once that step is committed, while training goes on; until it is whole no other
    step is committed. Where that cannot be, training waits.

    beside: whether the commits say how the model is saved, and there is memory for two chunks of it.
    at_once: writes the model as it is now into a folder.
    """

    def __init__(self, engine: Engine, beside: bool, at_once: Callable[[str], Any]) -> None:
        self._beside, self._at_once = beside, at_once
        self._native: Any = engine.native
        self._requests: Any = _native.ExportRequests(engine.storage, log.warning)
        self._asked: tuple[int, str, Any] | None = None  # step, folder, who: from then until the model is there
        self._thread: threading.Thread | None = None
        self._give_up = threading.Event()

    @property
    def waits(self) -> bool:
        """Whether the last step has to be committed for somebody."""
        return self._asked is not None and self._thread is None

    def pins(self) -> bool:
        """Whether no other step may be committed now."""
        if self._thread is not None and not self._thread.is_alive():
            self.finish()
        return self._thread is not None

    def hear(self, step: int) -> None:
        """Between two steps."""
        self._requests.answer(step, lambda: self._asked is None and not self.pins(), lambda folder, who: self._take(step, folder, who))

    def _take(self, step: int, folder: str, who: Any) -> None:
        self._asked = (step, folder, who)
        try:
            expect_empty(Path(folder))
        except (_native.UsageError, OSError) as error:
            self._answer(error)
        else:
            if not self._beside:
                self._write(self._at_once)

    def committed(self) -> None:
        """That step is durable."""
        if self.waits:
            self._give_up.clear()
            self._thread = threading.Thread(target=self._write, args=(self._export,), name="tierflow-export")
            self._thread.start()

    def not_committed(self, error: Exception) -> None:
        if self.waits:
            self._answer(error)

    def finish(self) -> None:
        """Waits for the model that is being written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def finish_without_commit(self) -> None:
        """The same, also of one that waits for a commit: the model is written as it is now."""
        self.finish()
        if self._asked is not None:
            self._write(self._at_once)

    def give_up(self) -> None:
        """Whoever still waits hears that the run ends."""
        self._give_up.set()
        self.finish()
        if self._asked is not None:
            self._asked[2].ends()
            self._asked = None
        self._native = self._requests = None  # which hold the state

    def _export(self, folder: str) -> None:
        if broken := self._native.export_committed(folder, lambda: not self._give_up.is_set()):
            log.warning("the values of %s are not all finite: what was saved in %s is of no use", broken, folder)

    def _write(self, write: Callable[[str], Any]) -> None:
        """Whole before it has its name."""
        assert self._asked is not None
        try:
            save_whole(self._asked[1], write)
        except _native.CancelledError:
            return  # give_up() answers
        except Exception as error:
            self._answer(error)
        except BaseException as error:  # Ctrl-C, where training waits
            self._answer(error)
            raise
        else:
            self._answer(None)

    def _answer(self, error: BaseException | None) -> None:
        assert self._asked is not None
        step, folder, who = self._asked
        self._asked = None
        if error is None:
            log.warning("the model after step %d was asked for, and written to %s", step, folder)
            who.written()
        else:
            log.warning("the model after step %d was asked for and not written, the run goes on: %s", step, error)
            who.failed(str(error))
