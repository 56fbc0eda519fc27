"""A run that is killed, stopped or cut off is gone on with by the same command, to the bit of one that never was."""
import hashlib
import json
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import tarfile
import time

import numpy
import pytest
from program import BUILD, MIB, again, changed, config, needs_torch, run, small, start, steps_of, the_error, wait_until, while_it_stands

pytestmark = needs_torch

STEPS = 6
SHIM = BUILD / "librecord_calls.so"  # built with the tests
TRAIN = ["train", "--config", "config.json", "--data", "text.txt", "--lr", "1e-3", "--warmup", "2", "--steps", str(STEPS), "--out", "out"]
STORE = ["--storage", "store", "--host-memory", "1MiB"]
TIGHT = small(*STORE, "--log-json", "log.json")


def weights(folder):
    return (folder / "model.safetensors").read_bytes()


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def losses(work):
    """By step, of all logs; what was done twice came out the same."""
    found = {}
    for log in sorted(work.glob("log.json*")):
        if not (text := log.read_text()).endswith("\n"):
            log.write_text(text[: text.rfind("\n") + 1])  # killed in the middle of a line
        for record in steps_of(log):
            assert found.setdefault(record["step"], record["loss"]) == record["loss"]
    return found


def uninterrupted(work, *more):
    words = [word if word != "out" else "whole" for word in TRAIN]
    assert "durability: none, without --storage: a crash loses the run" in run(work, *words, *small("--log-json", "whole.json", *more)).stderr
    return {record["step"]: record["loss"] for record in steps_of(work / "whole.json")}


@pytest.mark.parametrize("clip", ["1.0", "none"])
def test_killed_anywhere_it_goes_on_to_the_bit(work, clip):
    train = changed(TRAIN, {"--steps": "60"})
    run(work, *changed(train, {"--out": "whole"}), *small("--log-json", "whole.json", "--clip", clip))
    expected = {record["step"]: record["loss"] for record in steps_of(work / "whole.json")}
    chance = random.Random(5)
    words = [*train, *TIGHT, "--clip", clip]
    kills = 0
    while kills < 6:
        process = start(work, *words, delay_ms=4, stderr=subprocess.DEVNULL)
        begun = time.time()
        wait_until(lambda: process.poll() is not None or (work / "store" / "state.tfv").exists() and time.time() > begun + 0.2)
        time.sleep(chance.random() * 0.4)
        process.kill()
        if process.wait() == 0:
            break
        kills += 1
    assert kills > 2
    # Killed between its result and the end of its state, a run is finished too.
    if (work / "store" / "state.tfv").exists():
        done = again(work, *words)
        assert done.returncode == 0, done.stderr
    assert losses(work) == expected and sorted(expected) == list(range(1, 61))
    assert weights(work / "out") == weights(work / "whole")
    assert not [*work.glob("store/*")]


