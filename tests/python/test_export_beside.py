"""Models that a run writes on its way while it trains: the bits of the step that they are of, and none of the run's changed."""
import json
import re
import signal
import time

import pytest
from program import BUILD, again, changed, needs_torch, run, small, start, steps_of, wait_until_stopped

pytestmark = needs_torch

SHIM = BUILD / "librecord_calls.so"  # built with the tests
STEPS = 8
TRAIN = ["train", "--config", "config.json", "--data", "text.txt", "--lr", "1e-3", "--warmup", "2", "--lr-schedule", "constant", "--steps", str(STEPS), "--out", "out"]
BESIDE = small("--storage", "store", "--host-memory", "2MiB", "--durability", "step", "--export-every", "2", "--log-json", "log.json")


def weights(folder):
    return (folder / "model.safetensors").read_bytes()


def losses(work):
    return {record["step"]: record["loss"] for log in sorted(work.glob("log.json*")) for record in steps_of(log)}


def exports(work):
    """{step: whether training went on meanwhile} of every log."""
    records = [json.loads(line) for log in sorted(work.glob("log.json*")) for line in log.read_text().splitlines()]
    return {record["exported"]["step"]: record["exported"]["beside"] for record in records if "exported" in record}


def checkpoints(folder):
    return sorted(int(each.name.split("-")[1]) for each in folder.glob("checkpoint-*"))


@pytest.fixture
def expected(work):
    """{step: the weights after it} of a run without storage, which waits for each, and its losses."""
    run(work, *changed(TRAIN, {"--out": "whole"}), *small("--export-every", "1", "--log-json", "whole.json"))
    found = {step: weights(work / "whole" / f"checkpoint-{step}") for step in range(1, STEPS)}
    found[STEPS] = weights(work / "whole")
    return found, {record["step"]: record["loss"] for record in steps_of(work / "whole.json")}


@pytest.mark.parametrize("clip", ["1.0", "none"])
def test_what_is_written_beside_training_is_that_step_to_the_bit(work, expected, clip):
    if clip == "none":
        run(work, *changed(TRAIN, {"--out": "none"}), *small("--export-every", "1", "--clip", "none"))
        expected = ({step: weights(work / "none" / f"checkpoint-{step}" if step < STEPS else work / "none") for step in range(1, STEPS + 1)}, None)
    done = run(work, *TRAIN, *BESIDE, "--clip", clip)
    assert checkpoints(work / "out") == [2, 4, 6] and exports(work) == {2: True, 4: True, 6: True}
    assert len(re.findall(r"model after step \d written to .*/checkpoint-\d, [\d.]+ s beside training\n", done.stderr)) == 3
    for step in 2, 4, 6:
        assert weights(work / "out" / f"checkpoint-{step}") == expected[0][step], step
        assert (work / "out" / f"checkpoint-{step}" / "config.json").exists() and (work / "out" / f"checkpoint-{step}" / "tierflow_run.json").exists()
    assert weights(work / "out") == expected[0][STEPS] and (expected[1] is None or losses(work) == expected[1])


def test_after_every_step_on_a_slow_drive_each_waits_for_the_one_before(work, expected):
    run(work, *TRAIN, *changed(BESIDE, {"--export-every": "1"}), env={"LD_PRELOAD": str(SHIM), "TIERFLOW_CALL_DELAY_MS": "5"})
    assert checkpoints(work / "out") == list(range(1, STEPS)) and losses(work) == expected[1]
    for step in range(1, STEPS):
        assert weights(work / "out" / f"checkpoint-{step}") == expected[0][step], step


def test_killed_while_it_writes_it_goes_on_with_that_step_and_writes_it_again(work, expected):
    died = run(work, *TRAIN, *BESIDE, ok=False, env={"LD_PRELOAD": str(SHIM), "TIERFLOW_FAIL": "flush:checkpoint-4.partial/model.safetensors.partial:kill"})
    assert died.returncode == -signal.SIGKILL and (work / "out" / "checkpoint-4.partial").exists()
    status = json.loads(again(work, "status", "store", "--json").stdout)
    assert status["step"] == 4, status  # it is pinned until it is written
    done = again(work, *TRAIN, *BESIDE)
    assert done.returncode == 0, done.stderr
    assert checkpoints(work / "out") == [2, 4, 6] and losses(work) == expected[1] and weights(work / "out") == expected[0][STEPS]
    for step in 2, 4, 6:
        assert weights(work / "out" / f"checkpoint-{step}") == expected[0][step], step


