"""How a run begins and ends: what is checked before the first step, what signals do, and that a result is whole or none."""
import contextlib
import errno
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import threading
import time

import pytest
from program import BUILD, MIB, config, damage, needs_torch, run, small, start, the_error, wait_until, while_it_stands
from safetensors.torch import load_file, save_file

pytestmark = needs_torch

TRAIN = ["train", "--config", "config.json", "--data", "text.txt", "--lr", "1e-3"]
ENDLESS = [*TRAIN, "--steps", "1000000", "--held-out", "0"]
STORED = ["--storage", "store", "--host-memory", "1MiB"]
UNCOMMITTED = [*STORED, "--durability", "export-only"]  # a run that ends early writes its result
SHIM = BUILD / "librecord_calls.so"


def shim(work, fail=None):
    """The environment of a program whose calls are recorded, and may fail."""
    if not SHIM.exists():
        pytest.skip(f"{SHIM} is not built")
    return {"LD_PRELOAD": str(SHIM), "TIERFLOW_CALLS": str(work / "calls"), **({"TIERFLOW_FAIL": f"{fail[0]}:{fail[1]}:{fail[2]}"} if fail else {})}


def steps_done(work):
    log = work / "log.json"
    return log.read_text().count("tokens_per_s") if log.exists() else 0


@contextlib.contextmanager
def running(work, *words, **more):
    """A run that has done its first step; ended with the block."""
    before = steps_done(work)
    process = start(work, *words, "--log-json", "log.json", **more)
    try:
        wait_until(lambda: process.poll() is not None or 0 < steps_done(work) != before)
        assert process.poll() is None, process.stderr and process.stderr.read()
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def small_drive(tmp_path):
    """Mounts a file system in memory of so many bytes as a folder."""
    mounted = []

    def mount(name, size, *options):
        folder = tmp_path / name
        folder.mkdir()
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", ",".join([f"size={size}", *options]), "tmpfs", folder], capture_output=True, text=True)
        if done.returncode != 0:
            pytest.skip(f"this machine does not let us mount: {done.stderr.strip()}")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", "--lazy", folder], check=True)


# Before the first step


@pytest.mark.parametrize("out, code", [("foreign", 2), ("text.txt", 2), ("text.txt/out", 3), ("n" * 300, 3), ("/proc/out", 3)])
def test_an_out_that_cannot_be_written_is_refused_before_the_first_step(work, out, code):
    (work / "foreign").mkdir()
    (work / "foreign" / "notes.txt").write_text("mine")
    done = run(work, *TRAIN, "--steps", "2", "--out", out, "--log-json", "log.json", *small(*STORED), ok=False)
    assert done.returncode == code, done.stderr
    assert pathlib.Path(out).name in the_error(done.stderr) and "step 1" not in done.stderr
    assert not (work / "store").exists() and not (work / "log.json").exists()
    assert (work / "foreign" / "notes.txt").read_text() == "mine"


def test_an_out_on_a_full_or_read_only_drive_is_refused_before_the_first_step(work, small_drive):
    drive = small_drive("drive", MIB)
    (drive / "fill").write_bytes(bytes(MIB))
    refused = run(work, *TRAIN, "--steps", "2", "--out", drive / "out", *small(), ok=False)
    assert refused.returncode == 4 and "step 1" not in refused.stderr, refused.stderr
    subprocess.run(["mount", "-o", "remount,ro", drive], check=True)
    refused = run(work, *TRAIN, "--steps", "2", "--out", drive, *small(), ok=False)
    assert refused.returncode in (2, 4) and "step 1" not in refused.stderr, refused.stderr
    (work / "empty").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", work / "empty"], check=True)
    try:
        refused = run(work, *TRAIN, "--steps", "2", "--out", "empty", *small(), ok=False)
    finally:
        subprocess.run(["umount", "--lazy", work / "empty"], check=True)
    assert refused.returncode == 4 and "Read-only" in the_error(refused.stderr) and "step 1" not in refused.stderr, refused.stderr


