"""The folders of a state: it is gone on with in others than those in which it lies, or in other chunks, to the bit, and is read where nothing may be written."""
import errno
import fcntl
import json
import os
import pathlib
import shutil
import signal
import struct
import subprocess

import pytest
from program import BUILD, config, damage, needs_torch, run, small, start, the_error, wait_until, while_it_stands

pytestmark = needs_torch

SHIM = {"LD_PRELOAD": str(BUILD / "librecord_calls.so")}
TRAIN = ["train", "--config", "config.json", "--data", "text.txt", "--lr", "1e-3", "--warmup", "2", "--steps", "6", "--engine", "threads",
         "--durability", "step"]


# Of each flush of the copy one in the ordinary run, all that there are where the variable is set.
KILLS = int(os.environ.get("TIERFLOW_KILLS", "0"))
EVERY_FLUSH = [("flush:a/state.tfv-moving.tfv", nth, False) for nth in (range(1, 8) if KILLS else [3])]


def words_of(*folders, out="out"):
    return [*TRAIN, "--out", out, *small("--host-memory", "1MiB", "--storage", ",".join(folders))]


def train(work, *folders, out="out", more=(), **how):
    return run(work, *words_of(*folders, out=out), *more, ok=False, **how)


def killed_at(work, call, *folders, nth=1):
    """Killed before the nth such call: OPERATION:END_OF_PATH."""
    done = train(work, *folders, env={**SHIM, "TIERFLOW_FAIL": f"{call}:kill", "TIERFLOW_FAIL_NTH": str(nth)})
    assert done.returncode == -signal.SIGKILL, done.stderr
    return done.stderr


def weights(work, out="out"):
    return (work / out / "model.safetensors").read_bytes()


def is_empty(folder):
    return not folder.exists() or not [*folder.iterdir()]


@pytest.fixture
def whole(work):
    assert train(work, "whole-store", out="whole").returncode == 0
    return weights(work, "whole")


def test_on_more_and_on_fewer_drives_it_goes_on_to_the_bit(work, whole):
    killed_at(work, "flush:a/state.tfv", "a", nth=9)
    said = killed_at(work, "flush:b/state.tfv", "a", "b", nth=5)
    assert "the state lies in a: it is copied into the 2 folders of this run" in said and "resumed after step" in said
    assert {path.name for path in (work / "a").iterdir()} == {path.name for path in (work / "b").iterdir()} == {"state.tfv", "state.tfv.owner"}
    run(work, "verify", "a,b")
    done = train(work, "b")  # that the other part is in `a`, its note says
    assert done.returncode == 0, done.stderr
    assert "it is copied into the 1 folders of this run" in done.stderr and "resumed after step" in done.stderr
    assert weights(work) == whole and is_empty(work / "a") and is_empty(work / "b")


def test_each_name_of_a_moved_state_is_durable_before_the_next_counts_on_it(work):
    """First where all of it is, then the copy's names, one folder after the other."""
    killed_at(work, "flush:a/state.tfv", "a", nth=9)
    assert train(work, "a", "b", env={**SHIM, "TIERFLOW_CALLS": str(work / "calls")}).returncode == 0
    calls = [line.split(" ") for line in (work / "calls").read_text().splitlines()]
    took = {folder: calls.index(["rename", f"{work}/{folder}/state.tfv-moving.tfv", f"{work}/{folder}/state.tfv"]) for folder in "ab"}
    for folder in "ab":
        flushes = [index for index, call in enumerate(calls) if call == ["flush", f"{work}/{folder}"]]
        noted = max(index for index, call in enumerate(calls[: min(took.values())]) if call[0] == "rename" and call[2] == f"{work}/{folder}/state.tfv.owner")
        assert any(noted < index < min(took.values()) for index in flushes)
        assert took[folder] + 1 in flushes


