"""Commands that are not a run are killed at calls that change files: what they leave, and that the same command, or the run, goes on."""
import json
import signal
import subprocess

from program import BUILD, again, changed, needs_torch, run, small, start, the_error, wait_until

pytestmark = needs_torch

SHIM = str(BUILD / "librecord_calls.so")  # built with the tests
TRAIN = ["train", "--config", "config.json", "--data", "text.txt", "--lr", "1e-3", "--warmup", "2", "--steps", "4", "--out", "out",
         *small("--storage", "store", "--host-memory", "1MiB", "--log-json", "log.json")]  # fmt: skip
EXPORT = ["export", "--storage", "store", "--out", "so-far"]


def stopped(work, steps=2):
    """A state after so many steps."""
    run(work, *changed(TRAIN, {"--steps": str(steps)}), "--no-export")
    assert status(work)["step"] == steps


def status(work):
    return json.loads(run(work, "status", "store", "--json").stdout)


def weights(folder):
    return (folder / "model.safetensors").read_bytes()


def killed_at(work, call, *words):
    return run(work, *words, ok=False, env={"LD_PRELOAD": SHIM, "TIERFLOW_KILL_AT": str(call)}).returncode == -signal.SIGKILL


def test_killed_while_it_exports_the_same_command_exports_or_it_is_whole(work):
    stopped(work)
    run(work, *changed(EXPORT, {"--out": "whole"}), env={"LD_PRELOAD": SHIM, "TIERFLOW_CALL_COUNT": "count"})
    calls = int((work / "count").read_text())
    assert calls > 5
    killed = 0
    for call in range(1, calls + 1, 1 + calls // 8):
        killed += killed_at(work, call, *EXPORT)  # writes that are given to the kernel together are one call: there may be a few less
        assert status(work)["step"] == 2 and "whole" in run(work, "verify", "store").stdout
        if (work / "so-far" / "config.json").exists():  # it was whole already
            refused = run(work, *EXPORT, ok=False)
            assert refused.returncode == 2 and "so-far: --out exists and is not an empty folder" in the_error(refused.stderr)
        else:
            run(work, *EXPORT)
        assert weights(work / "so-far") == weights(work / "whole")
        assert {path.name for path in (work / "so-far").iterdir()} == {path.name for path in (work / "whole").iterdir()}
        for path in (work / "so-far").iterdir():
            path.unlink()
        (work / "so-far").rmdir()
    assert killed >= 5


def test_killed_while_it_discards_what_was_there_the_same_command_begins_anew(work):
    whole = run(work, *changed(TRAIN, {"--out": "whole", "--log-json": "whole.json"}))
    assert "result: " in whole.stderr
    stopped(work)
    run(work, *TRAIN, "--fresh", env={"LD_PRELOAD": SHIM, "TIERFLOW_CALL_COUNT": "count"})
    calls = int((work / "count").read_text())
    for call in [*range(1, 10, 2), *range(10, calls, 1 + calls // 5)]:
        for left in ("out/model.safetensors", "out/config.json", "out/tierflow_run.json"):
            (work / left).unlink(missing_ok=True)
        if not (work / "store" / "state.tfv").exists():
            run(work, *changed(TRAIN, {"--steps": "2", "--log-json": "before.json"}), "--no-export")
        died = killed_at(work, call, *TRAIN, "--fresh")
        shown = run(work, "status", "store", ok=False)
        assert shown.returncode in (0, 3) and shown.stderr.count("\n") <= 1, (call, shown.stderr)
        if died:
            done = again(work, *TRAIN, "--fresh")
            assert done.returncode == 0, (call, done.stderr)
        assert weights(work / "out") == weights(work / "whole"), call
        assert not [*work.glob("store/*")], call


def test_of_the_same_command_twice_at_once_one_is_refused_and_the_other_is_whole(work):
    run(work, *changed(TRAIN, {"--out": "whole", "--log-json": "whole.json"}))
    first = start(work, *TRAIN, delay_ms=40, stderr=subprocess.DEVNULL)
    wait_until(lambda: (work / "store" / "state.tfv").exists())
    second = run(work, *TRAIN, ok=False, timeout=60)
    assert second.returncode == 8 and str(first.pid) in the_error(second.stderr) and "another run needs another folder as --storage" in second.stderr
    assert first.wait(60) == 0 and weights(work / "out") == weights(work / "whole")