def test_out_has_room_for_the_tokenizer_too(work, small_drive):
    drive = small_drive("drive", 4 * MIB)
    words = [*TRAIN, "--steps", "1", "--tokenizer", "bytes", *small()]
    run(work, *words, "--out", drive / "out")
    shutil.rmtree(drive / "out")
    (work / "tokenizer.json").write_bytes(b" " * (4 * MIB))
    refused = run(work, *words, "--out", drive / "out", ok=False)
    assert refused.returncode == 4 and "MiB free" in the_error(refused.stderr) and "step 1" not in refused.stderr
    assert not (drive / "out").exists()


def test_two_runs_with_one_out_are_refused(work):
    with running(work, *ENDLESS, "--out", "out", *small("--storage", "first", "--host-memory", "1MiB", "--durability", "export-only")) as first:
        second = run(work, *TRAIN, "--steps", "1", "--out", "out", *small("--storage", "second"), ok=False)
        assert second.returncode == 8 and f"process {first.pid} " in the_error(second.stderr)
        assert (work / "out").exists() and not (work / "second").exists()
        exported = run(work, "export", "--storage", "first", "--out", "out", ok=False)
        assert exported.returncode == 2 and "the run writes its own result" in the_error(exported.stderr)
        first.send_signal(signal.SIGINT)
        assert first.wait(60) == 130
    assert (work / "out" / "model.safetensors").exists()


def test_a_link_out_of_the_model_folder_is_not_followed(work):
    (work / "secret").mkdir()
    (work / "secret" / "key").write_text("a secret")
    (work / "model").mkdir()
    shutil.copy(work / "config.json", work / "model" / "config.json")
    (work / "model" / "tokenizer_config.json").symlink_to("../secret/key")
    words = ["train", "--config", "model/config.json", "--data", "text.txt", "--steps", "1", "--out", "out", *small()]
    refused = run(work, *words, ok=False)
    assert refused.returncode == 3 and "tokenizer_config.json" in the_error(refused.stderr) and "step 1" not in refused.stderr
    assert not (work / "out").exists()
    run(work, "init", "--config", "config.json", "--out", "linked")
    (work / "linked" / "config.json").rename(work / "secret" / "config.json")
    (work / "linked" / "config.json").symlink_to("../secret/config.json")
    refused = run(work, "train", "--model", "linked", "--data", "text.txt", "--steps", "1", "--out", "out", *small(), ok=False)
    assert refused.returncode == 3 and "linked/config.json: is a symbolic link" in the_error(refused.stderr)
    (work / "model" / "tokenizer_config.json").unlink()
    (work / "model" / "merges.txt").write_text("inside")
    (work / "model" / "vocab.json").symlink_to("merges.txt")
    run(work, *words)
    assert (work / "out" / "vocab.json").read_text() == "inside" and not (work / "out" / "vocab.json").is_symlink()


def test_a_snapshot_of_the_hub_is_copied_through_its_links(work):
    blobs, snapshot = work / "models--a--b" / "blobs", work / "models--a--b" / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    run(work, "init", "--config", "config.json", "--out", "model")
    for path in (work / "model").iterdir():
        shutil.move(path, blobs / path.name)
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    (blobs / "1234").write_text("{}")
    (snapshot / "generation_config.json").symlink_to("../../blobs/1234")
    run(work, "train", "--model", snapshot, "--data", "text.txt", "--steps", "1", "--out", "out", *small())
    (snapshot / "additional_chat_templates").mkdir()
    (snapshot / "additional_chat_templates" / "rag.jinja").symlink_to("../../../blobs/1234")
    run(work, "train", "--model", snapshot, "--data", "text.txt", "--steps", "1", "--out", "both", *small())
    assert (work / "out" / "generation_config.json").read_text() == "{}" == (work / "both" / "additional_chat_templates" / "rag.jinja").read_text()


# Signals and outputs


def test_each_signal_ends_the_run_after_the_step_with_the_result_written(work):
    for number, storage in (signal.SIGINT, "a"), (signal.SIGTERM, "b"), (signal.SIGHUP, "c"):
        (work / "log.json").unlink(missing_ok=True)
        with running(work, *ENDLESS, "--out", f"out-{storage}", *small("--storage", storage, "--host-memory", "1MiB", "--durability", "export-only")) as process:
            process.send_signal(number)
            if number == signal.SIGHUP:  # a terminal that is closed may send two
                process.send_signal(number)
            _, errors = process.communicate(timeout=60)
            assert process.returncode == 128 + number, errors
        assert (work / f"out-{storage}" / "config.json").exists() and not [*work.glob(f"{storage}/*")]


