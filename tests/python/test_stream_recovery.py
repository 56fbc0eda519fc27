"""A step that was broken off, by an exception or by Ctrl-C, leaves no trace after zero_grad(): the bits that follow are those of a run that never broke off."""

import contextlib
import pathlib
import sys

import pytest
from streaming import batches, make, masters, roomy, scarce, torch

import tierflow

STEPS = 3
OWN = {str(pathlib.Path(tierflow.__file__).parent / name) for name in ("engine.py", "frames.py", "lanes.py", "modes.py", "trainer.py", "turns.py")}


class Interrupt:
    """Ctrl-C at the n-th line that the main thread runs of the code that steps. n = 0: never; `count` says how many there are."""

    def __init__(self, n=0):
        self.n, self.count = n, 0

    def _trace(self, frame, event, _):
        if frame.f_code.co_filename not in OWN:
            return None
        if event == "line":
            self.count += 1
            if self.count == self.n:
                raise KeyboardInterrupt
        return self._trace

    def __enter__(self):
        self.before = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_):
        sys.settrace(self.before)


class Run:
    def __init__(self, plan, micro_batches):
        self.model = tierflow.wrap(make("llama"), plan)
        self.opt = tierflow.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.trainer = tierflow.Trainer(self.model, self.opt, clip=1.0)
        self.engine, self.seen = self.trainer.engine, []
        data = batches("llama", STEPS * micro_batches)
        self.data = [data[i * micro_batches : (i + 1) * micro_batches] for i in range(STEPS)]

    def step(self, number):
        result = self.trainer.step(self.data[number])
        assert not result.skipped
        self.seen.append((result.loss, result.grad_norm))

    def end(self):
        found = masters(self.model)
        self.engine.close()
        return self.seen, found


def unbroken(micro_batches):
    run = Run(roomy(), micro_batches)
    for number in range(STEPS):
        run.step(number)
    return run.end()


def expect_same(found, expected):
    assert found[0] == expected[0]
    assert all(torch.equal(found[1][name], values) for name, values in expected[1].items())


def plan_of(kind, folder):
    return roomy() if kind == "roomy" else scarce(folder / "state")


@pytest.mark.parametrize("kind", ["roomy", "scarce"])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_broken_off_at_every_visit(tmp_path, kind, micro_batches):
    run = Run(plan_of(kind, tmp_path), micro_batches)
    take = run.engine.turn
    visits, breaks_at = 0, 0

    @contextlib.contextmanager
    def turn(*args):
        nonlocal visits
        with take(*args) as weights:
            yield weights
            visits += 1
            if visits == breaks_at:
                raise RuntimeError("broken off")

    run.engine.turn = turn
    for _ in range(2):  # the first one of all makes visits that no later one makes
        visits = 0
        run.trainer.backward(run.data[0])
        run.opt.zero_grad()
    every = visits
    assert every >= 9 * micro_batches
    for number in range(STEPS):
        # All visits in the course of the steps; from one step to the next other ones come last.
        for at in range(1 + number, every + 1, STEPS):
            visits, breaks_at = 0, at
            with pytest.raises(RuntimeError, match="broken off"):
                run.trainer.backward(run.data[number])
            with pytest.raises(tierflow.UsageError, match="incomplete"):
                run.opt.step()
            run.opt.zero_grad()
        breaks_at = 0
        run.step(number)
    expect_same(run.end(), unbroken(micro_batches))


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_ctrl_c_at_any_line(micro_batches):
    run = Run(roomy(), micro_batches)
    for _ in range(2):  # the first one of all runs lines that no later one runs
        with Interrupt() as never:
            run.trainer.backward(run.data[0])
        run.opt.zero_grad()
    assert never.count > 500
    for number in range(STEPS):
        for at in range(1 + 17 * number, never.count, 1 + never.count // 25):
            with pytest.raises(KeyboardInterrupt), Interrupt(at):
                run.trainer.backward(run.data[number])
            run.opt.zero_grad()
        run.step(number)
    expect_same(run.end(), unbroken(micro_batches))


def test_what_is_left_of_a_broken_off_step_can_be_looked_at():
    run = Run(roomy(), 2)
    run.trainer.backward(run.data[0])
    run.opt.zero_grad()
    take = run.engine.turn

    @contextlib.contextmanager
    def turn(turn, phase, keep=False):
        with take(turn, phase, keep) as weights:
            yield weights
            if keep:
                raise RuntimeError("broken off")

    run.engine.turn = turn
    with pytest.raises(RuntimeError, match="broken off"):
        run.trainer.backward(run.data[0])
    run.engine.turn = take
    there = [p for p in run.model.parameters() if p.grad is not None]
    assert there
    for parameter in there:
        assert parameter.grad.float().abs().max() > 0  # what was kept on the device, brought to the host
    with pytest.raises(tierflow.UsageError, match="between steps"):
        run.engine.native.save_state("/nonexistent/state")
    run.opt.zero_grad()
    assert all(p.grad is None for p in run.model.parameters())
