"""The scripts of `make gpu-kit` without a kit: what each part's steps are, and what single functions answer."""

import json
import os
import re
import subprocess
import sys
import time

import pytest

from conftest import BUILD, ROOT


def test_what_a_card_is_asked_first_and_that_nothing_is_left_out(scripts, tmp_path):
    """Each test that needs a card is in one step, in an order of what it says about the others; those that take long are not in part 0."""
    import parts

    def listed(*words):
        said = subprocess.run([BUILD / "gpu_test", "--gtest_list_tests", *words], capture_output=True, text=True, check=True).stdout
        suite, found = "", []
        for line in said.splitlines()[1:]:
            name = line.split()[0]
            suite, found = (suite, [*found, suite + name]) if line.startswith(" ") else (name, found)
        return found

    if not (BUILD / "gpu_test").exists():
        pytest.skip("gpu_test is not built")
    long = listed(f"--gtest_filter={parts.ON_GPU['long_on_gpu']}")
    for part, left_out in ((0, long), (1, [])):
        steps = [step for step in parts.steps(part, parts.Place(tmp_path, tmp_path, tmp_path, "python3", False)) if step.command[0] == tmp_path / "bin/gpu_test"]
        found = [listed(*step.command[1:]) for step in steps]
        assert sorted(sum(found, left_out)) == sorted(name for name in listed() if not name.endswith("/cpu"))
        assert [any(name in test for test in tests) for tests, name in zip(found, ("RowKernels", "StreamedIsResident", "ComputesWhat"))] == [True] * 3


@pytest.fixture
def scripts(monkeypatch):
    """The kit's scripts can be imported."""
    for folder in ("benchmarks/gpu", "tools/gpu_kit"):
        monkeypatch.syspath_prepend(str(ROOT / folder))


@pytest.mark.parametrize("part", [0, 1, 2, 3])
@pytest.mark.parametrize("rehearse", [False, True])
def test_the_limits_of_a_part_fit_into_its_time(scripts, tmp_path, part, rehearse):
    """Seven minutes for the first, nine for the others. Whatever hangs, what comes behind it has its time; the packer, the start and the table
    have ten seconds."""
    import parts

    steps = parts.steps(part, parts.Place(tmp_path, tmp_path, tmp_path, "python3", rehearse))
    assert sum(step.timeout for step in steps) <= parts.SECONDS[part] <= (530 if part else 410)
    assert len({step.name for step in steps}) == len(steps)


def test_the_short_part_has_steps_of_the_others(scripts, tmp_path):
    """They are as there, but for their time and number of steps."""
    import parts

    place = parts.Place(tmp_path, tmp_path, tmp_path, "python3", rehearse=False)
    short, whole = parts.steps(0, place), {step.name: step for part in (1, 2, 3) for step in parts.steps(part, place)}
    assert short[0].name == "inventory" and {step.name for step in short} <= whole.keys()
    assert all((step.gpu, step.gtest, step.command[:2]) == (whole[step.name].gpu, whole[step.name].gtest, whole[step.name].command[:2]) for step in short)


def test_a_step_gets_what_those_before_it_left_and_leaves_the_others_theirs(scripts, tmp_path):
    import session
    from parts import Step

    steps = [Step("quick", 4, ["/bin/true"]), Step("hangs", 3, ["/bin/sleep", "100"]), Step("behind", 4, ["/bin/true"])]
    running = session.Session(1, tmp_path, tmp_path, {}, None, time.monotonic() + 13, 100)
    for index, step in enumerate(steps):
        running.run(step, steps[index + 1:])
    quick, hangs, behind = (entry["status"] for entry in running.records)
    assert quick == behind == "ok"
    assert 3 < int(re.fullmatch(r"timeout after (\d+) s", hangs)[1]) <= 9


def test_scripts_are_read_by_the_oldest_python_that_torch_has():
    import ast

    for path in [*(ROOT / "tools/gpu_kit").glob("*.py"), ROOT / "benchmarks/gpu/bench.py"]:
        ast.parse(path.read_text(), path.name, feature_version=(3, 10))


def test_memory_that_a_container_may_take(scripts, tmp_path):
    from streamed import memory_available

    cgroup = tmp_path / "sys/fs/cgroup"
    (cgroup / "memory").mkdir(parents=True)
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 900 kB\nMemAvailable: 800 kB\n")
    assert memory_available(tmp_path) == 800 * 1024
    (cgroup / "memory.max").write_text("max\n")
    (cgroup / "memory.current").write_text("1000\n")
    assert memory_available(tmp_path) == 800 * 1024
    (cgroup / "memory.max").write_text("51000\n")
    assert memory_available(tmp_path) == 50000
    (cgroup / "memory/memory.limit_in_bytes").write_text("40000\n")
    (cgroup / "memory/memory.usage_in_bytes").write_text("1\n")
    assert memory_available(tmp_path) == 39999


@pytest.mark.parametrize("name, millions", [("8b", 8030), ("1b", 1235), ("tiny", 0)])
def test_parameters_of_the_resident_model(scripts, name, millions):
    import parts
    import torch
    from resident import Llama

    config = json.loads((ROOT / f"tools/gpu_kit/models/llama-{name}.json").read_text())
    with torch.device("meta"):
        assert parts.parameters(config) == sum(weight.numel() for weight in Llama(config).parameters())
    assert parts.parameters(config) // 1_000_000 == millions


