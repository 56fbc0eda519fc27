"""`tierflow bench` from the outside: it needs no LibTorch, prints what scripts can read, and leaves nothing behind."""
import json
import shutil
import signal
import subprocess
import time

import pytest

SMALL = ["--size", "4MiB", "--block", "256KiB", "--depth", "4", "--allow-buffered", "--allow-any-filesystem"]


def bench(tierflow, work, *words, ok=True):
    done = subprocess.run([str(tierflow), "bench", *map(str, words)], cwd=work, capture_output=True, text=True, timeout=120)
    assert not ok or done.returncode == 0, done.stderr
    return done


def test_storage_reports_each_engine_and_the_volume(tierflow, tmp_path):
    done = bench(tierflow, tmp_path, "storage", "--dir", "a,new/b", *SMALL, "--json")
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    engines = {line["engine"] for line in lines}
    assert "threads" in engines and engines <= {"io_uring", "libaio", "threads"}
    assert {tuple(line["folders"]) for line in lines} == {("a",), ("new/b",), ("a", "new/b")}
    assert len(lines) == 3 * len(engines)
    for line in lines:
        assert isinstance(line["direct"], bool)
        assert min(line["read_gb_s"], line["write_gb_s"], line["mixed_gb_s"], line["first_write_gb_s"]) > 0
        for side in "read", "write":
            latency = line[f"{side}_latency_us"]
            assert 0 < latency["p50"] <= latency["p99"] <= latency["max"]
        if len(line["folders"]) == 2:  # striped by what each folder reached alone
            assert len(line["speeds"]) == 2 and min(line["speeds"]) > 0
    assert not [*tmp_path.iterdir()], "files and folders of the measurement stay behind"


def test_storage_table_has_a_row_for_one_engine_and_what_was_not_measured(tierflow, tmp_path):
    done = bench(tierflow, tmp_path, "storage", "--dir", "a", *SMALL, "--engine", "threads", "--measure", "read")
    header, row = done.stdout.splitlines()
    assert header.split()[:2] == ["engine", "direct"] and row.split()[0] == "threads"
    assert float(row.split()[2]) > 0 and row.split()[3:5] == ["-", "-"]


def test_storage_keeps_the_file_only_where_asked(tierflow, tmp_path):
    words = ["storage", "--dir", "a", *SMALL, "--engine", "threads", "--measure", "write"]
    bench(tierflow, tmp_path, *words, "--keep")
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["tierflow-bench.tfv"]
    bench(tierflow, tmp_path, *words, "--keep")
    assert bench(tierflow, tmp_path, *words, ok=False).returncode == 4
    assert (tmp_path / "a" / "tierflow-bench.tfv").exists(), "a file that was there before is not removed"


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_stopped_measurement_leaves_nothing(tierflow, tmp_path, number, code):
    process = subprocess.Popen([str(tierflow), "bench", "storage", "--dir", "a", *SMALL, "--seconds", "300"], cwd=tmp_path,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.time() + 60
    while time.time() < deadline and not [*tmp_path.glob("a/*")]:
        time.sleep(0.02)
    assert [*tmp_path.glob("a/*")]
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == code and errors.splitlines()[-1].startswith("tierflow: bench: stopped"), errors
    assert not [*tmp_path.iterdir()]


def test_a_reader_that_goes_away_leaves_nothing(tierflow, tmp_path):
    process = subprocess.Popen([str(tierflow), "bench", "storage", "--dir", "a", *SMALL, "--json"], cwd=tmp_path, stdout=subprocess.PIPE,
                               stderr=subprocess.DEVNULL)
    process.stdout.close()
    assert process.wait(timeout=60) == 5
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("words, code, says", [
    ([], 2, "storage or optimizer"),
    (["drive"], 2, "storage or optimizer"),
    (["storage"], 2, "--dir"),
    (["storage", "--dir", "a,a"], 2, "twice"),
    (["storage", "--dir", "a", "--block", "1000"], 2, "--block"),
    (["storage", "--dir", "a", "--block", "1GiB", "--size", "1GiB", "--depth", "4096"], 2, "memory"),
    (["storage", "--dir", "a", "--size", "0"], 2, "--size"),
    (["storage", "--dir", "a", "--size", "4000TiB", "--allow-buffered", "--allow-any-filesystem"], 4, "a/tierflow-bench.tfv"),
    (["storage", "--dir", "a", "--engine", "aio"], 2, "libaio"),
    (["storage", "--dir", "a", "--dept", "3"], 2, "did you mean --depth"),
    (["storage", "--dir", "/proc/nowhere"], 4, "/proc/nowhere"),
    (["optimizer", "--elements", str(1 << 40)], 2, "memory"),
    (["optimizer", "--elements", "65536", "--only", "nothing like this"], 2, "--only"),
])
def test_bad_input_is_one_line(tierflow, tmp_path, words, code, says):
    done = bench(tierflow, tmp_path, *words, ok=False)
    assert done.returncode == code, done.stderr
    assert len(done.stderr.splitlines()) == 1 and done.stderr.startswith("tierflow: ") and says in done.stderr, done.stderr
    assert not [*tmp_path.iterdir()]


def test_optimizer_lines(tierflow, tmp_path):
    words = ["optimizer", "--elements", "65536", "--threads", "1", "--repeats", "1", "--only", "adamw block8 hi/lo"]
    lines = [json.loads(line) for line in bench(tierflow, tmp_path, *words, "--json").stdout.splitlines()]
    assert lines and all("adamw block8 hi/lo" in line["name"] and line["mparam_s"] > 0 and line["stream_share"] > 0 for line in lines)
    table = bench(tierflow, tmp_path, *words).stdout.splitlines()
    assert len(table) == 1 + len(lines) and "Mparam/s" in table[0]


def test_peers_outside_the_source_tree_say_what_to_run(tierflow, tmp_path):
    shutil.copy(tierflow, tmp_path / "tierflow")
    done = bench(tmp_path / "tierflow", tmp_path, "optimizer", "--elements", "65536", "--threads", "1", "--repeats", "1", "--peers", ok=False)
    assert done.returncode == 4 and "peers.py" in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr


def test_starts_at_once_and_without_libtorch(tierflow, tmp_path):
    shutil.copy(tierflow, tmp_path / "tierflow")  # no libtierflow_train.so beside it
    maps = subprocess.run(["ldd", str(tmp_path / "tierflow")], capture_output=True, text=True).stdout
    assert "torch" not in maps
    for what in "storage", "optimizer":
        assert "--json" in bench(tmp_path / "tierflow", tmp_path, what, "--help").stdout
    assert "bench optimizer" in bench(tmp_path / "tierflow", tmp_path, "--help").stdout
