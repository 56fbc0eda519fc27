"""Schedulers of a durable run: what is kept of those within others, and functions that are others when the script starts again."""

import functools
import json
import subprocess
import sys
import time

import numpy
import pytest
from conftest import ROOT
from streaming import batches, tierflow, torch
from test_stream_durable import LARGE, LR, gpt2, plan_of, rates_of, scheduled
from tierflow.functions import described, digest_of

of = torch.optim.lr_scheduler
WARMUP = 4


def test_schedulers_within_others_are_kept_with_what_json_cannot_hold(tmp_path):
    def steps(opt):
        return [of.SequentialLR(opt, [of.LinearLR(opt, 0.1, 1.0, 2), of.MultiStepLR(opt, [2, 3], 0.5)], [2])]

    def restarts(opt):
        return [of.SequentialLR(opt, [of.CosineAnnealingWarmRestarts(opt, 2), of.LambdaLR(opt, lambda step: 0.5**step)], [3])]

    def multiplied(opt):
        return [of.ChainedScheduler([of.MultiStepLR(opt, [1, 3], 0.5), of.ExponentialLR(opt, 0.9)])]

    for name, make in ("steps", steps), ("restarts", restarts), ("multiplied", multiplied):
        expected = rates_of(make, LR, 6)
        assert scheduled(tmp_path / name, make, trains=3) == expected[:4], name
        assert scheduled(tmp_path / name, make, done=3, trains=3) == expected[3:], name
    assert len(set(rates_of(steps, LR, 6))) == 5

    def later(opt):
        return [of.SequentialLR(opt, [of.LinearLR(opt, 0.1, 1.0, 2), of.MultiStepLR(opt, [4], 0.5)], [2])]

    assert scheduled(tmp_path / "steps", later, done=6, trains=1) == rates_of(later, LR, 7)[6:]


def test_another_function_is_a_schedule_of_its_own_from_the_beginning(tmp_path):
    def decay(steps):  # each begins with the same rate
        return lambda opt: [of.LambdaLR(opt, lambda step: 0.5 ** (step / steps))]

    assert scheduled(tmp_path, decay(10), trains=3) == rates_of(decay(10), LR, 3)
    assert scheduled(tmp_path, decay(10), done=3, trains=1) == rates_of(decay(10), LR, 4)[3:]
    # Its code is the same, and a value that it closes over is not.
    assert scheduled(tmp_path, decay(5), done=4) == rates_of(decay(5), LR, 4)[4:] != rates_of(decay(10), LR, 4)[4:]

    def within(steps):
        return lambda opt: [of.SequentialLR(opt, [of.ConstantLR(opt, 0.5, 2), *decay(steps)(opt)], [2])]

    assert scheduled(tmp_path, within(7), done=4, trains=1) == rates_of(within(7), LR, 5)[4:]
    assert scheduled(tmp_path, within(9), done=5) == rates_of(within(9), LR, 5)[5:] != rates_of(within(7), LR, 5)[5:]


def test_a_function_that_is_the_same_leaves_what_the_loop_set(tmp_path):
    def begin():
        model = tierflow.wrap(gpt2(n_layer=1), plan_of([tmp_path / "s"], size=LARGE))
        opt = tierflow.optim.AdamW(model.parameters(), lr=LR)
        schedule = of.LambdaLR(opt, lambda step: 1.0)
        return model, opt, tierflow.resume(model, opt, schedule)

    model, opt, _ = begin()
    model(**batches("gpt2", 1)[0]).loss.backward()
    opt.param_groups[0]["lr"] = 7e-5
    opt.step()
    tierflow.close(model)
    model, opt, done = begin()
    assert done == 1 and opt.param_groups[0]["lr"] == 7e-5
    tierflow.close(model, discard=True)


def of_step(steps, shape=1.0):
    class Settings:
        pass

    settings = Settings()
    settings.steps, settings.seed = steps, object()
    return {
        "closure": lambda step: step / steps,
        "default": lambda step, steps=steps: step / steps,
        "attribute": lambda step: step / settings.steps,
        "partial": functools.partial(pow, steps),
        "keyword": functools.partial(lambda step, *, steps: step / steps, steps=steps),
        "inner": lambda step: [step / steps for _ in range(1)][0],
        "called": lambda step: ramp_of(step) / steps,
        "constants": eval(f"lambda step: step in {{'a', 'b', 'c'}} or step / {steps}"),  # noqa: S307
    }


