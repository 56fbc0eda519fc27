"""What is asked of the program and cannot be: one right line, before anything is made. And what is not finite."""

import contextlib
import fcntl
import json
import os
import pathlib
import pty
import re
import resource
import struct
import subprocess
import sys
import termios

import numpy
import pytest

from test_train import BUILD, MIB, PROGRAM, config, run, small, steps_of

pytestmark = pytest.mark.skipif(not (BUILD / "libtierflow_train.so").exists(), reason="built without LibTorch")
TRAIN = ["train", "--config", "config.json", "--data", "text.txt", "--out", "out"]


def refusal(done, code):
    """The one line."""
    assert done.returncode == code, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("tierflow: ")]
    assert len(lines) == 1 and "internal error" not in lines[0] and "Exception raised" not in done.stderr, done.stderr
    return lines[0]


@pytest.mark.parametrize("words, says", [
    (["--micro-batch", "1000000000"], "2^31 tokens a step"),
    (["--micro-batches", "1000000000000"], "--micro-batches is 1000000000000"),
    (["--micro-batches", "16777216"], "2^31 tokens a step"),
    (["--threads", "1000"], "--threads is 1000"),
    (["--host-memory", "0"], "--host-memory is 0"),
    (["--storage", "st", "./st"], "one folder twice"),
    (["--json", "stray"], 'unexpected word "stray"'),
    (["-x"], 'unexpected word "-x"'),
    (["--max-skipped", "-1"], "--max-skipped"),
])  # fmt: skip
def test_sizes_and_words_are_refused_in_a_line(work, words, says):  # noqa: F811
    before = {path.name for path in work.iterdir()}
    assert says in refusal(run(work, *TRAIN, "--steps", "1", *small(*words), ok=False, timeout=60), 2)
    assert {path.name for path in work.iterdir()} == before


MEASURED = """
import os, subprocess, sys
child = subprocess.Popen(sys.argv[1:])
_, status, used = os.wait4(child.pid, 0)
print(used.ru_maxrss * 1024)
sys.exit(os.waitstatus_to_exitcode(status))
"""


def with_its_peak(*words, **more):
    """What a program said, with the most bytes that were resident as its output. Of a small process: the kernel counts that of the parent in."""
    return subprocess.run([sys.executable, "-c", MEASURED, *map(str, words)], capture_output=True, text=True, **more)


@pytest.mark.parametrize("micro_batch", [2000, 5000, 1000000])
def test_a_micro_batch_beyond_the_budget_is_not_made(work, micro_batch):  # noqa: F811
    most = int(with_its_peak(BUILD / "bare_torch").stdout.split()[-1]) + 3 * 64 * MIB + 300 * MIB
    done = with_its_peak(PROGRAM, *TRAIN, *small("--steps", "1", "--micro-batch", str(micro_batch)), cwd=work)
    line = refusal(done, 2)
    assert "--device-memory 64MiB is too small: the smallest that works is" in line
    assert int(done.stdout) < most, f"{int(done.stdout) >> 20} MiB"


def test_the_memory_of_a_run_is_its_own_whatever_started_it(work):  # noqa: F811
    script = "import subprocess, sys; held = b'1' * (1 << 30); subprocess.run(sys.argv[1:], check=True)"
    words = [PROGRAM, *TRAIN, *small("--steps", "1", "--json")]
    done = subprocess.run([sys.executable, "-c", script, *map(str, words)], cwd=work, capture_output=True, text=True, check=True)
    assert 64 * MIB < json.loads(done.stdout.splitlines()[-1])["summary"]["peak_rss"] < 1 << 30


