"""Commands that write a model and are stopped in the middle of it: they end with the signal's code, and leave nothing."""
import signal

import pytest
from program import BUILD, needs_torch, run, small, start, the_error, while_it_stands
from program import work as work  # a fixture

pytestmark = needs_torch


def stopped_while_it_writes(work, number, *words):
    """At its first write of weights."""
    shim = {"LD_PRELOAD": str(BUILD / "librecord_calls.so"), "TIERFLOW_FAIL": "write:model.safetensors.partial:stop", "TIERFLOW_FAIL_NTH": "1"}
    process = start(work, *words, env=shim)

    def stop():
        assert process.poll() is None and list((work / "written").iterdir())
        process.send_signal(number)

    errors = while_it_stands(process, stop)
    assert process.returncode == 128 + number, errors
    assert f"stopped by {signal.Signals(number).name}" in the_error(errors)
    assert not (work / "written").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_merge_leaves_no_folder(work, number):
    run(work, "init", "--config", "config.json", "--out", "model")
    run(work, "train", "--model", "model", "--data", "text.txt", "--method", "lora", "--steps", "1", "--held-out", "0", "--out", "adapter", *small())
    stopped_while_it_writes(work, number, "merge", "--model", "model", "--adapter", "adapter", "--out", "written")
    run(work, "merge", "--model", "model", "--adapter", "adapter", "--out", "written")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_export_leaves_no_folder_and_the_state(work, number):
    run(work, "train", "--config", "config.json", "--data", "text.txt", "--steps", "1", "--held-out", "0", "--no-export", *small("--storage", "store", "--host-memory", "1MiB"))
    stopped_while_it_writes(work, number, "export", "--storage", "store", "--out", "written")
    run(work, "export", "--storage", "store", "--out", "written")