def test_killed_while_it_moves_one_of_both_states_is_whole(work, whole):
    killed_at(work, "flush:a/state.tfv", "a", nth=9)
    begun = work / "begun"
    shutil.copytree(work / "a", begun)
    step = run(work, "status", "a").stdout.splitlines()[1]
    for call, nth, moved in (
        ("flush:b/state.tfv-moving.tfv", 1, False),  # without a header
        *EVERY_FLUSH,
        ("rename:a/state.tfv-moving.tfv", 1, False),  # all of it is copied, and the first is whole
        ("rename:b/state.tfv-moving.tfv", 1, True),
    ):
        killed_at(work, call, "a", "b", nth=nth)
        if call != "rename:b/state.tfv-moving.tfv":
            assert step in run(work, "verify", "a").stdout + run(work, "status", "a").stdout  # the first is whole until the second takes its place
        else:
            assert "name the same folders as then" in the_error(train(work, "b").stderr)
        done = train(work, "a", "b")
        assert done.returncode == 0, done.stderr
        assert ("the end of that was interrupted" in done.stderr) == moved
        assert weights(work) == whole and is_empty(work / "a") and is_empty(work / "b")
        for folder in ("out", "a", "b"):
            shutil.rmtree(work / folder)
        shutil.copytree(begun, work / "a")


def test_a_move_that_was_given_up_leaves_the_state_where_it_is(work, whole):
    killed_at(work, "flush:a/state.tfv", "a", nth=9)
    killed_at(work, "rename:a/state.tfv-moving.tfv", "a", "b")
    done = train(work, "a")
    assert done.returncode == 0, done.stderr
    assert "resumed after step" in done.stderr and weights(work) == whole and is_empty(work / "a")


def test_what_cannot_be_moved_is_said_and_stays(work):
    killed_at(work, "flush:a/state.tfv", "a", "b", nth=9)
    (work / "a" / "state.tfv.owner").unlink()
    said = the_error(train(work, "a").stderr)
    assert "is part of a state over 2 folders of an earlier run" in said and "name all of them" in said and "--fresh" not in said
    run(work, "verify", "a,b")


def test_an_old_note_does_not_cost_another_run_its_state(work):
    """The end of a move was interrupted, and a folder that the note names has the state of another run by now."""
    killed_at(work, "flush:a/state.tfv", "a", "b", nth=9)
    killed_at(work, "rename:b/state.tfv.owner.partial", "b")
    assert is_empty(work / "a")
    killed_at(work, "flush:a/state.tfv", "a", nth=9)
    done = train(work, "b")
    assert done.returncode == 0 and "the end of that was interrupted" in done.stderr, done.stderr
    run(work, "verify", "a")


def newest_manifest(state):
    """Where it begins in the file."""
    data = state.read_bytes()
    blocks = [struct.unpack("<8s7Q", data[at : at + 64]) for at in (1 << 20, 2 << 20)]
    return (1 << 20) + max(blocks, key=lambda block: block[3])[4]  # the generation; where its manifest is


def test_a_state_whose_newest_generation_cannot_be_read_is_not_moved(work):
    """The drive may be back tomorrow. What would be moved is the generation before, and the newest be removed."""
    killed_at(work, "flush:a/state.tfv", "a", nth=10)  # behind a superblock: the generation before it is whole too
    state = work / "a" / "state.tfv"
    before = state.read_bytes()
    refused = train(work, "a", "b", env={**SHIM, "TIERFLOW_UNREADABLE": f"a/state.tfv:{newest_manifest(state)}"})
    assert refused.returncode == 5 and "a/state.tfv" in the_error(refused.stderr), refused.stderr
    assert state.read_bytes() == before and is_empty(work / "b")


def test_a_folder_too_many_is_said_and_the_state_stays(work):
    killed_at(work, "flush:a/state.tfv", "a", nth=9)
    (work / "other").mkdir()
    for command in (["verify"], ["status"], ["export", "--out", "exported", "--storage"]):
        for folders, words in (("a,other", "holds a whole state, and 2 folders were named: name a alone"), ("a,a", "is named twice")):
            refused = run(work, *command, folders, ok=False)
            assert refused.returncode == 2 and words in the_error(refused.stderr), refused.stderr
    run(work, "verify", "a")


