"""`tierflow export` beside a run that holds the state: the run writes its model between two steps."""
import fcntl
import json
import os
import re
import shutil
import signal
import socket

import pytest
from program import changed, needs_torch, run, small, start, steps_of, the_error, wait_until

pytestmark = needs_torch

STEPS = 6
TRAIN = ["train", "--config", "config.json", "--data", "text.txt", "--out", "out", "--steps", str(STEPS), "--lr", "1e-3", "--warmup", "2",
         *small("--storage", "store", "--host-memory", "1MiB", "--log-json", "log.json")]  # fmt: skip
EXPORT = ["export", "--storage", "store", "--out", "so-far"]


def losses(work):
    return [record["loss"] for record in steps_of(work / "log.json")]


def weights(folder):
    return (folder / "model.safetensors").read_bytes()


def training(work, *more, steps=1, train=TRAIN):
    """A run that has done so many steps, and is stopped."""
    process = start(work, *train, *more, delay_ms=15)
    wait_until(lambda: (work / "log.json").exists() and len(steps_of(work / "log.json")) >= steps)
    process.send_signal(signal.SIGSTOP)
    return process


def asking(work, out="so-far"):
    """An export that waits for the run's answer."""
    process = start(work, *changed(EXPORT, {"--out": out}))
    assert "trains with this state: it writes its model after the step that runs" in process.stderr.readline()
    return process


@pytest.mark.parametrize("beside", [False, True])
def test_the_run_writes_its_model_and_goes_on_to_the_bit(work, beside):
    """beside: one model on the way follows the other, and each is written while training goes on."""
    run(work, *TRAIN)
    expected, result = losses(work), weights(work / "out")
    shutil.rmtree(work / "out")
    (work / "log.json").unlink()
    process = training(work, "--export-every", "1", "--durability", "step", train=changed(TRAIN, {"--host-memory": "2MiB"}) if beside else TRAIN)
    (work / "mine").mkdir()
    (work / "mine" / "notes").write_text("")
    refused, within, asks = asking(work, "mine"), asking(work, "out/../out/mine"), asking(work)
    process.send_signal(signal.SIGCONT)
    assert "out/mine: is in the folder that the run writes its own result to" in the_error(within.communicate(timeout=60)[1]) and within.returncode == 2
    assert "mine: --out exists and is not an empty folder" in the_error(refused.communicate(timeout=60)[1]) and refused.returncode == 2
    step = int(re.search(r"result: .*/so-far, the model after step (\d+)\n", asks.communicate(timeout=60)[1])[1])
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 0 and losses(work) == expected and weights(work / "out") == result
    assert 0 < step < STEPS and weights(work / "so-far") == weights(work / "out" / f"checkpoint-{step}") != result
    assert (work / "so-far" / "config.json").exists() and (work / "so-far" / "tierflow_run.json").exists()
    assert f"model after step {step} written to {work / 'so-far'}" in said and "was asked for and not written, the run goes on" in said


def test_what_is_taken_back_is_not_written(work):
    process = training(work)
    asks = asking(work)
    asks.send_signal(signal.SIGINT)
    assert asks.wait(30) == 130
    process.send_signal(signal.SIGCONT)
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 0 and not (work / "so-far").exists() and "so-far" not in said


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT])
def test_where_the_run_ends_first_its_committed_state_is_exported(work, end):
    process = training(work, "--durability", "step", steps=2)
    asks = asking(work)
    process.send_signal(end)
    process.send_signal(signal.SIGCONT)
    said = asks.communicate(timeout=60)[1]
    process.communicate(timeout=60)
    assert asks.returncode == 0 and said.endswith("/so-far\n"), said
    run(work, *changed(EXPORT, {"--out": "again"}))
    assert weights(work / "so-far") == weights(work / "again")


def test_a_run_that_ends_with_its_result_says_where_that_is(work):
    process = start(work, *changed(TRAIN, {"--steps": "1", "--log-json": "one.json"}), delay_ms=60)
    while True:  # until it trains
        asks = start(work, *EXPORT)
        said = asks.communicate(timeout=60)[1]
        if asks.returncode != 8 and "holds no state" not in said and "No such file" not in said:
            break
        assert process.poll() is None, said
    process.communicate(timeout=60)
    assert "the run ended before it wrote a model here; its own result is in the folder of its --out" in the_error(said)
    assert asks.returncode == 3 and not (work / "so-far").exists() and (work / "out" / "config.json").exists()


def test_who_holds_the_state_and_takes_no_request_is_named(work):
    run(work, *[word for word in TRAIN if word not in ("--out", "out")], "--no-export")
    with open(work / "store" / "state.tfv") as state:
        fcntl.flock(state, fcntl.LOCK_EX)
        refused = run(work, *EXPORT, ok=False)
    assert refused.returncode == 8 and f"process {os.getpid()} holds it; it takes no request" in the_error(refused.stderr)
    assert not (work / "so-far").exists()


def test_a_folder_whose_name_is_no_text_is_refused_and_the_run_goes_on(work):
    process = training(work)
    state = (work / "store" / "state.tfv").stat()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asks:
        asks.connect(f"\0tierflow-export-{state.st_dev:x}-{state.st_ino:x}")
        asks.send(os.fsencode(work) + b"/caf\xe9")
        process.send_signal(signal.SIGCONT)
        assert json.loads(asks.recv(1000)) == {"error": 2, "detail": "--out, with the folders above it, must be UTF-8: name another folder"}
    assert process.wait(60) == 0 and os.fsencode(work) + b"/caf\xe9" not in [os.fsencode(entry) for entry in work.iterdir()]


def test_another_user_gets_no_model(work):
    if os.geteuid() != 0:
        pytest.skip("only root may become another user")
    process = training(work)
    state = (work / "store" / "state.tfv").stat()
    child = os.fork()
    if child == 0:
        os.setuid(65534)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asks:
            asks.connect(f"\0tierflow-export-{state.st_dev:x}-{state.st_ino:x}")
            asks.send(str(work / "so-far").encode())
            try:
                os._exit(7 if asks.recv(100) == b"" else 1)
            except ConnectionResetError:
                os._exit(7)
    process.send_signal(signal.SIGCONT)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert process.wait(60) == 0 and not (work / "so-far").exists()