def test_fewer_layers_where_the_drive_is_slow_or_small(scripts):
    from streamed import layers_that_fit

    def made(free):
        return {"step": {"step_s": 10.0, "lanes": {"disk_write": {"bytes": 10, "busy_s": 1.0}}}, "storage": {"bytes": 1000, "free": free}}

    assert layers_that_fit(made(2000), 32, 2, 125) == 32  # 100 s to fill, two and a half steps
    assert layers_that_fit(made(2000), 32, 2, 62.5) == 16
    assert layers_that_fit(made(500), 32, 2, 125) == 14  # nine tenths of the room
    assert layers_that_fit(made(1), 32, 2, 1) == 2


KERNELS = """begin
name 3 void at::native::add<4, (anonymous namespace)::Plus>(int, float*)
kernel 3 7 1000000000 1400000000
name 4 gemm
kernel 4 7 2000000000 2300000000
kernel 4 7 2300010000 2600000000
kernel 3 9 2100000000 2200000000
kernel 4 7 2700000000 3000000000
copy 1 8 2000000000 2500000000 25000000000
copy 2 8 1100000000 1200000000 77
fill 0 7 2600000000 2600001000 4096
kernel 4 7 30"""


def test_where_the_time_of_kernels_goes(scripts, tmp_path):
    """Of the last second: what computes on the busiest stream, its gaps, copies; a line that is cut off is left out."""
    import kernel_times

    path = tmp_path / "kernels.log"
    path.write_text(KERNELS)
    stream, gap, gemm, add, *copies = kernel_times.summary(path, 1.0)
    assert stream["compute_stream"] == {"seconds": 1.0, "busy": pytest.approx(0.89999), "in_short_gaps": pytest.approx(1e-5), "in_long_gaps": pytest.approx(0.1), "long_gaps": 1}
    assert gap == {"gap_ms": 100.0, "at_s": pytest.approx(0.7), "before": "gemm"}
    assert gemm == {"kernel": "gemm", "share": pytest.approx(0.89999), "count": 3, "us": pytest.approx(299996.67)}
    assert add == {"kernel": "at::native::add<4, Plus>", "share": pytest.approx(0.1), "count": 1, "us": 100000.0, "beside": True}
    assert [(line["copied"], line["bytes"], line["gb_s"]) for line in copies] == [("copy 1", 25_000_000_000, 50.0), ("fill 0", 4096, pytest.approx(4.096))]
    path.write_text("begin\n")
    assert kernel_times.summary(path, 1.0) == []


def test_the_log_of_kernels_has_all_of_a_process_that_is_killed_later(tmp_path):
    """CUPTI hands out a buffer when it is full, or when it is asked to; a stand-in for it does."""
    source, log, when = tmp_path / "process.cpp", tmp_path / "kernels.log", tmp_path / "when"
    source.write_text(r"""
#include "kernel_log.cpp"
int main() {
  run_kernel(7, 0, 1, "early");
  InitializeInjection();
  run_kernel(7, 1, 2, "early");
  std::fclose(std::fopen(std::getenv("KERNEL_LOG_WHEN"), "w"));
  for (bool enabled = false; !enabled;) {
    const std::lock_guard lock(stand_in.mutex);
    enabled = stand_in.enabled;
  }
  for (uint64_t i = 0; i < 20005; ++i) run_kernel(i % 3, 10 * i, 10 * i + 4, i % 2 ? "gemm" : "_Z3addi");
  ::pause();
}
""")
    subprocess.run(["g++", "-std=c++20", "-O0", "-pthread", "-I", ROOT / "tools/gpu_kit", "-I", ROOT / "tests/support/cupti", source, "-o", tmp_path / "process"], check=True)
    child = subprocess.Popen([tmp_path / "process"], env={**os.environ, "KERNEL_LOG": str(log), "KERNEL_LOG_WHEN": str(when)})
    expected = ["begin", "name 0 add(int)", "kernel 0 0 0 4", "name 1 gemm", *(f"kernel {i % 2} {i % 3} {10 * i} {10 * i + 4}" for i in range(1, 20005))]
    try:
        end = time.monotonic() + 20
        while time.monotonic() < end and not (log.exists() and log.read_text().endswith(expected[-1] + "\n")):
            time.sleep(0.05)
    finally:
        child.kill()
        child.wait()
    assert log.read_text().splitlines() == expected


def test_a_step_that_is_stopped_while_it_starts_is_recorded(tmp_path):
    code = """
import pathlib, sys, threading
import session
from parts import Step
begin = threading.Thread.start
def started(thread):
    begin(thread)
    raise session.Interrupted(15)
threading.Thread.start = started
out = pathlib.Path(sys.argv[1])
running = session.Session(1, out, out, {}, None, 1e12, 100)
try:
    running.run(Step("slow", 100, ["/bin/sleep", "100"]))
except session.Interrupted:
    print(running.records[0]["name"], running.records[0]["status"], running.child.returncode)
"""
    done = subprocess.run([sys.executable, "-c", code, tmp_path], env={**os.environ, "PYTHONPATH": str(ROOT / "tools/gpu_kit")}, capture_output=True, text=True, timeout=30)
    assert done.stdout.splitlines()[-1] == "slow interrupted -15", done.stderr
