"""When a durable model commits, and who else is served meanwhile: commits beside the backward, requests for the model, gradient scalers."""

import json
import os
import shutil
import subprocess
import time

import pytest
from safetensors.torch import load_file
from streaming import BUILD, LR, batches, make, masters, tierflow, torch
from test_stream_durable import LARGE, STEPS, gpt2, plan_of, tierflow_program
from test_stream_durable import made as made  # a fixture


def committed(folder):
    """After which step the state is committed, as another process sees it."""
    return json.loads(tierflow_program("status", folder, "--json")[1])["step"]


def comes_to(step, folder):
    deadline = time.time() + 60
    while committed(folder) != step:
        assert time.time() < deadline
        time.sleep(0.05)


def test_a_step_is_committed_beside_the_next_backward(made, tmp_path):
    model, opt, begin = made
    loss = model(**batches("gpt2", 3)[2]).loss
    assert committed(tmp_path / "a") == 1
    loss.backward()
    comes_to(2, tmp_path / "a")  # though no step() came
    opt.step()
    expected = masters(model)
    tierflow.close(model)
    model, _, done = begin()
    assert done == 3 and all(torch.equal(values, expected[name]) for name, values in masters(model).items())


@pytest.mark.parametrize("durable", [True, 2])
def test_a_step_waits_for_the_commit_before_it(durable, tmp_path):
    """When step() returns, the step before is committed, if it was due."""
    model = tierflow.wrap(gpt2(), plan_of([tmp_path / "b"], durable))
    opt = tierflow.optim.AdamW(model.parameters(), lr=LR)
    assert tierflow.resume(model, opt) == 0
    for step, batch in enumerate(batches("gpt2", STEPS)):
        for part in range(2):  # the first of them begins the commit
            (model(**batch).loss / 2).backward()
            assert part == 0 or committed(tmp_path / "b") <= step
        opt.step()
        assert committed(tmp_path / "b") == step // int(durable) * int(durable)
        opt.zero_grad()
    tierflow.close(model, discard=True)


def test_a_step_takes_no_gradient_before_the_last_commit_is_over(made):
    """However long the drive takes: the calls' order says it, not what time has made of it."""
    model, opt, _ = made
    engine, calls = tierflow.model.engine_of(model), []

    class Recording:
        def __init__(self, native):
            self.native = native

        def __getattr__(self, name):
            if name in ("begin_commit", "end_commit"):
                calls.append(name)
            return getattr(self.native, name)

    engine.native = Recording(engine.native)
    taking = engine.journal.take_gradients
    engine.journal.take_gradients = lambda: (calls.append("take_gradients"), taking())
    model(**batches("gpt2", 3)[2]).loss.backward()
    assert calls == ["begin_commit"]
    opt.step()
    assert calls[: calls.index("take_gradients")] == ["begin_commit", "end_commit"]
    engine.native = engine.native.native


def test_a_step_that_is_skipped_commits_no_weights(made, tmp_path):
    """All of it lies in memory: what did not change is not written again."""
    model, opt, _ = made

    def written():
        return tierflow.stats(model)["lanes"]["disk_write"]["bytes"]

    def step(skips):
        before = written()
        hook = model.transformer.h[0].register_forward_hook(lambda module, args, out: (out[0] * float("inf"), *out[1:]) if isinstance(out, tuple) else out * float("inf"))
        if not skips:
            hook.remove()
        model(**batches("gpt2", 1)[0]).loss.backward()
        hook.remove()
        opt.step()  # the step before is committed
        opt.zero_grad()
        return written() - before

    bytes_of_all = step(skips=True)
    assert bytes_of_all > 0
    assert step(skips=True) == 0 and tierflow.stats(model)["skipped_steps"] == 2
    assert step(skips=False) == 0 and step(skips=False) == bytes_of_all


def test_a_scaler_that_is_not_enabled_is_taken(tmp_path):
    for enabled, folder in ((False, "a"), (True, "b")):
        model = tierflow.wrap(gpt2(), plan_of([tmp_path / folder], size=LARGE))
        opt = tierflow.optim.AdamW(model.parameters(), lr=LR)
        scaler = torch.amp.GradScaler("cpu", enabled=enabled)
        if enabled:
            with pytest.raises(tierflow.UsageError, match="make it with enabled=False"):
                tierflow.resume(model, opt, scaler)
        assert tierflow.resume(model, opt, *([] if enabled else [scaler])) == 0
        scaler.scale(model(**batches("gpt2", 1)[0]).loss).backward()
        if enabled:
            with pytest.raises(tierflow.UsageError, match="make it with enabled=False"):
                scaler.unscale_(opt)
        else:
            scaler.unscale_(opt)
            scaler.step(opt)
            scaler.update()
            before = masters(model)
            tierflow.close(model)
            model = tierflow.wrap(gpt2(), plan_of([tmp_path / folder], size=LARGE))
            opt = tierflow.optim.AdamW(model.parameters(), lr=LR)
            assert tierflow.resume(model, opt, scaler) == 1
            assert all(torch.equal(values, before[name]) for name, values in masters(model).items())
        tierflow.close(model, discard=True)


