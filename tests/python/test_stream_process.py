"""What interrupts a streamed model, and what it says of itself: Ctrl-C, forks and threads, plans and measured memory, writes that would be lost."""

import code
import copy
import gc
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import pytest
from streaming import LR, UP, batches, make, masters, roomy, scarce, tierflow, torch

# The optimizer.


@pytest.mark.parametrize("trainer", [False, True])
def test_an_interrupted_step_can_be_given_up(trainer, model, batch):
    opt = tierflow.optim.AdamW(model.parameters(), lr=LR)
    layer_major = tierflow.Trainer(model, opt)
    mlp, calls = model.model.layers[1].mlp, []
    original = mlp.forward

    def interrupted(x):
        calls.append(torch.is_grad_enabled())
        if calls[-1]:
            raise KeyboardInterrupt  # in the recomputation of the backward
        return original(x)

    before = masters(model)
    mlp.forward = interrupted
    with pytest.raises(KeyboardInterrupt):
        layer_major.step([batch, batch]) if trainer else model(**batch).loss.backward()
    mlp.forward = original
    with pytest.raises(tierflow.UsageError, match="gradients are incomplete"):
        opt.step()
    opt.zero_grad()
    assert all(torch.equal(master, before[name]) for name, master in masters(model).items())
    fresh = tierflow.wrap(make("llama"), roomy())
    other = tierflow.optim.AdamW(fresh.parameters(), lr=LR)
    assert layer_major.step([batch]).loss == tierflow.Trainer(fresh, other).step([batch]).loss
    assert all(torch.equal(master, masters(fresh)[name]) for name, master in masters(model).items())


@pytest.mark.parametrize("backward", [False, True])
def test_an_interrupt_while_waiting_for_weights(backward, model, batch):
    """The signal is raised as the wait returns: the turn that was taken is given back."""
    from tierflow.model import engine_of

    engine, expected = engine_of(model), model(**batch).loss.item()

    class Interrupting:
        def __init__(self, native):
            self.native, self.armed = native, True

        def __getattr__(self, name):
            return getattr(self.native, name)

        def enter(self, turn, phase, *rest):
            weights = self.native.enter(turn, phase, *rest)
            if self.armed and (phase == "backward") == backward:
                self.armed = False
                raise KeyboardInterrupt
            return weights

    engine.native = Interrupting(engine.native)
    with pytest.raises(KeyboardInterrupt):
        model(**batch).loss.backward()
    engine.native = engine.native.native
    opt = tierflow.optim.AdamW(model.parameters(), lr=LR)
    opt.zero_grad()
    assert model(**batch).loss.item() == expected
    assert tierflow.Trainer(model, opt).step([batch]).loss == expected


def test_an_interrupt_while_a_micro_batch_runs_its_own_code(model, batch):
    """Ctrl-C reaches the main thread, which waits for the micro-batch's: it waits for its rest too, and the next step starts clean."""
    opt, armed = tierflow.optim.AdamW(model.parameters(), lr=LR), [True]

    def loss(model, batch):
        out = model(**batch).loss
        if armed.pop() if armed else False:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.2)
        return out

    layer_major = tierflow.Trainer(model, opt, loss=loss)
    with pytest.raises(KeyboardInterrupt):
        layer_major.step([batch, batch])
    opt.zero_grad()
    fresh = tierflow.wrap(make("llama"), roomy())
    other = tierflow.Trainer(fresh, tierflow.optim.AdamW(fresh.parameters(), lr=LR))
    for _ in range(2):
        assert layer_major.step([batch, batch]).loss == other.step([batch, batch]).loss
    assert all(torch.equal(master, masters(fresh)[name]) for name, master in masters(model).items())


def test_plan_prints_both_prices(tmp_path):
    plan = tierflow.plan(make("llama"), tierflow.Budget("600KiB", "1MiB", [tmp_path], activations=0.0), micro_batches=4, precision="fp32-master+adam32")
    text, e = str(plan), plan.estimate
    assert "tierflow.Trainer" in text and "your own loop" in text and "4 micro-batches" in text
    assert e["parameters"] == sum(p.numel() for p in make("llama").parameters())
    assert e["loop_read"] > e["layer_major_read"] > 0 and e["loop_link"] > 3 * e["layer_major_link"]
    streamed = tierflow.wrap(make("llama"), plan_with_files(plan))
    counted = tierflow.stats(streamed)["memory"]
    assert counted["device_used"] == e["device_bytes"] and counted["host_used"] == e["host_bytes"] and counted["storage_bytes"] >= e["storage_bytes"]
    tierflow.close(streamed)


def plan_with_files(plan):
    plan.allow_any_filesystem = True
    return plan


