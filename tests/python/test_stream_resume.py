"""Checkpoints of streamed models: a run that was stopped, or killed, goes on with the bits of one that was not."""

import contextlib
import errno
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys

import pytest
from streaming import GPT2, GROUPED, VOCAB, batches, make, masters, roomy, scarce, tierflow, torch, transformers

LR = 1e-3


def steps(model, opt, data):
    losses = []
    for batch in data:
        loss = model(**batch).loss
        loss.backward()
        losses.append((loss.item(), torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()))
        opt.step()
        opt.zero_grad()
    return losses


def tied_with_dropout(seed):
    torch.manual_seed(seed)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**{**GPT2, "resid_pdrop": 0.1})).bfloat16().train()


@pytest.mark.parametrize("precision", ["fp32-master+adam8", "fp32-master+adam32", "bf16-sr+adam8"])
def test_a_loop_resumes_with_its_bits_under_another_budget(precision, tmp_path):
    data = batches("gpt2", 5)

    def optimizer(model):
        named = dict(model.named_parameters())
        groups = [{"params": [p for n, p in named.items() if "bias" not in n], "weight_decay": 0.1}, {"params": [p for n, p in named.items() if "bias" in n]}]
        return tierflow.optim.AdamW(groups, lr=LR)

    model = tierflow.wrap(tied_with_dropout(0), scarce(tmp_path / "store", precision=precision))
    opt = optimizer(model)
    schedule = torch.optim.lr_scheduler.LinearLR(opt, 1.0, 0.1, 5)
    steps(model, opt, data[:2])
    schedule.step()
    tierflow.save_checkpoint(model, opt, tmp_path / "checkpoint")
    expected, weights = steps(model, opt, data[2:]), masters(model)
    tierflow.close(model)

    model = tierflow.wrap(tied_with_dropout(1), roomy(precision=precision))
    opt = optimizer(model)
    steps(model, opt, data[:1])  # device copies and moments that must go
    tierflow.load_checkpoint(model, opt, tmp_path / "checkpoint")
    assert opt.param_groups[0]["lr"] == schedule.get_last_lr()[0] != LR
    assert steps(model, opt, data[2:]) == expected
    assert all(torch.equal(master, weights[name]) for name, master in masters(model).items())
    tierflow.close(model)


def test_adapters_over_a_frozen_base_resume(tmp_path):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1)

    def adapted(seed):
        base = tierflow.wrap(make("llama").requires_grad_(False), roomy(trainable=False))
        torch.manual_seed(seed)
        model = peft.get_peft_model(base, config).train()
        return model, tierflow.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LR)

    data = batches("llama", 4)
    model, opt = adapted(0)
    steps(model, opt, data[:2])
    tierflow.save_checkpoint(model, opt, tmp_path / "checkpoint")
    expected = steps(model, opt, data[2:])
    model, opt = adapted(1)
    tierflow.load_checkpoint(model, opt, tmp_path / "checkpoint")
    assert steps(model, opt, data[2:]) == expected


def test_accelerate_resumes_with_its_bits(tmp_path):
    accelerate = pytest.importorskip("accelerate")
    from tierflow.hf import attach_accelerator

    data, runs = batches("llama", 4), []
    for resumed in (False, True):
        accelerator = accelerate.Accelerator(cpu=True)
        model = tierflow.wrap(make("llama"), roomy())
        model, opt = accelerator.prepare(model, tierflow.optim.AdamW(model.parameters(), lr=LR))
        attach_accelerator(accelerator, opt.optimizer)
        if resumed:
            accelerator.load_state(tmp_path / "state")
        else:
            steps(model, opt, data[:2])
            accelerator.save_state(tmp_path / "state")
        runs.append((steps(model, opt, data[2:]), masters(model)))
        tierflow.close(model)
    assert runs[0][0] == runs[1][0]
    assert all(torch.equal(master, runs[1][1][name]) for name, master in runs[0][1].items())


@pytest.fixture
def saved(tmp_path):
    model = tierflow.wrap(make("llama"), roomy())
    opt = tierflow.optim.AdamW(model.parameters(), lr=LR)
    steps(model, opt, batches("llama", 1))
    tierflow.save_checkpoint(model, opt, tmp_path / "checkpoint")
    yield model, opt, tmp_path / "checkpoint"
    tierflow.close(model)