SETTINGS = {
    "threads": ["--engine", "threads"],
    "unclipped": ["--engine", "threads", "--clip", "none"],
    "io_uring": ["--engine", "io_uring"],
    "two-drives": ["--engine", "threads", "--storage", "store,other"],
    "two-drives-io_uring": ["--engine", "io_uring", "--storage", "other,store"],
    "resident": ["--engine", "io_uring", "--host-memory", "64MiB"],
    "lora": ["--engine", "threads", "--method", "lora"],
    "galore": ["--engine", "threads", "--method", "galore", "--rank", "8", "--update-gap", "7"],
    "rows": ["--engine", "threads", "--config", "wide.json", "--data", "ids.npy", "--sequence-length", "8", "--micro-batch", "1", "--host-memory", "4MiB"],
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_killed_at_each_call_it_goes_on_to_the_bit(work, setting):
    """At TIERFLOW_KILLS (make test-kills: 225) calls that change files, as many of each setting and evenly over its run, half a write included."""
    more = SETTINGS[setting]
    begin = TRAIN
    if "--method" in more:
        run(work, "init", "--config", "config.json", "--out", "base")
        begin = ["train", "--model", "base", *TRAIN[3:]]
    (work / "wide.json").write_text(json.dumps(config(hidden=32, layers=1, vocab=65536)))
    numpy.save(work / "ids.npy", numpy.random.default_rng(1).integers(0, 65536, 1000, dtype=numpy.uint16))
    options = {"--storage": "store", "--host-memory": "1MiB", **dict(zip(more[::2], more[1::2], strict=True))}
    begin = changed(begin, {"--steps": "30", **{option: value for option, value in options.items() if option in begin}})
    words = [*begin, *small(*(word for option, value in options.items() if option not in begin for word in (option, value))), "--log-json", "log.json", "--durability", "step", "--export-every", "10"]
    whole = run(work, *changed(words, {"--out": "whole", "--log-json": "whole.json"}), ok=False, env={"LD_PRELOAD": str(SHIM), "TIERFLOW_CALL_COUNT": "count"})
    if "io_uring" in more and "io_uring" in whole.stderr:
        pytest.skip("this machine has no io_uring")
    assert whole.returncode == 0, whole.stderr
    expected = {record["step"]: record["loss"] for record in steps_of(work / "whole.json")}
    calls, kills = int((work / "count").read_text()), max(1, int(os.environ.get("TIERFLOW_KILLS", 0)) // len(SETTINGS))
    assert calls >= 200

    def result(folder):
        return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*.safetensors")}

    assert len(result(work / "whole")) == 3
    assert ("parts that its tokens use" in whole.stderr) == (setting == "rows")
    killed = resumed = 0
    for i in range(kills):
        call = 1 + calls * (2 * i + 1) // (2 * kills)
        died = run(work, *words, ok=False, env={"LD_PRELOAD": str(SHIM), "TIERFLOW_KILL_AT": str(call)})
        done = died if died.returncode == 0 else again(work, *words)
        assert done.returncode == 0, f"call {call} of {calls}: {done.stderr}"
        killed += died.returncode == -signal.SIGKILL
        resumed += "resumed after step" in done.stderr
        assert losses(work) == expected and result(work / "out") == result(work / "whole"), f"call {call} of {calls}"
        assert not [*work.glob("store/*"), *work.glob("other/*")]
        for left in [work / "out", *work.glob("log.json*")]:
            shutil.rmtree(left) if left.is_dir() else left.unlink()
    assert killed >= kills * 0.75 and resumed >= kills * 0.4  # a run may have fewer calls than that which was counted


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_stopped_it_commits_and_goes_on_under_other_budgets(work, stop):
    expected = uninterrupted(work)
    process = start(work, *TRAIN, *TIGHT, delay_ms=40)
    wait_until(lambda: (work / "log.json").exists() and len(steps_of(work / "log.json")) >= 2)
    process.send_signal(stop)
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 128 + stop
    assert "the same command goes on from there" in said and "tierflow export --storage store --out" in said and not (work / "out").exists()
    stopped_at = int(re.search(r"the state after step (\d+) of", said)[1])
    run(work, "export", "--storage", "store", "--out", "so-far")
    # Enough memory for everything, and another engine; --resume says that there must be something.
    done = run(work, *TRAIN, "--resume", *small("--storage", "store", "--engine", "threads", "--log-json", "log.json"))
    assert f"resumed after step {stopped_at} of {STEPS}" in done.stderr and re.search(r"durability: every (step is|\d+ steps are) committed in store", done.stderr)
    assert min(record["step"] for record in steps_of(work / "log.json")) == stopped_at + 1
    assert losses(work) == expected and weights(work / "out") == weights(work / "whole") != weights(work / "so-far")


def stopped_run(work, *more):
    process = start(work, *TRAIN, *TIGHT, *more, delay_ms=40, stderr=subprocess.DEVNULL)
    wait_until(lambda: (work / "log.json").exists() and len(steps_of(work / "log.json")) >= 2)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130


def test_who_went_on_with_a_state_is_named(work):
    """Not who began it."""
    for _ in range(2):
        (work / "log.json").unlink(missing_ok=True)
        process = start(work, *changed(TRAIN, {"--steps": "1000"}), *TIGHT, delay_ms=10, stderr=subprocess.DEVNULL)
        wait_until(lambda: (work / "log.json").exists() and steps_of(work / "log.json"))
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        assert f"process {process.pid} on " in json.loads(run(work, "status", "store", "--json").stdout)["made_by"]


def test_another_run_is_refused_by_the_name_of_what_differs(work):
    stopped_run(work)
    before = files(work / "store")
    (work / "other.txt").write_text("Something else. " * 2000)
    for changes, names in [(["--seed", "3"], "--seed 0, not 3"), (["--clip", "none"], "--clip 1.0"), (["--micro-batches", "2"], "--micro-batches 1, not 2"),
                           (["--weight-decay", "0.5"], "--weight-decay 0.0, not 0.5"), (["--betas", "0.9,0.95"], "--betas [0.9,0.999], not [0.9,0.95]"), (["--eps", "1e-6"], "--eps 1e-08, not 1e-06"),
                           (["--data", "other.txt"], "other --data"), (["--precision", "bf16-sr+adam8"], "its precision is not")]:
        refused = again(work, *TRAIN, *TIGHT, *changes)
        line = the_error(refused.stderr)
        assert refused.returncode == 2 and names in line and "step 1 " not in refused.stderr, line
        assert ("--data" in line) == ("--data" in names), line  # the seed chooses the sequences too
    shorter = the_error(again(work, *changed([*TRAIN, *TIGHT], {"--sequence-length": "32"})).stderr)
    assert "had --sequence-length 128, not 32: the same" in shorter, shorter
    assert not (work / "out").exists() and files(work / "store") == before
    # The learning rate, its schedule and the number of steps may change.
    done = run(work, *changed(TRAIN, {"--lr": "1e-4", "--steps": str(STEPS + 2)}), *TIGHT, "--lr-schedule", "constant")
    assert "resumed after step" in done.stderr and steps_of(work / "log.json")[-1]["step"] == STEPS + 2
    assert steps_of(work / "log.json")[-1]["lr"] == 1e-4


def test_resume_wants_something_to_go_on_with(work):
    refused = run(work, *TRAIN, *TIGHT, "--resume", ok=False)
    assert refused.returncode == 2 and "no state to go on with" in the_error(refused.stderr) and not (work / "log.json").exists()
    assert run(work, *TRAIN, *small(), "--resume", ok=False).returncode == 2
    assert run(work, *TRAIN, *TIGHT, "--resume", "--fresh", ok=False).returncode == 2
    for words in (["every=0"], ["every=x"], ["often"]):
        refused = run(work, *TRAIN, *TIGHT, "--durability", *words, ok=False)
        assert refused.returncode == 2 and "--durability" in the_error(refused.stderr)
    assert "--storage" in the_error(run(work, *TRAIN, *small(), "--durability", "step", ok=False).stderr)


def test_what_is_left_is_told_by_the_steps_of_this_process(work):
    words = [*changed(TRAIN, {"--steps": "100000"}), *TIGHT]
    process = start(work, *words, stderr=subprocess.DEVNULL)
    wait_until(lambda: (work / "log.json").exists() and len(steps_of(work / "log.json")) >= 40)
    process.send_signal(signal.SIGINT)
    process.wait(60)
    (work / "log.json").unlink()
    process = start(work, *words)
    wait_until(lambda: (work / "log.json").exists() and len(steps_of(work / "log.json")) >= 1)
    process.send_signal(signal.SIGINT)
    told = re.search(r"step (\d+)/100000 .*\| (\d+(?:\.\d)?) (s|min|h) left", process.communicate(timeout=60)[1])
    first = steps_of(work / "log.json")[0]
    assert int(told[1]) == first["step"] > 40
    left = float(told[2]) * {"s": 1, "min": 60, "h": 3600}[told[3]]
    assert left == pytest.approx((100000 - first["step"]) * first["step_s"], rel=0.1, abs=1)


def test_durability_may_change_to_none(work):
    """The state keeps its two generations: where the run is killed without a commit, it goes on from there once more."""
    expected = uninterrupted(work)
    for more in [], ["--host-memory", "64MiB"]:  # streamed, and all of it in memory
        stopped_run(work)
        words = [*TRAIN, *changed(TIGHT, {"--host-memory": (more or ["", "1MiB"])[1]}), "--durability", "export-only"]
        (work / "log.json").rename(work / "log.json.first")
        process = start(work, *words, delay_ms=40)
        wait_until(lambda: (work / "log.json").exists() and len(steps_of(work / "log.json")) >= 1)
        process.kill()
        errors = process.communicate()[1]
        assert "a crash costs all steps from here on" in errors and "resumed after step" in errors, errors
        done = again(work, *words)
        assert done.returncode == 0 and "resumed after step" in done.stderr, done.stderr
        assert losses(work) == expected and weights(work / "out") == weights(work / "whole")
        assert not [*work.glob("store/*")]
        shutil.rmtree(work / "out")
        for log in work.glob("log.json*"):
            log.unlink()


def test_its_own_log_in_out_is_nobody_elses(work):
    expected = uninterrupted(work)
    words = changed([*TRAIN, *TIGHT, "--engine", "threads", "--durability", "step", "--trace", "out/trace.json"], {"--log-json": "out/log.json"})
    (work / "out").mkdir()
    died = run(work, *words, ok=False, env={"LD_PRELOAD": str(SHIM), "TIERFLOW_FAIL": "flush:store/state.tfv:kill", "TIERFLOW_FAIL_NTH": "12"})
    assert died.returncode == -signal.SIGKILL and (work / "out" / "log.json").exists()
    for call in "rename:config.json.partial", "none":  # with two logs, too
        done = run(work, *words, ok=False, env={"LD_PRELOAD": str(SHIM), "TIERFLOW_FAIL": f"{call}:kill"})
        assert done.returncode == (0 if call == "none" else -signal.SIGKILL), done.stderr
    assert weights(work / "out") == weights(work / "whole") and (work / "out" / "log.json.2").exists()
    assert {record["step"]: record["loss"] for log in work.glob("out/log.json*") for record in steps_of(log)} == expected
    shutil.rmtree(work / "out")
    (work / "out").mkdir()
    (work / "out" / "log.json.x").touch()
    refused = run(work, *words, ok=False)
    assert refused.returncode == 2 and "not an empty folder" in the_error(refused.stderr)


def test_room_that_becomes_free_late_costs_no_second_copy(work):
    """As after a process that was killed: its space is free a little later."""
    done = run(work, *TRAIN, *TIGHT, env={"LD_PRELOAD": str(SHIM), "TIERFLOW_FAIL": "allocate:store/state.tfv:28", "TIERFLOW_FAIL_NTH": "1"})
    assert re.search("every step is committed in store|every [0-9]+ steps are committed in store", done.stderr), done.stderr


def test_every_so_many_steps(work):
    expected = uninterrupted(work)
    process = start(work, *TRAIN, *TIGHT, "--durability", "every=2", delay_ms=40)
    wait_until(lambda: (work / "log.json").exists() and len(steps_of(work / "log.json")) >= 4)
    process.kill()
    assert "every 2 steps are committed" in process.communicate()[1]
    done = again(work, *TRAIN, *TIGHT)
    assert done.returncode == 0 and int(re.search(r"resumed after step (\d+) of", done.stderr)[1]) % 2 == 0
    assert losses(work) == expected and weights(work / "out") == weights(work / "whole")


def test_at_the_write_limit_the_state_is_committed(work):
    expected = uninterrupted(work)
    run(work, *changed(TRAIN, {"--steps": "3", "--out": "three"}), *small(*STORE, "--log-json", "three.json"))
    written = json.loads((work / "three.json").read_text().splitlines()[-1])["summary"]["tb_written"]
    done = run(work, *TRAIN, *TIGHT, "--max-tb-written", f"{written:.15f}", ok=False)
    assert done.returncode == 10 and "the state after step" in done.stderr and not (work / "out").exists()
    run(work, *TRAIN, *TIGHT)
    assert losses(work) == expected and weights(work / "out") == weights(work / "whole")


@pytest.mark.parametrize("call", ["rename:tierflow_run.json.partial", "flush:model.safetensors.partial", "rename:config.json.partial"])
def test_killed_while_it_writes_its_result_it_writes_it_anew(work, call):
    expected = uninterrupted(work)
    died = run(work, *TRAIN, *TIGHT, ok=False, env={"LD_PRELOAD": str(SHIM), "TIERFLOW_FAIL": f"{call}:kill"})
    assert died.returncode == -signal.SIGKILL and [*work.glob("out/*")]
    done = again(work, *TRAIN, *TIGHT)
    assert done.returncode == 0, done.stderr
    assert losses(work) == expected and weights(work / "out") == weights(work / "whole") and not [*work.glob("out/*.partial")]
    # Among files of somebody else, what is there may be theirs.
    (work / "out" / "config.json").unlink()
    refused = run(work, *TRAIN, *TIGHT, ok=False)
    assert refused.returncode == 2 and "not an empty folder" in the_error(refused.stderr) and weights(work / "out")


@pytest.mark.parametrize("stored", [True, False])
def test_the_model_on_the_way(work, stored):
    expected = uninterrupted(work)
    train = [*TRAIN, "--export-every", "2", *(TIGHT if stored else small("--log-json", "log.json"))]
    if stored:  # in the middle of the second of them
        died = run(work, *train, ok=False, env={"LD_PRELOAD": str(SHIM), "TIERFLOW_FAIL": "flush:checkpoint-4.partial/model.safetensors.partial:kill"})
        assert died.returncode == -signal.SIGKILL and (work / "out" / "checkpoint-4.partial").exists()
        done = again(work, *train)
        assert done.returncode == 0, done.stderr
    else:
        run(work, *train)
    assert losses(work) == expected and weights(work / "out") == weights(work / "whole")
    assert sorted(each.name for each in work.glob("out/checkpoint-*")) == ["checkpoint-2", "checkpoint-4"]
    run(work, *changed(TRAIN, {"--out": "four", "--steps": "4"}), *small("--lr-schedule", "constant"))
    run(work, *changed(TRAIN, {"--out": "more"}), *small("--lr-schedule", "constant", "--export-every", "2", "--export-keep", "1"))
    assert [each.name for each in work.glob("more/checkpoint-*")] == ["checkpoint-4"]
    assert weights(work / "more" / "checkpoint-4") == weights(work / "four")
    for folder in "out", "more":
        for each in work.glob(f"{folder}/checkpoint-*"):
            assert (each / "config.json").exists() and not [*each.glob("*.partial")]
    # What holds models already is no place for another run.
    assert run(work, *changed(train, {"--seed": "1"}), "--fresh", ok=False).returncode == 2


def test_stopped_while_it_exports_it_commits_and_writes_that_model_later(work):
    """Training waits while adapters are added to their base."""
    run(work, "init", "--config", "config.json", "--out", "base")
    lora = ["train", "--model", "base", "--method", "lora", "--merge", *TRAIN[3:]]
    run(work, *changed(lora, {"--out": "whole"}), *small("--log-json", "whole.json"))
    expected = {record["step"]: record["loss"] for record in steps_of(work / "whole.json")}
    train = [*lora, "--export-every", "2", *TIGHT]
    process = start(work, *train, env={"LD_PRELOAD": str(SHIM), "TIERFLOW_FAIL": "flush:checkpoint-2.partial/config.json.partial:stop"})
    errors = while_it_stands(process, process.terminate)
    assert process.returncode == 143, errors
    assert "the model after step 2 was not written: the run ends" in errors and "the state after step 2 of" in errors
    assert not [*work.glob("out/checkpoint-*")]
    assert again(work, *train).returncode == 0
    assert losses(work) == expected and weights(work / "out") == weights(work / "whole")
    assert sorted(each.name for each in work.glob("out/checkpoint-*")) == ["checkpoint-2", "checkpoint-4"]


def test_stopped_while_it_verifies_it_says_that_the_state_stays(work):
    expected = uninterrupted(work)
    words = [*TRAIN, *TIGHT, "--engine", "threads", "--durability", "step"]
    died = run(work, *words, ok=False, env={"LD_PRELOAD": str(SHIM), "TIERFLOW_FAIL": "flush:state.tfv:kill", "TIERFLOW_FAIL_NTH": "8"})
    assert died.returncode == -signal.SIGKILL
    process = start(work, *words, env={"LD_PRELOAD": str(SHIM), "TIERFLOW_FAIL": "flush:out/model-00001-of-00001.safetensors.partial:stop"})
    errors = while_it_stands(process, process.terminate)
    assert process.returncode == 143 and "nothing was kept" not in errors, errors
    assert "the state stays as it was" in the_error(errors)
    assert again(work, *words).returncode == 0
    assert losses(work) == expected and weights(work / "out") == weights(work / "whole")


def test_a_model_on_the_way_that_cannot_be_written_costs_itself_alone(work):
    expected = uninterrupted(work)
    done = run(work, *TRAIN, "--export-every", "2", *TIGHT, env={"LD_PRELOAD": str(SHIM), "TIERFLOW_FAIL": "flush:checkpoint-2.partial/model.safetensors.partial:28"})
    assert "warning: the model after step 2 was not written, the run goes on" in done.stderr and "No space left" in done.stderr
    assert losses(work) == expected and weights(work / "out") == weights(work / "whole")
    assert [each.name for each in work.glob("out/checkpoint-*")] == ["checkpoint-4"]


def test_killed_while_it_removes_its_state_it_is_finished_and_leaves_nothing(work):
    for call in "unlink:store/state.tfv", "unlink:store/state.tfv.owner":
        died = run(work, *TRAIN, *TIGHT, ok=False, env={"LD_PRELOAD": str(SHIM), "TIERFLOW_FAIL": f"{call}:kill"})
        assert died.returncode == -signal.SIGKILL
        done = again(work, *TRAIN, *TIGHT)
        assert done.returncode == 0 and "the run is finished" in done.stderr, done.stderr
        assert not [*work.glob("store/*")]
        shutil.rmtree(work / "out")


def test_killed_while_it_makes_its_store_it_begins_anew(work):
    """Before the header of the second folder's file, and before the note that says whose the store is."""
    run(work, *changed(TRAIN, {"--out": "whole", "--steps": "2"}), *small())
    words = [*changed(TRAIN, {"--steps": "2"}), *small("--storage", "store,other", "--host-memory", "1MiB")]
    for call, nth in [("flush:store/state.tfv", "1"), ("flush:other/state.tfv", "1"), ("write:state.tfv.owner.partial", "1")]:
        died = run(work, *words, ok=False, env={"LD_PRELOAD": str(SHIM), "TIERFLOW_FAIL": f"{call}:kill", "TIERFLOW_FAIL_NTH": nth})
        assert died.returncode == -signal.SIGKILL and (work / "store" / "state.tfv").exists()
        done = again(work, *words)
        assert done.returncode == 0 and "ended before its first commit: it is removed" in done.stderr, done.stderr
        assert weights(work / "out") == weights(work / "whole")
        shutil.rmtree(work / "out")
    # Somebody's own file of that name stays.
    (work / "store").mkdir(exist_ok=True)
    (work / "store" / "state.tfv").write_text("mine")
    (work / "store" / "state.tfv").chmod(0o600)
    assert run(work, *words, ok=False).returncode == 6 and (work / "store" / "state.tfv").read_text() == "mine"


def test_killed_after_its_result_it_is_finished(work):
    words = [*TRAIN, *TIGHT]
    died = run(work, *words, ok=False, env={"LD_PRELOAD": str(SHIM), "TIERFLOW_FAIL": "unlink:store/state.tfv:kill"})
    assert died.returncode == -signal.SIGKILL and (work / "store" / "state.tfv").exists()
    shutil.copytree(work / "store", work / "kept")
    before = weights(work / "out")
    # Another command's result is not taken for this one's.
    other = again(work, *words, "--weight-decay", "0.5")
    assert other.returncode == 2 and [*work.glob("store/*")]
    # With options that choose no result it is the same run.
    for more in [], ["--resume"], ["--durability", "every=2", "--threads", "1", "--eval-sequences", "3"]:
        done = run(work, *words, *more)
        assert "the run is finished: its result is in out" in done.stderr and not [*work.glob("store/*")] and weights(work / "out") == before
        # And once more, after the end of its state.
        done = run(work, *words, *more)
        assert "the run is finished: its result is in out" in done.stderr and weights(work / "out") == before
        shutil.copytree(work / "kept", work / "store", dirs_exist_ok=True)


def test_a_signal_in_the_last_step_ends_the_run_with_its_result(work):
    words = [*changed(TRAIN, {"--steps": "2"}), *TIGHT, "--durability", "step"]
    process = start(work, *words, delay_ms=40)
    wait_until(lambda: (work / "log.json").exists() and steps_of(work / "log.json"))
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 130 and (work / "out" / "config.json").exists() and not [*work.glob("store/*")], said
    assert "the run is finished: its result is in out" in run(work, *words).stderr


def test_the_result_of_a_finished_run_is_recognised_or_named_and_stays(work):
    words = [*TRAIN, *TIGHT]
    run(work, *words)
    before = files(work / "out")
    for other, said in [
        (changed(words, {"--steps": "9"}), f"out: holds the result of a finished run, which stays; that run had --steps {STEPS}, not 9: name another folder as --out for this one"),
        ([*changed(words, {"--steps": "9"}), "--resume"], f"had --steps {STEPS}, not 9:"),
        ([*changed(words, {"--lr": "1e-4"}), "--held-out", "0"], "had --held-out 0.01, not 0.0 and --lr 0.001, not 0.0001:"),
        ([*words, "--eval-every", "2", "--export-best"], "had --eval-every 0, not 2 and --export-best false, not true:"),
        ([*words, "--fresh"], "out: holds the result of this very run, which is finished: to do it once more, name another folder as --out"),
        ([*TRAIN, *small("--host-memory", "1MiB", "--log-json", "log.json")], "holds the result of this very run"),
        (["train", "--config", "config.json", "--data", "other.txt", "--out", "out", "--seed", "5", "--clip", "none", "--warmup", "3", "--eps", "1e-6", *TIGHT], " and 3 other options that differ: name another folder"),
    ]:
        refused = run(work, *other, ok=False)
        assert refused.returncode == 2 and said in the_error(refused.stderr) and "remove" not in refused.stderr, refused.stderr
        assert files(work / "out") == before and not [*work.glob("store/*")]
    for more in ["--storage", "store,more"], ["--durability", "export-only"], ["--engine", "threads"], ["--device-memory", "128MiB"]:
        done = run(work, *changed([*words, *([] if more[0] in words else more)], dict([more])))
        assert "the run is finished: its result is in out" in done.stderr and files(work / "out") == before
    # A result without its last file, or of something else, is none of these.
    (work / "out" / "config.json").unlink()
    assert "--out exists and is not an empty folder" in the_error(run(work, *words, ok=False).stderr)


def test_a_finished_run_leaves_the_state_of_the_next_one(work):
    """A script of two runs over the same folders, cut off in the second one: both commands again."""
    run(work, "init", "--config", "config.json", "--out", "base")
    first = [word for word in changed(TRAIN, {"--config": "base", "--out": "first", "--steps": "2"}) if word != "--config"]
    first.insert(1, "--model")
    second = changed(first, {"--model": "first", "--out": "second", "--steps": "6"})
    run(work, *first, *TIGHT)
    run(work, *second, *small("--log-json", "whole.json"))
    (work / "second").rename(work / "whole")
    # In its first step, with one commit, and before that, with none.
    for call, nth, goes_on in [("flush:store/state.tfv", "10", True), ("flush:store/state.tfv", "2", False), ("write:state.tfv.owner.partial", "1", False)]:
        died = run(work, *second, *TIGHT, "--engine", "threads", "--durability", "step", ok=False, env={"LD_PRELOAD": str(SHIM), "TIERFLOW_FAIL": f"{call}:kill", "TIERFLOW_FAIL_NTH": nth})
        assert died.returncode == -signal.SIGKILL and (work / "store" / "state.tfv").exists()
        left = files(work / "store")
        done = again(work, *first, *TIGHT)
        assert done.returncode == 0 and "the run is finished: its result is in first" in done.stderr and "another run, and stays" in done.stderr, done.stderr
        assert files(work / "store") == left
        done = run(work, *second, *TIGHT, "--engine", "threads", "--durability", "step")
        assert ("resumed after step" in done.stderr) == goes_on, done.stderr
        assert weights(work / "second") == weights(work / "whole")
        shutil.rmtree(work / "second")


def test_fewer_steps_than_are_done_end_no_run(work):
    expected = uninterrupted(work)
    died = run(work, *TRAIN, *TIGHT, "--engine", "threads", "--durability", "step", ok=False, env={"LD_PRELOAD": str(SHIM), "TIERFLOW_FAIL": "flush:store/state.tfv:kill", "TIERFLOW_FAIL_NTH": "12"})
    assert died.returncode == -signal.SIGKILL
    step = json.loads(run(work, "status", "store", "--json").stdout)["step"]
    assert step > 1
    left = files(work / "store")
    refused = run(work, *changed(TRAIN, {"--steps": str(step - 1)}), *TIGHT, "--engine", "threads", "--durability", "step", ok=False)
    assert refused.returncode == 2 and f"holds the state after step {step}, and this run would end after step {step - 1}" in the_error(refused.stderr)
    assert files(work / "store") == left
    done = run(work, *TRAIN, *TIGHT, "--engine", "threads", "--durability", "step")
    assert losses(work) == expected and weights(work / "out") == weights(work / "whole")
    assert f"{STEPS - step} steps, {step + 1} to {STEPS}, in" in done.stderr


def test_a_finished_run_says_so(work):
    kept = [word for word in TRAIN if word not in ("--out", "out")] + ["--no-export", *TIGHT]
    run(work, *kept)
    done = run(work, *kept)
    assert f"the run is finished, after step {STEPS} of {STEPS}" in done.stderr and not steps_of(work / "log.json")
    more = run(work, *changed(kept, {"--steps": str(STEPS + 1)}))
    assert f"resumed after step {STEPS}" in more.stderr and [record["step"] for record in steps_of(work / "log.json")] == [STEPS + 1]
    # And with --out, whatever came between the last commit and the result.
    run(work, *changed(TRAIN, {"--steps": str(STEPS + 1)}), *TIGHT)
    assert (work / "out" / "config.json").exists() and not [*work.glob("store/*")]
    # How it is to go on makes it no other run.
    for how in [], ["--go-back"]:
        assert "the run is finished: its result is in out" in run(work, *changed(TRAIN, {"--steps": str(STEPS + 1)}), *TIGHT, *how).stderr


def test_without_room_for_a_second_copy_it_says_what_that_means(work, tmp_path):
    large, small_one = tmp_path / "drive", tmp_path / "small"
    words = [*TRAIN, *small("--storage", str(large), "--host-memory", "1MiB", "--allow-any-filesystem", "--allow-buffered")]
    mounted = []
    try:
        for drive, size in (large, 7 * MIB + 512 * 1024), (small_one, 2 * MIB):
            drive.mkdir()
            if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", drive], capture_output=True).returncode != 0:
                pytest.skip("this machine does not let us mount")
            mounted.append(drive)
        done = run(work, *words, ok=False)
        assert done.returncode == 0 and "no room for a second copy of the state: a crash loses the run" in done.stderr, done.stderr
        refused = run(work, *changed(words, {"--out": "other"}), "--durability", "step", ok=False)
        assert refused.returncode == 4 and "bytes needed" in the_error(refused.stderr) and "--durability export-only" in the_error(refused.stderr)
        refused = run(work, *changed(words, {"--out": "other", "--storage": str(small_one)}), ok=False)
        assert refused.returncode == 4 and the_error(refused.stderr).endswith("; name larger drives, or more of them, as --storage")
        assert not [*small_one.iterdir()]
    finally:
        for drive in mounted:
            subprocess.run(["umount", "--lazy", drive], check=True)


def test_status_and_verify_say_what_is_there(work):
    for command in "status", "verify":
        nothing = run(work, command, "store", ok=False)
        assert nothing.returncode == 3 and "holds no state" in the_error(nothing.stderr)
        assert run(work, command, ok=False).returncode == 2
    with_one = [word for word in TRAIN if word not in ("--out", "out")]
    process = start(work, *changed(TRAIN, {"--steps": "4000"}), *TIGHT)
    wait_until(lambda: (work / "log.json").exists() and len(steps_of(work / "log.json")) >= 8)
    held, told = run(work, "status", "store", ok=False), run(work, "status", "store", "--json", ok=False)
    assert process.poll() is None, "a machine on which 4000 steps end before this"
    assert held.returncode == 0 and f"process {process.pid} trains with it now" in held.stdout, held.stderr
    told = json.loads(told.stdout)
    assert told["process"] == process.pid and told["bytes"] > MIB and not told["resumable"] and "trains with it now" in told["reason"]
    assert told["readable"] and told["step"] >= 1 and told["generation"] >= 2 and told["generations"] == 2 and 0 <= told["age_s"] < 100
    assert re.search(r"\nstate after step \d+\ngeneration \d+, the newest of 2 that are kept; last written \d+ s ago\n", held.stdout), held.stdout
    refused = run(work, "verify", "store", ok=False)
    assert refused.returncode == 8 and "`tierflow status` shows how far it is" in the_error(refused.stderr), refused.stderr
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    said = run(work, "status", "store").stdout
    assert "the same `tierflow train` command goes on with it, if it is whole, which `tierflow verify` finds out\n" in said and "tierflow export --storage store" in said
    status = json.loads(run(work, "status", "store", "--json").stdout)
    assert status["resumable"] and status["step"] >= 2 and status["bytes"] > MIB and status["run"]["sequence-length"] == 128
    assert f"state after step {status['step']}" in said and f"process {process.pid} on" in said
    assert status["process"] is None and status["reason"] is None and 0 <= status["age_s"] < 100
    assert status["generations"] == 2 and 1 < status["generation"] <= status["step"] + 1  # the first is what was loaded
    assert re.search(rf"\ngeneration {status['generation']}, the newest of 2 that are kept; last written \d+ s ago\n", said)
    assert "whole: the state after step" in run(work, "verify", "store").stdout
    reader, writer = os.pipe()
    os.close(reader)
    unread = run(work, "status", "store", ok=False, capture_output=False, stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert unread.returncode == 5 and "standard output" in the_error(unread.stderr)
    # A newest superblock that is damaged is said: what is there may be older than what was committed.
    state, place = work / "store" / "state.tfv", MIB + (0 if status["generation"] % 2 == 0 else MIB)
    content = bytearray(state.read_bytes())
    content[place + 20] ^= 1
    state.write_bytes(content)
    doubtful, said = json.loads(run(work, "status", "store", "--json").stdout), run(work, "status", "store").stdout
    assert status["passed_over"] is None and "superblock" in doubtful["passed_over"] and doubtful["generation"] == status["generation"] - 1
    assert "it may not be the newest that was committed: superblock" in said
    damaged = run(work, "verify", "store", ok=False)
    assert damaged.returncode == 6 and damaged.stdout == "", damaged
    assert f"generation {doubtful['generation']}, the state after step {doubtful['step']}, is whole" in the_error(damaged.stderr) and "superblock" in damaged.stderr
    assert f"warning: the model after step {doubtful['step']} is written, which may not be the newest that was committed: superblock" in run(work, "export", "--storage", "store", "--out", "older").stderr
    content[place + 20] ^= 1
    state.write_bytes(content)
    verified = json.loads(run(work, "verify", "--storage", "store", "--json").stdout)
    assert verified["whole"] and verified["step"] == status["step"]
    kept = [*with_one, "--no-export", "--durability", "export-only", *small("--storage", "kept", "--host-memory", "1MiB")]
    assert "durability: export-only, no step is committed: a crash loses the run" in run(work, *kept).stderr
    status, said = json.loads(run(work, "status", "kept", "--json").stdout), run(work, "status", "kept").stdout
    assert not status["resumable"] and status["reason"] == "it was made without --durability" and status["generations"] == 1
    assert "no run goes on with it: it was made without --durability" in said and "generation 1, the only one that is kept" in said


def test_what_is_damaged_is_found_before_anything_is_written(work):
    stopped_run(work)
    for step in 4, 12, 8:
        (work / "out" / f"checkpoint-{step}").mkdir(parents=True)
        (work / "out" / f"checkpoint-{step}" / "config.json").write_text("{}")
    (work / "out" / "checkpoint-16").mkdir()  # of which the end is missing
    state = work / "store" / "state.tfv"
    content = bytearray(state.read_bytes())
    for at in range(4 * MIB, len(content), 4096):
        content[at] ^= 1
    state.write_bytes(content)
    before = files(work / "store")
    refused = again(work, *TRAIN, *TIGHT)
    line = the_error(refused.stderr)
    assert refused.returncode == 6 and "what is left is what was exported before" in line.lower(), line
    assert f"the newest model that was exported is {work / 'out' / 'checkpoint-12'}" in line, line
    assert files(work / "store") == before
    damaged = run(work, "verify", "store", ok=False)
    assert damaged.returncode == 6 and "is not what was written" in the_error(damaged.stderr)
    exported = run(work, "export", "--storage", "store", "--out", "exported", ok=False)
    assert exported.returncode == 6 and "is not what was written" in the_error(exported.stderr) and "`tierflow verify` says" in exported.stderr and not (work / "exported").exists()
    state.write_bytes(content[:MIB] + b"\xff" * (len(content) - MIB))
    gone = again(work, *TRAIN, *TIGHT)
    assert gone.returncode == 6 and "nothing can be got out of it" in the_error(gone.stderr) and "checkpoint-12" in the_error(gone.stderr)


GOLDEN = pathlib.Path(__file__).parent / "golden" / "run.tar.xz"  # made by golden_run() of an earlier version
GOLDEN_TRAIN = ["train", "--config", "config.json", "--data", "tokens.npy", "--held-out", "0", "--lr", "1e-3", "--lr-schedule", "constant", "--seed", "5", "--log-json", "log.json",
                *small("--sequence-length", "16", "--storage", "store", "--host-memory", "1MiB")]


def golden_run(work):
    """The state after two steps of four. To make the file anew where the format changes: tar -cJf run.tar.xz config.json tokens.npy store, and the sums in the test."""
    (work / "config.json").write_text(json.dumps(config(hidden=16, layers=1, vocab=64, intermediate_size=32)))
    numpy.save(work / "tokens.npy", numpy.random.default_rng(3).integers(0, 64, 4096, dtype=numpy.uint16))
    run(work, *GOLDEN_TRAIN, "--steps", "2", "--no-export")


def test_a_state_that_an_earlier_version_left_is_gone_on_with(tmp_path):
    """All that is on the drive: header, superblocks, manifest, extents, note, identity and progress."""
    with tarfile.open(GOLDEN) as archive:
        archive.extractall(tmp_path, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    status = json.loads(run(tmp_path, "status", "store", "--json").stdout)
    assert status["step"] == 2 and status["resumable"], status
    (tmp_path / "anew").mkdir()
    golden_run(tmp_path / "anew")
    assert json.loads(run(tmp_path, "status", "anew/store", "--json").stdout)["run"] == status["run"]
    run(tmp_path, "export", "--storage", "store", "--out", "exported")
    assert hashlib.sha256(weights(tmp_path / "exported")).hexdigest() == "7c64ef24e517761558e4d3f122cb227d0524e68425b6be875df8b88e6c22ef15"
    done = run(tmp_path, *GOLDEN_TRAIN, "--steps", "4", "--out", "out")
    assert "goes on" in done.stderr and [record["step"] for record in steps_of(tmp_path / "log.json")] == [3, 4]
    assert (tmp_path / "out" / "config.json").exists()


def test_a_wall_clock_that_jumps_changes_nothing(work):
    """Ten years back and forth at every look: no time limit, age or wait is told by it."""
    expected = uninterrupted(work)
    jumps = {"LD_PRELOAD": str(SHIM), "TIERFLOW_CLOCK_JUMPS": "1"}
    begun = time.time()
    process = start(work, *TRAIN, *TIGHT, delay_ms=40, env={"TIERFLOW_CLOCK_JUMPS": "1"}, stderr=subprocess.DEVNULL)

    def committed():
        said = run(work, "status", "store", "--json", ok=False).stdout
        return bool(said) and (json.loads(said)["step"] or 0) >= 1

    wait_until(lambda: process.poll() is not None or committed())
    assert process.poll() is None
    process.kill()
    process.wait()
    for _ in range(2):
        status = json.loads(run(work, "status", "store", "--json", env=jumps).stdout)
        assert status["resumable"] and status["step"] >= 1 and status["age_s"] >= 0
    run(work, "verify", "store", env=jumps)
    run(work, *TRAIN, *TIGHT, env=jumps)
    assert losses(work) == expected and weights(work / "out") == weights(work / "whole")
    assert time.time() - begun < 100
