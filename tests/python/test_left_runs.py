"""What the same command finds that was left by a run which was stopped, or which had another model."""

import json
import shutil
import signal

import pytest
from program import changed, needs_torch, run, small, start, steps_of, the_error, wait_until
from safetensors.torch import load_file, save_file

pytestmark = needs_torch

TRAIN = ["train", "--model", "model", "--data", "text.txt", "--lr", "1e-3", "--steps", "100000", "--out", "out"]
STORE = ["--storage", "store", "--log-json", "log.json"]


@pytest.fixture
def made(work):
    for seed, name in enumerate(("model", "other")):
        run(work, "init", "--config", "config.json", "--out", name, "--seed", str(seed))
    return work


def stopped(work, *words):
    """Ends with Ctrl-C after a few steps; returns how many."""
    process = start(work, *words)
    wait_until(lambda: (work / "log.json").exists() and len(steps_of(work / "log.json")) > 2)
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 130, said
    return len(steps_of(work / "log.json"))


@pytest.mark.parametrize("adapters", [[], ["--method", "lora"]])
def test_a_run_does_not_go_on_with_other_weights(made, adapters):
    words = [*TRAIN, *adapters, *small(*STORE, "--durability", "step")]
    step = stopped(made, *words)
    (made / "model").rename(made / "kept")
    shutil.copytree(made / "other", made / "model")
    refused = run(made, *words, ok=False)
    assert refused.returncode == 2 and "the run whose state is here had other weights in --model: " in the_error(refused.stderr), refused.stderr
    # The same values of another type are the same weights.
    shutil.rmtree(made / "model")
    (made / "kept").rename(made / "model")
    file = made / "model" / "model.safetensors"
    save_file({name: tensor.float() for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    done = run(made, *changed(words, {"--steps": str(step)}))
    assert f"the run is finished, after step {step}" in done.stderr and (made / "out").exists()


def test_a_stopped_run_is_not_taken_for_a_finished_one(made):
    words = [*TRAIN, *small(*STORE, "--durability", "export-only")]
    step = stopped(made, *words)
    before = {path.name: path.read_bytes() for path in (made / "out").iterdir()}
    assert json.loads(before["tierflow_run.json"])["stopped"] == {"step": step, "of": 100000}
    for other, said in [
        (words, f"out: holds what this very run trained until it was stopped after step {step} of 100000, and its state is gone"),
        ([*words, "--fresh"], f"until it was stopped after step {step} of 100000"),
        ([word for word in words if word not in ("--storage", "store", "--durability", "export-only")], f"until it was stopped after step {step} of 100000"),
        (changed(words, {"--lr": "1e-4"}), f"holds what a run that was stopped after step {step} of 100000 trained, which stays; that run had --lr 0.001, not 0.0001"),
    ]:
        refused = run(made, *other, ok=False)
        assert refused.returncode == 2 and said in the_error(refused.stderr), refused.stderr
    assert {path.name: path.read_bytes() for path in (made / "out").iterdir()} == before
    # It is a model like others.
    run(made, *changed(words, {"--model": "out", "--out": "more", "--steps": "2", "--storage": "again"}))
    assert "stopped" not in json.loads((made / "more" / "tierflow_run.json").read_text())


def test_an_epoch_takes_every_sequence(work):
    """The last step is filled up from the beginning; a step that takes some sequences several times is warned of."""
    (work / "text.txt").write_text("".join(chr(97 + i % 26) for i in range(10 * 64)))
    words = ["train", "--config", "config.json", "--data", "text.txt", "--held-out", "0", "--log-json", "log.json", "--micro-batches", "2", *small("--sequence-length", "64")]
    for epochs, steps in [("1", 3), ("2", 5)]:
        said = run(work, *words, "--epochs", epochs, "--out", f"out{epochs}").stderr
        assert f"10 training sequences of 64 tokens, 0 held out; {steps} steps of 256 tokens" in said and "warning" not in said
        assert len(steps_of(work / "log.json")) == steps
    said = run(work, *changed(words, {"--micro-batches": "6"}), "--epochs", "1", "--out", "large").stderr
    assert "1 steps of 768 tokens" in said and "warning: a step takes more sequences than there are" in said