def test_paths_that_are_not_utf8_and_a_folder_that_is_gone(work):  # noqa: F811
    (work / "caf\udce9.txt").write_bytes(b"x")
    line = refusal(run(work, "train", "--config", "config.json", "--data", "caf\udce9.txt", "--out", "out", *small(), ok=False), 2)
    assert "--data" in line and "not UTF-8" in line
    gone = work / "gone"
    gone.mkdir()
    for words in (["train", "--config", "../config.json", "--data", "../text.txt", "--out", "out"], ["plan", "--config", "../config.json"],
                  ["eval", "--model", "m", "--data", "d"], ["export", "--storage", "s", "--out", "o"], ["init", "--config", "c", "--out", "o"],
                  ["bench", "storage", "--dir", "d"]):  # fmt: skip
        done = subprocess.run(["sh", "-c", 'rmdir ../gone; exec "$@"', "sh", str(PROGRAM), *words], cwd=gone, capture_output=True, text=True, timeout=60)
        assert "the working folder" in refusal(done, 4)
        gone.mkdir()


def test_a_temporary_folder_that_is_none(work):  # noqa: F811
    done = subprocess.run([str(PROGRAM), *TRAIN, *small()], cwd=work, capture_output=True, text=True, env={**os.environ, "TMPDIR": "/no/such"}, timeout=60)
    line = refusal(done, 4)
    assert "/no/such" in line and "TMPDIR" in line


def test_text_that_is_none(work):  # noqa: F811
    text = (work / "text.txt").read_text()
    (work / "text.txt").write_bytes(text.encode("utf-16"))
    assert "UTF-16" in (line := refusal(run(work, *TRAIN, *small(), ok=False), 3)) and "iconv" in line
    (work / "text.txt").write_bytes(pathlib.Path(PROGRAM).read_bytes()[:100000])
    assert "text.txt" in refusal(run(work, *TRAIN, *small(), ok=False), 3)
    (work / "bad.jsonl").write_text("nothing\n" * 5)
    words = ["train", "--config", "config.json", "--data", "bad.jsonl", "--out", "out", "--on-bad-row", "skip"]
    assert "5 of them" in refusal(run(work, *words, *small(), ok=False), 3)
    assert not (work / "out").exists()


def spoil(folder):
    """Puts a NaN into the largest weight of a model folder."""
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    header = int.from_bytes(data[:8], "little")
    tensors = {name: entry for name, entry in json.loads(data[8 : 8 + header]).items() if name != "__metadata__"}
    begin = max(tensors.values(), key=lambda entry: entry["data_offsets"][1] - entry["data_offsets"][0])["data_offsets"][0]
    data[8 + header + begin : 8 + header + begin + 2] = numpy.array([0x7FC0], dtype="<u2").tobytes()
    path.write_bytes(data)


@pytest.mark.parametrize("storage", [[], ["--storage", "store", "--host-memory", "1MiB"]])
def test_weights_that_are_not_finite_end_the_run(work, storage):  # noqa: F811
    run(work, "init", "--config", "config.json", "--out", "model")
    spoil(work / "model")
    words = ["train", "--model", "model", "--data", "text.txt", "--out", "out", "--log-json", "log.json", "--steps", "50"]
    done = run(work, *words, *small("--max-skipped", "3", *storage), ok=False)
    line = refusal(done, 7)
    assert "there is no result" in line and "after step 3 of 50" in line and "nan" not in done.stderr
    records = [json.loads(text) for text in (work / "log.json").read_text().splitlines()]
    assert [record["skipped"] for record in records if "skipped" in record] == [True] * 3
    assert records[-1]["summary"]["steps"] == 3 and records[-1]["summary"]["out"] is None
    assert not (work / "out").exists()
    done = run(work, "eval", "--model", "model", "--data", "text.txt", *small(), ok=False)
    assert "the loss is not finite" in refusal(done, 7) and "nan" not in done.stdout
    if storage:
        assert "the state stays: `tierflow export --storage store --out FOLDER`" in line
        run(work, "export", "--storage", "store", "--out", "kept")
        assert (work / "kept" / "config.json").exists()
    else:
        assert "export" not in line
    default = run(work, *words[:-2], "--steps", "30", *small("--storage", "other", "--host-memory", "1MiB"), ok=False)
    assert "after step 20 of 30" in refusal(default, 7)