@pytest.mark.parametrize("fused_layers", [False, True])
def test_a_notebook(fused_layers, tmp_path):
    """Cells as they are typed: an interrupt in the middle of one, then on; and the model made again, under the same names and budget."""
    make("llama").save_pretrained(tmp_path / "model")
    cells = code.InteractiveConsole({"tierflow": tierflow, "batch": batches("llama", 1)[0], "folder": tmp_path / "model", "plan": scarce(tmp_path / "store")})

    def cell(source):
        """The kind of error that it ended with."""
        sys.last_value = None
        assert not cells.push(source)
        return type(sys.last_value)

    def files():
        return sum(str(tmp_path / "store") in os.path.realpath(link) for link in pathlib.Path("/proc/self/fd").iterdir())

    def stop(*_):
        raise KeyboardInterrupt

    load = f"model = tierflow.load(folder, plan, fused_layers={fused_layers}).train(); opt = tierflow.optim.AdamW(model.parameters(), lr={LR})"
    step = "loss = model(**batch).loss; loss.backward(); opt.step(); opt.zero_grad(); losses.append(loss.item())"
    cells.locals.update(losses=[], stop=stop)
    for _ in range(2):
        assert cell(load) is type(None)
        assert cell(step) is type(None)
        assert cell("hook = model.model.layers[1].register_forward_pre_hook(stop)") is type(None)
        assert cell(step) is KeyboardInterrupt
        assert cell("hook.remove()") is type(None)
        assert cell(step) is type(None)
    assert cell("1 / 0") is ZeroDivisionError  # a console keeps the last error's frames, and through them its model
    losses = cells.locals["losses"]
    assert losses[:2] == losses[2:] and losses[0] != losses[1]
    gc.collect()
    assert files() == 2  # of one model: its state and its scratch
    assert cell("del model, opt, loss, hook") is type(None)
    gc.collect()
    assert files() == 0


def test_import_alone_is_quiet_and_starts_nothing():
    script = f"import sys; sys.path[:0] = {sys.path!r}; import tierflow, threading; print(threading.active_count(), 'transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert (done.stdout.split(), done.stderr) == (["1", "False"], "")


def test_activations_are_measured_and_said_where_they_exceed_their_share(caplog):
    nn, rows = torch.nn, 16384
    needs = 2 * rows * (3 * 256 + 1024 + 1024 + 256)  # in bf16: the blocks' inputs and what one recomputation holds

    class Stack(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(3))

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return x.sum()

    for share in (0.75, 0.05):
        caplog.clear()
        model = tierflow.wrap(Stack(), tierflow.Plan(tierflow.Budget("300MiB", "128MiB", activations=share)))
        assert tierflow.stats(model)["memory"]["activations_peak"] == 0
        for _ in range(2):
            model(torch.ones(rows, 256, dtype=torch.bfloat16)).backward()
        memory = tierflow.stats(model)["memory"]
        assert 0.9 * needs < memory["activations_peak"] < 2 * needs
        assert caplog.text.count("activations take") == (share < 0.5) == (memory["activations_peak"] > memory["activations_share"])
        tierflow.close(model)
    assert "not enforced" in str(tierflow.plan(make("llama"), tierflow.Budget("64MiB", "128MiB")))


def test_writing_to_a_part_is_written_and_writing_to_a_view_says_that_it_would_be_lost(model):
    weight = model.lm_head.weight
    with pytest.raises(tierflow.UsageError, match="under torch.no_grad"):
        weight[0] = 1.0
    with torch.no_grad():
        before = weight + 0
        weight[0] = 3.0
        weight[1:3] = torch.full((2, 64), 0.5)
        for lose in (lambda: weight[4].fill_(1), lambda: weight.view(-1).mul_(2), lambda: weight.data[4].zero_(), lambda: weight.unbind(0)[4].fill_(1),
                     lambda: torch.nn.init.zeros_(weight.T[:4])):  # fmt: skip
            with pytest.raises(tierflow.UsageError, match="would be lost"):
                lose()
        before[0], before[1:3] = 3.0, 0.5
        assert torch.equal(weight + 0, before)
        assert torch.equal(weight[4].clone().fill_(1), torch.ones(64, dtype=torch.bfloat16))
        torch._foreach_mul_([weight, model.model.norm.weight], 0.0)
        assert not (weight + 0).any() and not (model.model.norm.weight + 0).any()
    view = weight.detach()[0, :2]
    assert view.tolist() == view.float().numpy().tolist() == [0.0, 0.0] and torch.equal(copy.deepcopy(view), view)
    weight[3].float().sum().backward()
    assert weight.grad.norm() == 8


def test_asking_for_the_memory_of_a_parameter_says_what_to_do(model, tmp_path):
    from safetensors.torch import save_file

    for ask in (lambda: save_file(model.state_dict(), tmp_path / "x"), model.share_memory, model.lm_head.weight.data_ptr):
        with pytest.raises(tierflow.UsageError, match="save_pretrained"):
            ask()
    with pytest.raises(tierflow.UsageError, match="'cpu' or 'cuda'"):
        tierflow.Plan(tierflow.Budget("64MiB", "64MiB"), device="tpu")


def test_a_fork_and_another_thread_are_told_to_leave_the_model_alone(model, batch):
    loss = model(**batch).loss
    child = os.fork()
    if child == 0:
        try:
            model(**batch)
        except tierflow.UsageError as error:
            os._exit(7 if "fork of it" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    loss.backward()
    opt = tierflow.optim.AdamW(model.parameters(), lr=LR)
    opt.zero_grad()
    met, said = threading.Event(), []

    def other():
        try:
            model(**batch)
        except tierflow.UsageError as error:
            said.append(str(error))

    original = model.model.layers[1].mlp.forward

    def during(x):
        if not met.is_set():
            met.set()
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
        return original(x)

    model.model.layers[1].mlp.forward = during
    model(**batch).loss.backward()
    assert len(said) == 1 and "one thread" in said[0]
    opt.step()