class Asking:
    """`tierflow export` beside this process, which waits for its answer."""

    def __init__(self, storage, out):
        self.process = subprocess.Popen([BUILD / "tierflow", "export", "--storage", storage, "--out", out], stderr=subprocess.PIPE, text=True)
        assert f"process {os.getpid()} trains with this state" in self.process.stderr.readline()

    def answer(self):
        said = self.process.communicate(timeout=60)[1]
        return self.process.returncode, said


def tensors(path):
    return {name: (value.dtype, value.float().tolist()) for name, value in load_file(path).items()}


@pytest.mark.parametrize("adapters", [False, True])
def test_the_model_is_written_where_it_is_asked_for(adapters, tmp_path):
    def begin(folder):
        model = tierflow.wrap(make("llama").requires_grad_(not adapters), plan_of([tmp_path / folder], size=LARGE, trainable=not adapters))
        if adapters:
            import peft

            torch.manual_seed(1)
            model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj"]))
        opt = tierflow.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LR)
        assert tierflow.resume(model, opt) == 0
        return model, opt

    losses = {}
    for folder in ("plain", "asked"):
        model, opt = begin(folder)
        asks = refused = None
        losses[folder] = []
        for step, batch in enumerate(batches("llama", 3)):
            loss = model(**batch).loss
            loss.backward()
            if folder == "asked" and step == 1:
                (tmp_path / "full").mkdir()
                (tmp_path / "full" / "notes").touch()
                refused, asks = Asking(tmp_path / folder, tmp_path / "full"), Asking(tmp_path / folder, tmp_path / "so-far")
            opt.step()
            if folder == "asked" and step == 1:
                code, said = refused.answer()
                assert code != 0 and "--out exists and is not an empty folder" in said
                model.save_pretrained(tmp_path / "mine")
            if folder == "asked" and step == 2:  # that step is committed beside this one
                code, said = asks.answer()
                assert code == 0 and "so-far, the model after step 2" in said
            opt.zero_grad()
            losses[folder].append(loss.item())
        tierflow.close(model, discard=True)
    assert losses["asked"] == losses["plain"]
    assert {path.name for path in (tmp_path / "mine").iterdir()} - {"README.md"} == {path.name for path in (tmp_path / "so-far").iterdir()}
    for path in (tmp_path / "so-far").iterdir():
        mine = tmp_path / "mine" / path.name
        assert tensors(path) == tensors(mine) if path.suffix == ".safetensors" else json.loads(path.read_text()) == json.loads(mine.read_text())
    assert not [*tmp_path.glob("*.partial")]


def test_who_asks_a_model_that_ends_is_told(made, tmp_path):
    asks = Asking(tmp_path / "a", tmp_path / "so-far")
    time.sleep(0.5)
    tierflow.close(made[0])
    code, said = asks.answer()
    assert code == 0 and "result: " in said and (tmp_path / "so-far" / "config.json").exists()  # of what is committed


class Branches(torch.nn.Module):
    """Computes with as many of its blocks as the caller says."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(12))

    def forward(self, x, blocks):
        for block in list(self.blocks)[:blocks]:
            x = block(x)
        return x.float().square().mean()


def test_a_commit_beside_the_backward_has_the_updates_of_modules_that_this_step_leaves_out(tmp_path):
    def begin(folder):
        model = tierflow.wrap(Branches().bfloat16(), plan_of([tmp_path / folder]))
        opt = tierflow.optim.AdamW(model.parameters(), lr=1e-2)
        return model, opt, tierflow.resume(model, opt)

    x = torch.randn(8, 64, dtype=torch.bfloat16)
    model, opt, _ = begin("a")
    first = masters(model)
    model(x, 12).backward()
    opt.step()
    opt.zero_grad()
    model(x, 2).backward()  # some blocks are fetched ahead; the updates of the last ones wait for a forward that does not come
    comes_to(1, tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")  # what a kill would leave now
    expected = masters(model)
    tierflow.close(model, discard=True)
    model, _, done = begin("b")
    found = masters(model)
    assert done == 1 and all(torch.equal(found[name], expected[name]) and not torch.equal(found[name], first[name]) for name in expected)
    tierflow.close(model, discard=True)