def test_a_checkpoint_of_something_else_is_refused_and_changes_nothing(saved, tmp_path):
    _, _, folder = saved
    with pytest.raises(tierflow.InputError, match="no checkpoint.json"):
        tierflow.load_checkpoint(*saved[:2], tmp_path / "nowhere")
    cases = {
        "other parameters": (make("qwen3"), {}),
        "another type or shape": (transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**GROUPED, "intermediate_size": 96})).bfloat16(), {}),
        "precision fp32-master.adam32": (make("llama"), {"precision": "fp32-master+adam8"}),
    }
    for text, (module, options) in cases.items():
        model = tierflow.wrap(module, roomy(**options))
        opt = tierflow.optim.AdamW(model.parameters(), lr=LR)
        before = masters(model)
        with pytest.raises(tierflow.InputError, match=text):
            tierflow.load_checkpoint(model, opt, folder)
        assert all(torch.equal(master, before[name]) for name, master in masters(model).items())
        tierflow.close(model)
    whole = (folder / "streamed.safetensors").read_bytes()
    for cut in (4, 100, len(whole) // 2, len(whole) - 1):
        (folder / "streamed.safetensors").write_bytes(whole[:cut])
        with pytest.raises(tierflow.InputError, match="streamed.safetensors"):
            tierflow.load_checkpoint(*saved[:2], folder)


def test_saving_is_between_steps_and_all_or_nothing(saved, monkeypatch):
    model, opt, folder = saved
    before = json.loads((folder / "checkpoint.json").read_text())
    model(**batches("llama", 1)[0]).loss.backward()
    for call in (tierflow.save_checkpoint, tierflow.load_checkpoint):
        with pytest.raises(tierflow.UsageError, match="between steps"):
            call(model, opt, folder)
    opt.step()
    opt.zero_grad()
    monkeypatch.setattr("tierflow.checkpoint.save_file", lambda *_: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(tierflow.EnvironmentError, match="checkpoint: cannot be written: full"):
        tierflow.save_checkpoint(model, opt, folder)
    assert json.loads((folder / "checkpoint.json").read_text()) == before and [p.name for p in folder.parent.iterdir()] == ["checkpoint"]
    monkeypatch.undo()
    folder.rename(folder.with_name("checkpoint.old"))  # the machine stopped between two renames
    tierflow.load_checkpoint(model, opt, folder)
    tierflow.save_checkpoint(model, opt, folder)
    assert json.loads((folder / "checkpoint.json").read_text())["steps"] == before["steps"]
    assert [p.name for p in folder.parent.iterdir()] == ["checkpoint"]


@pytest.mark.parametrize("crash", range(4))
def test_other_files_in_the_folder_stay(crash, saved, monkeypatch):
    """Also where the machine stops at one of the renames: at the next checkpoint they are back."""
    model, opt, folder = saved
    (folder / "final").mkdir()
    for name in ("final/weights", "scheduler.pt"):
        (folder / name).write_text(name)
    left, rename = crash, pathlib.Path.rename

    def crashing(path, target):
        nonlocal left
        left -= 1
        if left == 0:
            raise Crash
        return rename(path, target)

    monkeypatch.setattr(pathlib.Path, "rename", crashing)
    with contextlib.suppress(Crash):
        tierflow.save_checkpoint(model, opt, folder)
    monkeypatch.undo()
    tierflow.load_checkpoint(model, opt, folder)
    if crash:
        tierflow.save_checkpoint(model, opt, folder)
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoint.json", "final", "others.safetensors", "scheduler.pt", "streamed.safetensors"]
    assert all((folder / name).read_text() == name for name in ("final/weights", "scheduler.pt"))
    assert [path.name for path in folder.parent.iterdir()] == ["checkpoint"]


def test_a_folder_behind_a_link_is_replaced_where_it_lies(saved, tmp_path):
    model, opt, _ = saved
    (tmp_path / "drive").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "drive")
    for _ in range(3):
        tierflow.save_checkpoint(model, opt, tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "drive/checkpoint.json").is_file()
    tierflow.load_checkpoint(model, opt, tmp_path / "link")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "drive", "link"]


