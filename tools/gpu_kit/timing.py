"""How the lane scripts time work on a device, and say what they measured."""

import json
import time

import torch


def show(**values):
    print(json.dumps({key: float(f"{value:.4g}") if isinstance(value, float) else value for key, value in values.items()}), flush=True)


class Clock:
    """Times work on one device. `tiny`: one short turn, to see that a measurement runs at all."""

    def __init__(self, device):
        self.device, self.cuda = device, device == "cuda"
        self.tiny, self.measured, self.failed = not self.cuda, 0, False

    def wait(self):
        if self.cuda:
            torch.cuda.synchronize()

    def once(self, work, turns):
        self.wait()
        begin = time.perf_counter()
        for _ in range(turns):
            work()
        self.wait()
        return (time.perf_counter() - begin) / turns

    def seconds(self, work, lasting=0.15):
        """Of one turn: the best of three rounds that last about so long each, after one that warms up."""
        first = self.once(work, 1)
        if self.tiny:
            return first
        turns = max(1, min(2000, int(lasting / max(1e-6, self.once(work, 2)))))
        return min(self.once(work, turns) for _ in range(3))

    def measure(self, what, work, may_refuse=False):
        """Shows what `work` returns, a dictionary; where torch refuses or memory runs out, why there is nothing. Other measurements go on."""
        try:
            show(**what, **work())
            self.measured += 1
        except (RuntimeError, NotImplementedError, TypeError) as error:
            self.failed = self.failed or not may_refuse
            show(**what, not_measured=str(error).splitlines()[0][:200] if str(error) else type(error).__name__)
        if self.cuda:
            torch.cuda.empty_cache()