def test_an_evaluation_of_all_that_is_held_out_streams(work):  # noqa: F811
    """Its ids and labels take 16 bytes a token: with the whole set in memory it would not fit the device budget."""
    (work / "config.json").write_text(json.dumps(config(hidden=32, layers=1)))
    tokens = numpy.arange(2 << 20, dtype="<u2") % 256
    tokens.tofile(work / "tokens.bin")
    words = ["train", "--config", "config.json", "--data", "tokens.bin", "--out", "out", "--steps", "1", "--held-out", "0.9", "--eval-sequences", "0",
             "--log-json", "log.json", *small("--device-memory", "16MiB", "--micro-batch", "16")]  # fmt: skip
    run(work, *words)
    assert 0.9 * tokens.size * 16 > 16 * MIB
    losses = [record["held_out_loss"] for record in map(json.loads, (work / "log.json").read_text().splitlines()) if "held_out_loss" in record]
    assert len(losses) == 2 and all(5 < loss < 6 for loss in losses)


def test_the_terminal_gets_a_paragraph_and_the_log_every_option(work):  # noqa: F811
    done = run(work, *TRAIN, *small("--steps", "1", "--log-json", "log.json"))
    lines = done.stderr.splitlines()
    assert lines[0].startswith("training config.json from random weights on text.txt: 1 steps") and not any('"lr-schedule"' in line for line in lines)
    paragraph = lines[: next(i for i, line in enumerate(lines) if line.endswith("log.json")) + 1]
    assert len(paragraph) <= 5 and max(map(len, paragraph)) <= 80
    logged = json.loads((work / "log.json").read_text().splitlines()[0])["config"]
    assert logged["lr-schedule"] == "cosine" and len(logged) > 30


def test_what_a_terminal_shows_fits_it(work):  # noqa: F811
    mine, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("4H", 24, 72, 0, 0))
    words = [PROGRAM, *TRAIN, *small("--steps", "3", "--held-out", "0.2", "--storage", "st", "--host-memory", "1MiB")]
    process = subprocess.Popen([*map(str, words)], cwd=work, stdout=subprocess.DEVNULL, stderr=its)
    os.close(its)
    shown = b""
    with contextlib.suppress(OSError):  # how the end of a terminal reads
        while piece := os.read(mine, 1 << 16):
            shown += piece
    os.close(mine)
    assert process.wait() == 0
    lines = re.split(r"[\r\n]+(?:\x1b\[K)?", shown.decode())
    assert any("step 3/3" in line for line in lines) and any(line.startswith("moved by the steps: storage") for line in lines)
    assert not [line for line in lines if len(line) > 72 and " " in line]


def test_help_is_grouped_and_fits(work):  # noqa: F811
    asked = run(work, "help", "train").stdout
    assert asked == run(work, "train", "--help").stdout
    assert max(map(len, asked.splitlines())) <= 80 and "\nTraining:\n" in asked and "--max-skipped" in asked
    assert max(map(len, run(work, "--help").stdout.splitlines())) <= 80
    assert run(work, "help").stdout == run(work, "--help").stdout
    assert "bench storage" in run(work, "help", "bench", "storage").stdout
    assert "unknown command" in refusal(run(work, "help", "trian", ok=False), 2)


def test_odd_folders_and_another_locale_change_nothing(work):
    train = ["train", "--config", "config.json", "--data", "text.txt", "--lr", "1e-3", "--steps", "2", *small("--storage", "st", "--host-memory", "1MiB")]
    run(work, *train, "--out", "plain")
    odd = work / "a folder, with Ünïcode 北" / ("long" * 40)
    odd.mkdir(parents=True)
    for name in "config.json", "text.txt":
        (odd / name).write_bytes((work / name).read_bytes())
    run(odd, *train, "--out", "it's out", env={"LC_ALL": "de_DE.UTF-8", "LANG": "tr_TR.UTF-8", "TZ": "Asia/Kathmandu"})
    assert (odd / "it's out" / "model.safetensors").read_bytes() == (work / "plain" / "model.safetensors").read_bytes()