def test_what_cannot_be_written_to_is_named(saved, tmp_path, monkeypatch):
    model, opt, folder = saved
    monkeypatch.chdir(tmp_path)
    for where in (".", "..", "/"):
        with pytest.raises(tierflow.UsageError, match="is the working folder, or above it"):
            tierflow.save_checkpoint(model, opt, where)
    mine = tmp_path / "mine.old"
    mine.mkdir()
    (mine / "of the user").write_text("mine")
    with pytest.raises(tierflow.UsageError, match="mine.old is in the way: rename it"):
        tierflow.save_checkpoint(model, opt, "mine")
    assert [path.name for path in mine.iterdir()] == ["of the user"] and not (tmp_path / "mine").exists()
    shutil.rmtree(mine)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(tierflow.UsageError, match="file is a file: name a folder"):
        tierflow.save_checkpoint(model, opt, tmp_path / "file")
    with pytest.raises(tierflow.EnvironmentError, match="file/below: cannot be written: .*Not a directory"):
        tierflow.save_checkpoint(model, opt, tmp_path / "file/below")
    for save in (lambda to: tierflow.save(model, to), model.save_pretrained):
        with pytest.raises(tierflow.EnvironmentError, match="file: cannot be written: .*exists"):
            save(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine" and sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "file"]


@pytest.mark.parametrize("number, kind", [(errno.EIO, tierflow.StorageError), (errno.ENOSPC, tierflow.EnvironmentError)])
def test_a_drive_that_fails_is_told_from_one_that_is_full(number, kind, saved, monkeypatch):
    def failing(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("tierflow.checkpoint.save_file", failing)
    with pytest.raises(kind, match=f"checkpoint: cannot be written: .*{os.strerror(number)}"):
        tierflow.save_checkpoint(*saved)


def test_a_checkpoint_has_its_name_when_it_is_on_the_drive(saved, monkeypatch):
    model, opt, folder = saved
    flush, rename, done = tierflow.folders._flush, pathlib.Path.rename, []
    monkeypatch.setattr("tierflow.folders._flush", lambda path: done.append(("flush", path)) or flush(path))
    monkeypatch.setattr(pathlib.Path, "rename", lambda path, to: done.append(("rename", path)) or rename(path, to))
    tierflow.save_checkpoint(model, opt, folder)
    partial = folder.with_name("checkpoint.partial")
    named = done.index(("rename", partial))
    files = {("flush", partial / name) for name in ("streamed.safetensors", "others.safetensors", "checkpoint.json")}
    assert files | {("flush", partial)} <= set(done[:named]) and done[named + 1] == ("flush", folder.parent)


class Crash(BaseException):
    """The machine stops."""


@pytest.mark.parametrize("first", range(1, 6))
def test_a_folder_loads_through_two_crashes_in_a_row(first, saved, monkeypatch, tmp_path):
    """Each crash comes at one of the renames and removals, which it leaves half done."""
    model, opt, folder = saved
    left = 0

    def crashing(function):
        def call(path, *args, **kwargs):
            nonlocal left
            left -= 1
            if left != 0:
                return function(path, *args, **kwargs)
            if function is rmtree:
                (pathlib.Path(path) / "checkpoint.json").unlink(missing_ok=True)
            raise Crash

        return call

    rmtree = shutil.rmtree
    for second in range(1, 6):
        shutil.copytree(folder, folder.with_name("copy"))
        monkeypatch.setattr("tierflow.folders._flush", lambda path: None)
        monkeypatch.setattr(pathlib.Path, "rename", crashing(pathlib.Path.rename))
        monkeypatch.setattr("tierflow.folders.shutil.rmtree", crashing(rmtree))
        for crash in (first, second):
            left = crash
            with contextlib.suppress(Crash):
                tierflow.save_checkpoint(model, opt, folder)
        monkeypatch.undo()
        tierflow.load_checkpoint(model, opt, folder)
        for name in (".partial", ".old", ""):
            rmtree(folder.with_name(folder.name + name), ignore_errors=True)
        folder.with_name("copy").rename(folder)


def run_trainer(folder, resume, kill_at=None):
    """transformers.Trainer over a streamed model with dropout; its final masters as bytes. Kills the process before step kill_at."""
    from tierflow.hf import TierflowCallback

    torch.set_num_threads(1)
    folder.mkdir(exist_ok=True)
    model = tierflow.wrap(tied_with_dropout(0), scarce(folder / "store"))
    args = transformers.TrainingArguments(output_dir=folder / "out", per_device_train_batch_size=2, max_steps=6, save_steps=2, logging_steps=1, report_to=[],
                                          use_cpu=True, disable_tqdm=True, lr_scheduler_type="linear", warmup_steps=1, save_total_limit=2)  # fmt: skip
    generator = torch.Generator().manual_seed(5)
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(3, VOCAB, (16, 12), generator=generator)]
    opt = tierflow.optim.AdamW(model.parameters(), lr=LR)
    trainer = transformers.Trainer(model, args, train_dataset=rows, optimizers=(opt, None))
    TierflowCallback().attach(trainer)

    class Kill(transformers.TrainerCallback):
        def on_step_begin(self, args, state, control, **_):
            if state.global_step == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

    trainer.add_callback(Kill())
    trainer.train(resume_from_checkpoint=resume)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], masters(model), model


def test_a_killed_transformers_trainer_resumes_with_its_bits(tmp_path, caplog):
    pytest.importorskip("accelerate")
    losses, expected, model = run_trainer(tmp_path / "whole", False)
    tierflow.close(model)
    script = f"import sys; sys.path[:0] = {sys.path!r}; import pathlib, test_stream_resume as t; t.run_trainer(pathlib.Path({str(tmp_path / 'killed')!r}), False, 5)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert sorted(p.name for p in (tmp_path / "killed" / "out").iterdir()) == ["checkpoint-2", "checkpoint-4"]
    assert not list((tmp_path / "killed" / "store").glob("*"))  # nothing is left of the dead process
    resumed, weights, model = run_trainer(tmp_path / "killed", True)
    assert resumed == losses
    assert all(torch.equal(master, expected[name]) for name, master in weights.items())
    assert "moments" not in caplog.text  # they are restored, as the callback promises
    opt = tierflow.optim.AdamW(model.parameters(), lr=LR)
    opt.load_state_dict(torch.load(tmp_path / "killed/out/checkpoint-4/optimizer.pt"))
    assert "moments are not part of a state_dict" in caplog.text
    tierflow.close(model)