def test_a_part_that_is_missing_or_damaged_is_named_and_what_is_there_stays(work):
    killed_at(work, "flush:a/state.tfv", "a", "b", nth=9)
    state = work / "b" / "state.tfv"
    part = state.read_bytes()
    spoilt = {"missing or damaged (": (lambda: state.write_bytes(part[: len(part) // 2]), state.unlink), "nothing can be got out of it (": (lambda: shutil.copy(work / "a" / "state.tfv", state),)}
    for words, ways in spoilt.items():
        for spoil in ways:
            spoil()
            for command in (["verify", "a,b"], ["status", "a,b"]):
                done = run(work, *command, ok=False)
                said = done.stdout + done.stderr
                assert done.returncode == (6 if command[0] == "verify" else 0), said
                assert words in said and "put it back" in said and "name all of them" not in said and "ended early" not in said
            refused = the_error(train(work, "a", "b").stderr)
            assert words in refused and "put it back" in refused
            state.write_bytes(part)
            state.chmod(0o600)
            run(work, "verify", "a,b")


def test_a_copied_folder_does_not_move_the_state_it_was_copied_from(work):
    """Its note names the others, and the state there is not its own."""
    killed_at(work, "flush:a/state.tfv", "a", "b", nth=9)
    shutil.copytree(work / "a", work / "backup")
    assert "is part of a state over 2 folders" in the_error(train(work, "backup").stderr)
    run(work, "verify", "a,b")
    assert {path.name for path in (work / "backup").iterdir()} == {"state.tfv", "state.tfv.owner"}


def test_a_move_from_a_copied_folder_removes_the_copy_alone(work, whole):
    killed_at(work, "flush:a/state.tfv", "a", nth=9)
    shutil.copytree(work / "a", work / "backup")
    killed_at(work, "rename:backup/state.tfv-moving.tfv", "backup", "b")
    assert train(work, "backup", "b").returncode == 0 and weights(work) == whole
    run(work, "verify", "a")


def test_a_command_that_is_refused_moves_nothing(work):
    killed_at(work, "flush:a/state.tfv", "a", nth=9)
    refused = train(work, "a", "b", more=["--seed", "77"])
    assert refused.returncode == 2 and "--seed" in the_error(refused.stderr) and "copied" not in refused.stderr
    run(work, "verify", "a")
    assert is_empty(work / "b")


def test_after_a_move_a_part_says_where_the_rest_is(work):
    """From when the first store is not needed any more on, the notes name the new folders."""
    killed_at(work, "flush:a/state.tfv", "a", nth=9)
    killed_at(work, "rename:b/state.tfv-moving.tfv", "a", "b")
    for folder in ("a", "b"):
        noted = json.loads((work / folder / "state.tfv.owner").read_text())["folders"]
        assert [pathlib.Path(name).name for name in noted] == ["a", "b"]
    said = the_error(train(work, "a").stderr)
    assert "is part of a state over 2 folders" in said and "--fresh" not in said


def test_nobody_goes_on_with_a_store_whose_copy_takes_its_place(work, whole):
    """Stopped when all of it is copied, before the first file of the first store is removed."""
    killed_at(work, "flush:a/state.tfv", "a", "c", nth=9)
    moves = start(work, *words_of("a", "b"), env={**SHIM, "TIERFLOW_FAIL": "unlink:c/state.tfv:stop"})
    wait_until(lambda: "State:\tT" in pathlib.Path(f"/proc/{moves.pid}/status").read_text())
    for folder in "ac":  # whoever looked before the copy was begun has the lock to fear, not the copy
        with open(work / folder / "state.tfv") as state, pytest.raises(BlockingIOError):
            fcntl.flock(state, fcntl.LOCK_EX | fcntl.LOCK_NB)
    refused = train(work, "a", "c")
    assert refused.returncode == 8 and "another process moves the state" in the_error(refused.stderr)
    run(work, "verify", "a,c")
    moves.send_signal(signal.SIGCONT)
    said = moves.communicate(timeout=60)[1]
    assert moves.returncode == 0 and "resumed after step" in said and weights(work) == whole
    assert is_empty(work / "a") and is_empty(work / "b") and is_empty(work / "c")


def test_a_copy_that_cannot_be_told_is_not_removed(work, whole):
    """Its header cannot be read, and of the first there is only a part: it may be all that there is."""
    killed_at(work, "flush:a/state.tfv", "a", "c", nth=9)
    killed_at(work, "rename:a/state.tfv-moving.tfv", "a", "b")  # c is removed by then
    assert is_empty(work / "c")
    headers = {}
    for folder in ("a", "b"):
        path = work / folder / "state.tfv-moving.tfv"
        headers[path] = path.read_bytes()
        path.write_bytes(b"\xff" * (520 << 10) + headers[path][520 << 10 :])  # both headers
    assert train(work, "a", "b").returncode not in (0, -signal.SIGKILL)
    for path, held in headers.items():
        assert path.exists()
        path.write_bytes(held)
    assert "the end of that was interrupted" in train(work, "a", "b").stderr and weights(work) == whole


@pytest.fixture
def wide(work):
    """A model whose tables are four of the smallest chunks: the weights of a run that was never interrupted."""
    (work / "config.json").write_text(json.dumps(config(vocab=4096)))
    assert train(work, "whole-store", out="whole").returncode == 0
    return weights(work, "whole")


def roomy(host, *folders):
    return [*TRAIN, "--out", "out", *small("--host-memory", host, "--storage", ",".join(folders))]


CUT = "has chunks for other budgets"


def test_killed_while_it_is_cut_for_smaller_budgets_one_of_both_states_is_whole(work, wide):
    begun = run(work, *roomy("64MiB", "a", "b"), ok=False, env={**SHIM, "TIERFLOW_FAIL": "flush:a/state.tfv:kill", "TIERFLOW_FAIL_NTH": "9"})
    assert begun.returncode == -signal.SIGKILL, begun.stderr
    for folder in "ab":
        shutil.copytree(work / folder, work / f"begun-{folder}")
    step = run(work, "status", "a,b").stdout.splitlines()[1]
    for call, nth, in_place in (("flush:a/state.tfv-moving.tfv", 3, False), ("rename:a/state.tfv-moving.tfv", 1, False), ("rename:b/state.tfv-moving.tfv", 1, True)):
        said = killed_at(work, call, "a", "b", nth=nth)
        assert f"the state in a {CUT} (327680 elements, here 65536): all of it, 5.1 MiB, is copied" in said
        if not in_place:
            assert step in run(work, "verify", "a,b").stdout + run(work, "status", "a,b").stdout
        done = train(work, "a", "b")
        assert done.returncode == 0, done.stderr
        assert ("the end of that was interrupted" in done.stderr) == in_place and (CUT in done.stderr) == (not in_place)
        assert weights(work) == wide and is_empty(work / "a") and is_empty(work / "b")
        for folder in ("out", "a", "b"):
            shutil.rmtree(work / folder)
        for folder in "ab":
            shutil.copytree(work / f"begun-{folder}", work / folder)
    run(work, *roomy("64MiB", "a", "b"))  # its own budgets
    assert weights(work) == wide


def test_without_room_for_the_copy_the_chunks_stay_where_that_can_be(work, wide):
    killed_at(work, "flush:a/state.tfv", "a", nth=9)
    full = {**SHIM, "TIERFLOW_FAIL": f"flush:a/state.tfv-moving.tfv:{errno.ENOSPC}"}
    done = run(work, *roomy("128MiB", "a"), env=full)  # for which they are small
    assert CUT in done.stderr and "the chunks of the state stay as they are" in done.stderr and weights(work) == wide
    shutil.rmtree(work / "out")
    begun = run(work, *roomy("64MiB", "a"), ok=False, env={**SHIM, "TIERFLOW_FAIL": "flush:a/state.tfv:kill", "TIERFLOW_FAIL_NTH": "9"})
    assert begun.returncode == -signal.SIGKILL
    refused = train(work, "a", env=full)  # for which they are too large
    assert refused.returncode == 5 and "No space left" in the_error(refused.stderr)
    run(work, "verify", "a")
    refused = train(work, "a", env={**full, "TIERFLOW_FAIL_NTH": "3"})  # its commit
    assert refused.returncode == 5 and "No space left" in the_error(refused.stderr), refused.stderr
    assert not (work / "a" / "state.tfv-moving.tfv").exists()  # a copy that is not whole gives its room back
    run(work, "verify", "a")


def test_room_that_becomes_free_a_little_later_is_waited_for(work, wide):
    killed_at(work, "flush:a/state.tfv", "a", nth=9)
    train(work, "a", env={**SHIM, "TIERFLOW_FAIL": f"allocate:a/state-scratch.tfv:{errno.ENOSPC}", "TIERFLOW_FAIL_NTH": "1", "TIERFLOW_CALLS": str(work / "calls")})
    assert (work / "calls").read_text().count("a/state-scratch.tfv") > 1 and weights(work) == wide


def test_a_copy_that_came_out_otherwise_takes_no_place(work, wide):
    """Its bytes change on the drive before its last flush has ended."""
    killed_at(work, "flush:a/state.tfv", "a", nth=9)
    shutil.copytree(work / "a", work / "begun")
    larger = roomy("128MiB", "a")
    run(work, *larger, env={**SHIM, "TIERFLOW_CALLS": str(work / "calls")})
    flushes = sum(call.startswith("flush ") and call.endswith("a/state.tfv-moving.tfv") for call in (work / "calls").read_text().splitlines())
    for folder in "a", "out":
        shutil.rmtree(work / folder)
    shutil.copytree(work / "begun", work / "a")
    process = start(work, *larger, env={**SHIM, "TIERFLOW_FAIL": "flush:a/state.tfv-moving.tfv:stop", "TIERFLOW_FAIL_NTH": str(flushes)})
    errors = while_it_stands(process, lambda: damage(work / "a" / "state.tfv-moving.tfv"))
    assert process.returncode == 0, errors
    assert CUT in errors and "the chunks of the state stay as they are" in errors and weights(work) == wide


def read_it(work, folder):
    assert "state after step" in run(work, "status", folder).stdout
    assert run(work, "verify", folder).stdout.startswith("whole: the state after step")
    run(work, "export", "--storage", folder, "--out", f"export-{folder}")
    return weights(work, f"export-{folder}")


def test_who_reads_a_state_writes_nothing_to_it(work):
    killed_at(work, "flush:a/state.tfv", "a", nth=9)
    before = [(path.name, path.stat().st_mtime_ns) for path in sorted((work / "a").iterdir())]
    read_it(work, "a")
    assert [(path.name, path.stat().st_mtime_ns) for path in sorted((work / "a").iterdir())] == before


def test_a_state_is_read_on_a_file_system_that_is_mounted_read_only(work):
    if os.geteuid() != 0:
        pytest.skip("this machine does not let us mount: that takes root")
    killed_at(work, "flush:a/state.tfv", "a", nth=9)
    (work / "ro").mkdir()
    mounted = subprocess.run(["mount", "--bind", "a", "ro"], cwd=work, capture_output=True, text=True)
    if mounted.returncode != 0:
        pytest.skip(f"this machine does not let us mount: {mounted.stderr.strip()}")
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", "ro"], cwd=work, check=True)
        with pytest.raises(OSError, match="Read-only"):
            (work / "ro" / "any").write_text("")
        assert read_it(work, "ro") == read_it(work, "a")
        assert "Read-only file system" in the_error(train(work, "ro").stderr)
    finally:
        subprocess.run(["umount", "--lazy", "ro"], cwd=work, check=True)  # the kernel closes a ring's files after its process has ended