def test_nohup_stays_in_force(work):
    with running(work, *ENDLESS, "--out", "out", *small(), preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)) as process:
        process.send_signal(signal.SIGHUP)
        done = steps_done(work)
        wait_until(lambda: steps_done(work) > done + 2)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 143


def test_an_output_that_nobody_reads_costs_the_output_alone(work):
    """`train 2>&1 | tee log` and Ctrl-C: tee is gone first."""
    reader, writer = os.pipe()
    with running(work, *ENDLESS, "--out", "out", "--json", *small(), stdout=writer, stderr=writer) as process:
        os.close(writer)
        drain = threading.Thread(target=os.read, args=(reader, MIB))
        drain.start()
        drain.join()
        os.close(reader)
        done = steps_done(work)
        wait_until(lambda: steps_done(work) > done + 2)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    assert (work / "out" / "config.json").exists()
    with open("/dev/full", "w") as full:
        assert run(work, *TRAIN, "--steps", "2", "--out", "full", "--json", *small(), capture_output=False, stdout=full, stderr=full).returncode == 0
    assert (work / "full" / "config.json").exists()


def test_a_printed_result_that_cannot_be_written_is_a_failure(work):
    run(work, "init", "--config", "config.json", "--out", "model")
    with open("/dev/full", "w") as full:
        done = run(work, "eval", "--model", "model", "--data", "text.txt", "--max-sequences", "2", *small(), ok=False, capture_output=False,
                   stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 5 and "standard output" in the_error(done.stderr)


@pytest.mark.parametrize("made, number", [("out", signal.SIGINT), ("store/state.tfv", signal.SIGINT), ("store/state.tfv", signal.SIGTERM), ("out", signal.SIGHUP)])
def test_a_signal_before_the_first_step_leaves_nothing(work, made, number):
    (work / "config.json").write_text(json.dumps(config(hidden=512, layers=8)))
    before = sorted(work.iterdir())
    process = start(work, *TRAIN, "--steps", "50", "--out", "out", "--log-json", "log.json",
                    *small("--storage", "store", "--host-memory", "16MiB", "--device-memory", "256MiB"))
    wait_until(lambda: (work / made).exists() or process.poll() is not None)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + number, errors
    assert "nothing was kept" in the_error(errors)
    assert sorted(work.iterdir()) == before


def test_a_signal_in_the_evaluation_before_the_first_step_leaves_its_log_alone(work):
    """The evaluation takes minutes."""
    (work / "config.json").write_text(json.dumps(config(hidden=256, layers=8)))
    (work / "long.txt").write_text((work / "text.txt").read_text() * 8)
    before = sorted(work.iterdir())
    process = start(work, "train", "--config", "config.json", "--data", "long.txt", "--held-out", "0.9", "--eval-sequences", "0", "--steps", "2", "--out", "out", "--log-json", "log.json",
                    *small("--storage", "store", "--host-memory", "16MiB", "--device-memory", "128MiB"))
    wait_until(lambda: (work / "log.json").exists() or process.poll() is not None)
    time.sleep(2)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 143 and "nothing was kept" in the_error(errors), errors
    (work / "log.json").unlink()
    assert sorted(work.iterdir()) == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_init_and_eval_end_with_the_code_of_the_signal(work, number):
    (work / "large.json").write_text(json.dumps(config(hidden=1024, layers=16)))
    process = start(work, "init", "--config", "large.json", "--out", "large")
    wait_until(lambda: (work / "large").exists() or process.poll() is not None)
    process.send_signal(number)
    assert process.wait(60) == 128 + number
    assert not (work / "large").exists()
    run(work, "init", "--config", "config.json", "--out", "model")
    (work / "long.txt").write_text((work / "text.txt").read_text() * 40)
    process = start(work, "eval", "--model", "model", "--data", "long.txt", "--log-json", "eval.json", *small())
    wait_until(lambda: (work / "eval.json").exists() or process.poll() is not None)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + number, errors
    the_error(errors)


# The log


def test_a_log_is_opened_when_the_run_may_start_and_an_earlier_one_is_kept(work):
    (work / "log.json").write_text("of an earlier run\n")
    (work / "log.json.1").write_text("of one before\n")
    with running(work, *ENDLESS, "--out", "held", *small(*STORED)) as first:
        content = (work / "log.json").read_bytes()
        refused = run(work, *TRAIN, "--steps", "1", "--out", "other", "--log-json", "log.json", *small(*STORED), ok=False)
        assert refused.returncode == 8 and f"process {first.pid} " in the_error(refused.stderr)
        assert (work / "log.json").read_bytes().startswith(content) and not (work / "log.json.3").exists()
    assert (work / "log.json.1").read_text() == "of one before\n"
    assert (work / "log.json.2").read_text() == "of an earlier run\n"
    assert "config" in (work / "log.json").read_text().splitlines()[0]


# A result is whole or none


def calls_of(work):
    return [line.split(" ") for line in (work / "calls").read_text().splitlines()]


def expect_in_order(calls, out, last):
    """Every file of the folder was flushed after it was written and before it had its name; `last` had its name last, all else durable."""
    renames = {pathlib.Path(call[2]).name: index for index, call in enumerate(calls) if call[0] == "rename" and call[2].startswith(f"{out}/")}
    assert set(renames) == {path.name for path in out.iterdir()}
    for name, renamed in renames.items():
        written = [index for index, call in enumerate(calls) if call[:2] == ["write", calls[renamed][1]]]
        flushed = [index for index, call in enumerate(calls) if call[:2] == ["flush", calls[renamed][1]] and index < renamed]
        assert written and flushed and max(written) < max(flushed), name
    assert max(renames, key=renames.get) == last
    folder_flushed = [index for index, call in enumerate(calls) if call[:2] == ["flush", str(out)]]
    others = max([index for name, index in renames.items() if name != last])
    assert any(others < index < renames[last] for index in folder_flushed) and folder_flushed[-1] > renames[last]


def test_every_file_is_flushed_before_it_has_its_name_and_config_json_is_last(work):
    for name in "merges.txt", "tokenizer_config.json":
        (work / name).write_text("{}")
    run(work, *TRAIN, "--steps", "1", "--out", "out", "--tokenizer", "bytes", *small(), env=shim(work))
    expect_in_order(calls_of(work), work / "out", "config.json")
    assert {"merges.txt", "tokenizer_config.json", "tierflow_run.json", "model.safetensors"} < {path.name for path in (work / "out").iterdir()}
    (work / "calls").unlink()
    run(work, "init", "--config", "config.json", "--out", "new", "--shard-size", "100KB", env=shim(work))
    expect_in_order(calls_of(work), work / "new", "config.json")
    (work / "calls").unlink()
    run(work, *TRAIN, "--steps", "1", "--no-export", *small(*STORED))
    run(work, "export", "--storage", "store", "--out", "exported", env=shim(work))
    expect_in_order(calls_of(work), work / "exported", "config.json")
    (work / "calls").unlink()
    run(work, "train", "--model", "new", *TRAIN[3:], "--steps", "1", "--method", "lora", "--out", "adapter", *small(), env=shim(work))
    expect_in_order(calls_of(work), work / "adapter", "adapter_config.json")
    (work / "calls").unlink()
    run(work, "merge", "--model", "new", "--adapter", "adapter", "--out", "merged", env=shim(work))
    expect_in_order(calls_of(work), work / "merged", "config.json")


@pytest.mark.parametrize("operation, name", [("write", "merges.txt.partial"), ("flush", "merges.txt.partial"), ("write", "tierflow_run.json.partial"),
                                             ("rename", "model.safetensors.partial"), ("flush", "config.json.partial"), ("flush", "/out")])
def test_a_result_that_cannot_be_written_to_its_end_is_none(work, operation, name):
    (work / "merges.txt").write_text("a b")
    words = [*TRAIN, "--steps", "1", "--out", "out", "--tokenizer", "bytes"]
    done = run(work, *words, *small(), env=shim(work, (operation, name, errno.ENOSPC)), ok=False)
    assert done.returncode == 4 and re.search("No space left.*in memory alone", the_error(done.stderr)), done.stderr
    assert not (work / "out").exists()


def test_where_the_export_fails_the_state_stays_and_the_line_says_how_it_is_got_out(work):
    words = [*TRAIN, "--steps", "3"]
    run(work, *words, "--out", "direct", *small())
    failed = run(work, *words, "--out", "out", *small("--storage", "store,other", "--host-memory", "1MiB"),
                 env=shim(work, ("write", "model.safetensors.partial", errno.ENOSPC)), ok=False)
    assert failed.returncode == 4
    line = the_error(failed.stderr)
    assert "No space left" in line and "the state stays" in line and not (work / "out").exists()
    command = re.search("`tierflow (export [^`]*)`", line).group(1).replace("FOLDER", "saved").split()
    run(work, *command)
    assert (work / "saved" / "model.safetensors").read_bytes() == (work / "direct" / "model.safetensors").read_bytes()


def test_a_last_evaluation_that_fails_costs_no_training(work):
    """The store loses its bytes when the result is whole."""
    (work / "config.json").write_text(json.dumps(config(hidden=128, layers=3)))
    words = [*TRAIN, "--steps", "2", "--held-out", "0.2"]
    run(work, *words, "--out", "direct", *small())
    lose = {"TIERFLOW_LOSE": f"rename:/out/config.json.partial:{work / 'store/state.tfv'}"}
    failed = run(work, *words, "--out", "out", *small(*STORED, "--device-memory", "24MiB"), env={**shim(work), **lose}, ok=False)
    assert failed.returncode in (5, 6) and "the result is whole" in the_error(failed.stderr), failed.stderr
    assert (work / "out" / "config.json").exists()
    assert (work / "out" / "model.safetensors").read_bytes() == (work / "direct" / "model.safetensors").read_bytes()


def test_a_last_evaluation_that_fails_without_an_export_says_how_the_state_is_got_out(work):
    """The state is damaged at the last flush of the commit."""
    (work / "config.json").write_text(json.dumps(config(hidden=128, layers=3)))
    words = [*TRAIN, "--steps", "2", "--held-out", "0.2", "--no-export", *small(*UNCOMMITTED, "--device-memory", "24MiB", "--engine", "threads")]
    run(work, *words, env=shim(work))
    flushes = sum(call[0] == "flush" and call[1].endswith("state.tfv") for call in calls_of(work))
    shutil.rmtree(work / "store")
    process = start(work, *words, env={**shim(work, ("flush", "state.tfv", "stop")), "TIERFLOW_FAIL_NTH": str(flushes)})
    errors = while_it_stands(process, lambda: damage(work / "store" / "state.tfv"))
    assert process.returncode in (5, 6), errors
    assert "the last evaluation failed; the state is whole: `tierflow export --storage" in the_error(errors)


def test_where_the_commit_of_a_stopped_run_fails_the_line_says_how_the_state_is_got_out(work):
    """After its first step the run is stopped; from then on the drive flushes nothing more."""
    words = [*ENDLESS, "--out", "out", *small(*STORED, "--engine", "threads", "--durability", "every=1000000")]
    with running(work, *words, env=shim(work)) as process:
        flushed = sum(call[0] == "flush" and call[1].endswith("state.tfv") for call in calls_of(work))
        process.kill()
        process.wait()
    shutil.rmtree(work / "store")
    shutil.rmtree(work / "out", ignore_errors=True)
    fails = {**shim(work, ("flush", "state.tfv", errno.EIO)), "TIERFLOW_FAIL_NTH": str(flushed + 1)}
    with running(work, *words, "--fresh", env=fails) as process:
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 5
        line = the_error(process.stderr.read())
    assert "what was written stays" in line and "tierflow export --storage" in line
    assert (work / "store" / "state.tfv").exists()


def test_of_a_commit_that_fails_nothing_is_removed(work):
    failed = run(work, *TRAIN, "--steps", "1", "--no-export", *small(*UNCOMMITTED, "--engine", "threads"), ok=False,
                 env={**shim(work, ("flush", "state.tfv", errno.EIO)), "TIERFLOW_FAIL_NTH": "3"})
    assert failed.returncode == 5 and "what was written stays" in the_error(failed.stderr), failed.stderr
    assert (work / "store" / "state.tfv").exists()


# After a crash


def test_after_kill_9_the_line_says_whose_store_it_is_and_fresh_discards_it(work):
    words = [*TRAIN, "--out", "out", *small(*UNCOMMITTED)]
    with running(work, *words, "--steps", "1000000") as killed:
        killed.kill()
        killed.wait()
    assert (work / "store" / "state.tfv").exists()
    log = (work / "log.json").read_bytes()
    again = run(work, *words, "--steps", "2", "--log-json", "log.json", ok=False)
    while again.returncode == 8 and "its last requests are still at the drive" in again.stderr:
        again = run(work, *words, "--steps", "2", "--log-json", "log.json", ok=False)
    line = the_error(again.stderr)
    assert again.returncode == 4 and f"process {killed.pid} on " in line and "--fresh" in line and re.search(r"began at \d{4}-\d\d-\d\d \d\d:", line), line
    assert "nothing can be got out of it" in line and (work / "log.json").read_bytes() == log
    run(work, *words, "--steps", "2", "--fresh")
    assert (work / "out" / "model.safetensors").exists() and not [*(work / "store").iterdir()]


def test_a_kept_store_is_named_with_its_step_and_the_way_out(work):
    kept = [*TRAIN, "--no-export", *small(*UNCOMMITTED)]
    run(work, *kept, "--steps", "3")
    again = run(work, *kept, "--steps", "1", ok=False)
    line = the_error(again.stderr)
    assert again.returncode == 4 and "after step 3" in line and "tierflow export --storage store --out" in line and "--fresh" in line
    run(work, "export", "--storage", "store", "--out", "exported")


def test_a_part_of_a_store_does_not_hinder_fresh(work):
    for name in "a", "b":
        (work / name).mkdir()
    (work / "b" / "state.tfv").write_bytes(b"cut")
    (work / "b" / "state.tfv").chmod(0o600)
    words = [*TRAIN, "--steps", "1", "--out", "out", *small("--storage", "a,b", "--host-memory", "1MiB")]
    refused = run(work, *words, ok=False)
    assert refused.returncode == 6 and "--fresh" in the_error(refused.stderr) and not (work / "out").exists()
    run(work, *words, "--fresh")
    assert not (work / "b" / "state.tfv").exists()


def model_with_a_broken_row(work):
    """Its byte 7 has no place in the text: no loss shows that its row of the embeddings is infinite."""
    run(work, "init", "--config", "config.json", "--out", "model")
    path = work / "model" / "model.safetensors"
    words = load_file(path)
    words["model.embed_tokens.weight"][7, 3] = float("inf")
    save_file(words, path, {"format": "pt"})


def test_weights_that_are_not_finite_are_no_result(work):
    model_with_a_broken_row(work)
    words = ["train", "--model", "model", "--data", "text.txt", "--tokenizer", "bytes", "--held-out", "0", "--steps", "2", "--out", "out"]
    failed = run(work, *words, *small(*STORED), env=shim(work), ok=False)
    assert failed.returncode == 7, failed.stderr
    # Whatever happens next, it does not come back as a result.
    calls = calls_of(work)
    withdrawn = calls.index(["unlink", f"{work}/out/config.json"])
    assert calls[withdrawn + 1] == ["flush", f"{work}/out"]
    assert "the values of model.embed_tokens.weight are not all finite" in the_error(failed.stderr) and "tierflow export --storage" in the_error(failed.stderr)
    assert not (work / "out").exists()
    exported = run(work, "export", "--storage", "store", "--out", "out")
    assert "warning: the values of model.embed_tokens.weight are not all finite" in exported.stderr
    assert load_file(work / "out" / "model.safetensors")["model.embed_tokens.weight"][7, 3] == float("inf")
    # Without storage what was trained is not lost.
    written = run(work, *words[:-1], "resident", *small())
    assert "warning: the values of model.embed_tokens.weight are not all finite" in written.stderr and (work / "resident" / "config.json").exists()