def ramp_of(step):
    return min(step, WARMUP)


def halved(step):
    return halved(step - 1) / 2 if step else 1.0


def test_functions_are_told_apart_by_what_they_compute_with(monkeypatch):
    one, same, other = of_step(5), of_step(5), of_step(6)
    for name, function in one.items():
        assert described(function) == described(same[name]), name
        assert described(function) != described(other[name]), name
    before = described(one["called"])
    monkeypatch.setitem(globals(), "WARMUP", 3)  # of a function that it calls
    assert described(one["called"]) != before
    assert described(len) != described(max)
    assert described(halved) == described(halved)  # it calls itself
    assert '"streaming.batches"' in json.dumps(described(lambda step: batches(step)))  # of another module the name
    assert described(ramp_of) != described(of_step)


class Ramp:
    """Called by a scheduler."""

    def __init__(self, scale):
        self.scale = scale

    def __call__(self, step):
        return step / self.scale


class Halving(Ramp):
    def __call__(self, step):
        return step / self.scale / 2


def test_more_of_what_functions_compute_with(monkeypatch):
    assert digest_of(Ramp(3)) == digest_of(Ramp(3)) != digest_of(Ramp(4))
    assert described(Halving(3))["called"] != described(Ramp(3))["called"]
    monkeypatch.setitem(globals(), "SETTING", numpy.int64(3))
    by_number, cached = (lambda step: step / SETTING), functools.lru_cache(ramp_of)  # noqa: F821
    before, of_cached = digest_of(by_number), digest_of(cached)
    monkeypatch.setitem(globals(), "SETTING", numpy.int64(4))
    monkeypatch.setitem(globals(), "WARMUP", 3)
    assert digest_of(by_number) != before and digest_of(cached) != of_cached
    monkeypatch.setattr(Ramp, "factor", 1, raising=False)
    of_class = lambda step: step * Ramp.factor  # noqa: E731
    before = digest_of(of_class)
    monkeypatch.setattr(Ramp, "factor", 2)
    assert digest_of(of_class) != before
    # A global that only has the name of an attribute.
    of_attribute = lambda step, ramp=Ramp(3): step / ramp.scale  # noqa: E731
    before = digest_of(of_attribute)
    monkeypatch.setitem(globals(), "scale", 5)
    assert digest_of(of_attribute) == before


def test_what_a_function_computes_with_may_be_large_or_deep():
    rows = [{"messages": [{"role": "user", "content": str(number)}]} for number in range(200000)]
    nested = []
    for _ in range(5000):
        nested = [nested]
    begun = time.monotonic()
    assert digest_of(lambda step: step / len(rows)) != digest_of(lambda step: step / len(nested))
    assert time.monotonic() - begun < 2


SCRIPT = """
import functools, json, runpy
described = runpy.run_path({path!r})["described"]

class Schedule:
    rate = object()
    def __init__(self):
        self.steps, self.others = 5, [object()]
    def at(self, step):
        return self.steps / step if step in {{"a", "b", "c"}} else self.rate

known = Schedule()
print(json.dumps([described(function) for function in (known.at, lambda step: known.at(step), functools.partial(known.at, rate=known), [len, json, known])]))
"""


def test_the_same_function_is_so_in_another_process():
    code = SCRIPT.format(path=str(ROOT / "bindings/tierflow/functions.py"))
    texts = {subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": seed}).stdout for seed in "12"}
    assert len(texts) == 1 and "0x" not in texts.pop()


def test_a_scheduler_that_cannot_be_kept_is_refused(tmp_path):
    class Odd(of.StepLR):
        def step(self, epoch=None):
            super().step()
            self.seen = {self.last_epoch}

    with pytest.raises(tierflow.UsageError, match="the scheduler's seen is a set that JSON cannot hold"):
        scheduled(tmp_path, lambda opt: [of.SequentialLR(opt, [Odd(opt, 2), of.ConstantLR(opt)], [3])], trains=2)