@pytest.mark.parametrize("twice", [False, True])
def test_stopped_while_it_writes_it_ends_that_first_and_twice_at_once(work, expected, twice):
    process = start(work, *TRAIN, *BESIDE, env={"TIERFLOW_FAIL": "flush:checkpoint-2.partial/tierflow_run.json.partial:stop"}, delay_ms=40)
    wait_until_stopped(process)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGCONT)
    if twice:
        while "the model after step 2 is written first; once more ends at once" not in process.stderr.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGSTOP)
        time.sleep(1.1)  # one that comes earlier is the same request
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGCONT)
        assert process.wait(60) == -signal.SIGTERM
        status = json.loads(again(work, "status", "store", "--json").stdout)
        assert status["step"] == 2
    else:
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 128 + signal.SIGTERM, errors
        assert int(re.search(r"the state after step (\d) of 8 is committed", errors)[1]) > 2
        assert "model after step 2 written to" in errors
    done = again(work, *TRAIN, *BESIDE)
    assert done.returncode == 0, done.stderr
    assert losses(work) == expected[1] and weights(work / "out") == expected[0][STEPS] and checkpoints(work / "out") == [2, 4, 6]
    for step in 2, 4, 6:
        assert weights(work / "out" / f"checkpoint-{step}") == expected[0][step], step


def test_what_fails_beside_training_costs_that_model_alone(work, expected):
    done = run(work, *TRAIN, *BESIDE, env={"LD_PRELOAD": str(SHIM), "TIERFLOW_FAIL": "flush:checkpoint-4.partial/model.safetensors.partial:28"})
    assert "warning: the model after step 4 was not written, the run goes on" in done.stderr and "No space left" in done.stderr
    assert checkpoints(work / "out") == [2, 6] and losses(work) == expected[1] and weights(work / "out") == expected[0][STEPS]
    assert weights(work / "out" / "checkpoint-6") == expected[0][6]


def test_the_best_one_is_written_beside_training_too(work, expected):
    words = changed(BESIDE, {"--export-every": "2"})
    del words[words.index("--export-every") : words.index("--export-every") + 2]
    done = run(work, *TRAIN, *words, "--eval-every", "2", "--eval-sequences", "4", "--export-best")
    best = json.loads((work / "log.json").read_text().splitlines()[-1])
    assert set(exports(work).values()) == {True}, best
    [kept] = checkpoints(work / "out")
    assert f"checkpoint-{kept}" in done.stderr and losses(work) == expected[1] and weights(work / "out" / f"checkpoint-{kept}") == expected[0][kept]


def test_at_a_limited_bandwidth_a_model_takes_its_time_and_training_goes_on(work):
    """Written and read back at that rate, from its beginning to its end; where the run waits for it, as fast as it can be."""
    words = [*changed(TRAIN, {"--steps": "400"}), *changed(BESIDE, {"--export-every": "100"})]
    run(work, *words, "--export-bandwidth", "4MiB")
    records = [json.loads(line)["exported"] for line in (work / "log.json").read_text().splitlines() if "exported" in line]
    size = len(weights(work / "out" / "checkpoint-100"))
    for record in records:
        assert record["beside"], records
        assert record["waited"] > 0 or record["seconds"] > 2 * size / (4 << 20) * 0.95, records
    assert any(record["waited"] == 0 for record in records), "no model was written whole beside the steps: nothing was shown"
    run(work, *changed(words, {"--out": "fast", "--storage": "second", "--log-json": "fast.json"}))
    for step in 100, 200, 300:
        assert weights(work / "out" / f"checkpoint-{step}") == weights(work / "fast" / f"checkpoint-{step}")
    refused = run(work, *TRAIN, *small("--export-bandwidth", "1MiB"), ok=False)
    assert refused.returncode == 2 and "--export-bandwidth is for models written while training goes on: that takes --storage" in refused.stderr
