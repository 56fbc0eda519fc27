"""The kit of `make gpu-kit`, packed from this build and rehearsed without a GPU: what it contains, what it records, what it refuses."""

import gzip
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

from conftest import BUILD, ROOT
from test_gpu_kit_scripts import KERNELS

PACKER = ROOT / "tools/gpu_kit.py"
GLIBC = {"libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}


def pack(out, *words):
    return subprocess.run([sys.executable, PACKER, "--build", BUILD, "--python", sys.executable, "--out", out, *words], capture_output=True, text=True)


@pytest.fixture(scope="module")
def kit(tierflow, tmp_path_factory):
    """The kit as somebody unpacks it."""
    for name in ("device_test", "optim_gpu_test", "gpu_test", "device_bench", "libtierflow_train.so"):
        if not (BUILD / name).exists():
            pytest.skip(f"{BUILD / name} is not built")
    folder = tmp_path_factory.mktemp("kit")
    done = pack(folder / "kit.tar.gz")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["mib"] == pytest.approx((folder / "kit.tar.gz").stat().st_size / (1 << 20), abs=0.01)
    subprocess.run(["tar", "xf", "kit.tar.gz"], cwd=folder, check=True)
    return folder / "tierflow-gpu-kit"


@pytest.fixture
def changed(kit, tmp_path):
    """A copy of the kit to change."""
    return shutil.copytree(kit, tmp_path / "kit", ignore=shutil.ignore_patterns("kit-work"))


def start(kit, folder, *words, **environment):
    folder.mkdir(parents=True, exist_ok=True)
    env = {**os.environ, "PYTHON": sys.executable, "OUT": str(folder / "out"), "STORAGE": str(folder), **environment}
    return subprocess.Popen([kit / "gpu_session.sh", *map(str, words)], cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def session(*words, **environment):
    """Standard output, standard error and exit code."""
    child = start(*words, **environment)
    said, error = child.communicate()
    return said, error, child.returncode


def records(folder, part):
    return {entry["name"]: entry for entry in map(json.loads, (folder / "out" / f"part{part}.jsonl").read_text().splitlines())}


def program(path, *lines):
    path.write_text("#!/bin/sh\n" + "\n".join(lines) + "\n")
    path.chmod(0o755)


def one_line(text):
    lines = text.splitlines()
    assert len(lines) == 1, text
    return lines[0]


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory):
    """A folder with torch and the wheels that come with it, under another path than the one that the programs were built with."""
    import torch

    folder, site = tmp_path_factory.mktemp("elsewhere"), pathlib.Path(torch.__file__).parents[1]
    for name in ("torch", "nvidia"):
        if (site / name).exists():
            (folder / name).symlink_to(site / name)
    return folder


@pytest.fixture(scope="module")
def rehearsed(kit, elsewhere, tmp_path_factory):
    """Records of each part, with torch elsewhere. Two go at a time: most of each is one thread that loads torch."""
    folders = {part: tmp_path_factory.mktemp(f"part{part}") for part in (1, 2, 3)}
    second, found = start(kit, folders[2], "--rehearse", 2, PYTHONPATH=str(elsewhere)), {}
    for part in (1, 3, 2):
        child = second if part == 2 else start(kit, folders[part], "--rehearse", part, PYTHONPATH=str(elsewhere))
        said, _ = child.communicate()
        assert child.returncode == 0, said
        found[part] = (folders[part], said)
    return found


@pytest.mark.parametrize("part", [1, 2, 3])
def test_a_rehearsal_runs_every_step_or_says_that_it_needs_a_gpu(rehearsed, elsewhere, part):
    folder, said = rehearsed[part]
    entries = records(folder, part)
    skipped = {name for name, entry in entries.items() if entry["status"] == "skipped: no GPU"}
    assert all(entry["status"] == "ok" and entry["rc"] == 0 and entry["seconds"] > 0 for name, entry in entries.items() if name not in skipped)
    tools = {f"{tool}.{name}" for tool in ("memcheck", "racecheck", "synccheck") for name in ("device_test", "optim_gpu_test")}
    assert skipped == {1: {"optimizer_kernels", "model_kernels", "streamed_is_resident", "models_on_gpu", "long_on_gpu"} | tools, 2: {"copies", "overlap"}, 3: set()}[part]
    assert said.splitlines()[0].endswith(f" in {elsewhere / 'torch'}")
    table = (folder / "out" / f"part{part}.txt").read_text()
    assert [line.split()[0] for line in table.splitlines()] == ["step", *entries]
    log = (folder / "out" / f"part{part}.log").read_text()
    assert log == said and all(line in log for line in table.splitlines())
    assert not [path for path in (folder / "kit-work").iterdir() if path.is_dir() and path.name != "cache"], "stores are removed"


def test_what_steps_measure_is_in_their_records(rehearsed):
    first, second, third = (records(rehearsed[part][0], part) for part in (1, 2, 3))
    assert first["device_contract"]["measured"][-1]["tests"] == 41 and first["device_contract"]["measured"][-1]["failed"] == 0
    assert {"libraries_not_found": {}} in first["inventory"]["measured"]
    assert any(line.get("read_gb_s", 0) > 0 for line in first["drive"]["measured"])
    for name in ("products", "weight_gradients", "attention", "kernels"):
        assert second[name]["measured"] and not any("not_measured" in line for line in second[name]["measured"])
    lines = second["device_bench"]["measured"]
    assert {(line["copy"], line["depth"]) for line in lines if "copy" in line} == {(way, depth) for way in ("up", "down", "gradient down, mapped", "gradient down in slots", "both") for depth in (1, 2)}
    assert all(line["gb_s"] > 0 for line in lines if "copy" in line)
    beside = [line for line in lines if "beside" in line]
    assert [(line["beside"], line.get("moments")) for line in beside] == [("gradient download, mapped", None), ("gradient download in slots", None),
                                                                          ("gradient download in slots, measured", None), ("update on the device", "8 bits"), ("update on the device", "bf16")]
    for line in beside:
        rate = "gb_s" if line["beside"].startswith("gradient download") else "elements_g_s"
        assert all(line[f"{what}_{when}"] > 0 for what in (rate, "tflops") for when in ("alone", "beside"))
    for entry in (second["streamed_1b"], second["streamed_mixture"], third["streamed_8b_8192"], third["whole_card_8b_2048"], third["streamed_8b_drive"]):
        run = entry["measured"][-1]
        assert run["step_s"] > 0 and run["measured_to_predicted"] == pytest.approx(run["step_s"] / run["predicted_step_s"], rel=0.1) and 0 <= run["hidden_share"] <= 1
        assert [line["step"]["step"] for line in entry["measured"] if "step" in line] == list(range(1, run["steps"] + 1))
        assert any("plan" in line for line in entry["measured"])
    assert (rehearsed[3][0] / "out/streamed_8b_drive.trace.json.gz").stat().st_size > 1000
    assert third["resident_8b_8192"]["measured"][-1]["tokens_per_s"] > 0


def test_programs_take_torch_from_where_this_python_has_it(rehearsed, elsewhere):
    """Nothing in a program leads to the torch that it was built with."""
    lines = records(rehearsed[1][0], 1)["inventory"]["measured"]
    found = next(line["libtorch_of_programs"] for line in lines if "libtorch_of_programs" in line)
    assert set(found.values()) == {str(elsewhere / "torch/lib/libtorch_cpu.so")} and {"libtierflow_train.so", "gpu_test", "device_bench"} <= found.keys()


def test_streamed_and_resident_train_the_same_model(rehearsed):
    """The same shapes and tokens a step: a ratio of the two means something."""
    third = records(rehearsed[3][0], 3)
    planned = next(line["plan"] for line in third["streamed_8b_8192"]["measured"] if "plan" in line)
    assert planned["step"]["tokens"] == third["resident_8b_8192"]["measured"][-1]["tokens_per_step"]
    first = {name: next(line.get("loss", line.get("step", {}).get("loss") if isinstance(line.get("step"), dict) else None) for line in third[name]["measured"] if "step" in line)
             for name in ("resident_8b_8192", "streamed_8b_8192")}
    assert first["resident_8b_8192"] == pytest.approx(first["streamed_8b_8192"], abs=0.1)  # both near ln 512: random weights of one size


def test_a_step_that_fails_is_recorded_and_does_not_end_the_part(changed, tmp_path):
    program(changed / "bin/device_test", "echo '{\"before\": 1}'", "echo it broke", "exit 3")
    said, _, code = session(changed, tmp_path, "--rehearse", 1, "--only", "device_contract,drive")
    entries = records(tmp_path, 1)
    assert entries["device_contract"]["status"] == "failed: exit code 3" and entries["device_contract"]["rc"] == 3 and entries["device_contract"]["measured"] == [{"before": 1}]
    assert entries["drive"]["status"] == "ok"
    assert code == 1 and "device_contract| it broke" in said


def test_a_step_that_hangs_is_ended_and_the_part_goes_on(changed, tmp_path):
    program(changed / "bin/device_test", "echo '{\"before\": 1}'", "mkdir left", f"echo $$ >{tmp_path}/process", "trap '' TERM", "sleep 100 & wait")
    begin = time.monotonic()
    _, _, code = session(changed, tmp_path, "--rehearse", 1, "--only", "device_contract,drive", "--step-seconds", 3)
    entries = records(tmp_path, 1)
    assert entries["device_contract"]["status"] == "timeout after 3 s" and entries["device_contract"]["rc"] == 124 and entries["device_contract"]["measured"] == [{"before": 1}]
    assert entries["drive"]["status"] == "ok" and code == 1
    assert time.monotonic() - begin < 30
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "process").read_text()), 0)
    assert not (tmp_path / "kit-work/left").exists()


@pytest.mark.parametrize("end, status", [("exec sleep 100", "timeout after 3 s"), ("kill -SEGV $$", "failed: exit code -11")])
def test_tests_that_were_over_before_their_program_was_ended_are_recorded(changed, tmp_path, end, status):
    """Also that one failed, and which one was running. The list at the end of a run is no further test."""
    passes = ["echo '[ RUN      ] Suite.First'", "echo 'no line end[       OK ] Suite.First (3 ms)'", "echo '[ RUN      ] All/Suite.Second/cuda'"]
    failure = "echo '[  FAILED  ] All/Suite.Second/cuda, where GetParam() = \"cuda\" (3 ms)'"
    program(changed / "bin/device_test", 'case "$*" in *brief*) ;; *)', *passes, ";; esac", failure, failure, "echo '[ RUN      ] Suite.Third'", end)
    session(changed, tmp_path, "--rehearse", 1, "--only", "device_contract", "--step-seconds", 3)
    entry = records(tmp_path, 1)["device_contract"]
    assert entry["status"] == status and entry["measured"] == [{"tests": 2, "failed": 1, "skipped": 0, "ended_in": "Suite.Third"}]


def test_libraries_are_the_kits_then_torchs_then_the_machines(changed, tmp_path):
    program(changed / "bin/device_test", "echo $LD_LIBRARY_PATH")
    said, _, _ = session(changed, tmp_path, "--rehearse", 1, "--only", "device_contract", LD_LIBRARY_PATH="/driver/lib")
    folders = re.search(r"device_contract\| (.*)", said)[1].split(":")
    assert folders[0] == str(changed / "lib") and folders[1].endswith("/torch/lib") and folders[-1] == "/driver/lib"


def test_a_part_that_is_stopped_still_ends_with_its_table(changed, tmp_path):
    program(changed / "bin/device_test", "echo '{\"before\": 1}'", "exec sleep 100")
    child = start(changed, tmp_path, "--rehearse", 1, "--only", "device_contract,drive")
    for line in child.stdout:
        if "device_contract| " in line:
            child.send_signal(signal.SIGTERM)
            break
    child.communicate(timeout=30)
    assert child.returncode == 128 + signal.SIGTERM
    assert list(records(tmp_path, 1)) == ["device_contract"]
    assert "interrupted  before: 1" in (tmp_path / "out/part1.txt").read_text()


def test_no_time_left_is_recorded(kit, tmp_path):
    _, _, code = session(kit, tmp_path, "--rehearse", 1, "--only", "device_contract", "--seconds", 1)
    assert records(tmp_path, 1)["device_contract"]["status"] == "skipped: no time left" and code == 0


@pytest.mark.parametrize("git, cuda, refused", [("another", "13.0", "of git version another"), (None, "12.8", "for CUDA 12.8;"), (None, None, "for CUDA None;"), (None, "13.9", None)])
def test_another_torch_is_refused(kit, tmp_path, git, cuda, refused):
    """None: that of the kit. A wheel for another CUDA has the same git version."""
    made_with = json.loads((kit / "kit.json").read_text())
    assert made_with["torch_cuda"].startswith("13.")
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("")
    (tmp_path / "torch/version.py").write_text(f"git_version = '{git or made_with['torch_git_version']}'\ncuda = {cuda!r}\n")
    _, error, code = session(kit, tmp_path, "--rehearse", 1, "--only", "nothing", PYTHONPATH=str(tmp_path))
    if refused is None:
        assert code == 0, error
        return
    line = one_line(error)
    assert code == 4 and refused in line and made_with["torch_git_version" if git else "torch_version"] in line
    assert not (tmp_path / "out").exists()


def test_without_torch_or_a_gpu_it_says_so(kit, tmp_path):
    program(tmp_path / "nvidia-smi", "exit 6")
    _, error, code = session(kit, tmp_path, 1, PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert code == 4 and "no NVIDIA GPU here" in one_line(error) and "--rehearse 1" in error
    _, error, code = session(kit, tmp_path, 1, PYTHON="/no/python")
    assert code == 4 and "PYTHON=path" in one_line(error)


def test_tests_that_skip_themselves_beside_a_gpu_count_as_failed(changed, tmp_path):
    program(tmp_path / "nvidia-smi", "echo 'GPU 0: a stand-in'")
    report = json.dumps({"testsuites": [{"testsuite": [{"status": "RUN", "result": "COMPLETED"}, {"status": "RUN", "result": "SKIPPED"}]}]})
    program(changed / "bin/device_test", f"echo '{report}' >\"${{GTEST_OUTPUT#json:}}\"")
    _, _, code = session(changed, tmp_path, 1, "--only", "device_contract", PATH=f"{tmp_path}:{os.environ['PATH']}")
    entry = records(tmp_path, 1)["device_contract"]
    assert code == 1 and entry["rc"] == 0 and entry["status"] == "failed: tests were skipped on a machine with a GPU" and entry["measured"] == [{"tests": 2, "failed": 0, "skipped": 1}]


def test_a_kit_that_is_too_large_is_not_written(kit, tmp_path):
    done = pack(tmp_path / "kit.tar.gz", "--limit-mib", "1")
    assert done.returncode == 1 and re.match(r"gpu-kit: the archive would be [\d.]+ MiB, and a kit has at most 1; its largest file is \S+, [\d.]+ MiB", one_line(done.stderr))
    assert not list(tmp_path.iterdir())


def test_no_file_needs_a_library_that_the_machine_may_lack(kit):
    import torch

    site = os.path.dirname(os.path.dirname(torch.__file__))
    folders = [kit / "lib", kit / "lib/runtime", f"{site}/torch/lib", *(f"{site}/nvidia/{name}/lib" for name in (os.listdir(f"{site}/nvidia") if os.path.isdir(f"{site}/nvidia") else ()))]
    there = GLIBC | {name for folder in folders if os.path.isdir(folder) for name in os.listdir(folder)}
    files = [path for path in kit.rglob("*") if path.is_file() and path.read_bytes()[:4] == b"\x7fELF"]
    assert len(files) >= 6 + 6
    for path in files:
        said = subprocess.run(["readelf", "--dynamic", "--wide", path], capture_output=True, text=True, check=True).stdout
        lacking = set(re.findall(r"\(NEEDED\).*\[(.*)\]", said)) - there
        assert not lacking, f"{path.name} needs {lacking}"
        assert set(re.findall(r"\(R(?:UN)?PATH\).*\[(.*)\]", said)) <= {"$ORIGIN/../lib"}, path.name
    assert not any(GLIBC & set(os.listdir(kit / folder)) for folder in ("lib", "lib/runtime")), "two C libraries in one process"


def test_time_counts_from_the_first_moment(changed, tmp_path):
    """A machine whose driver answers slowly has less time for steps, and no more time in all."""
    (tmp_path / "bin").mkdir()
    program(tmp_path / "bin/nvidia-smi", "sleep 2; echo GPU 0: NVIDIA H200")
    begin = time.monotonic()
    program(changed / "bin/device_test", "exec sleep 100")
    session(changed, tmp_path, 1, "--only", "device_contract", "--seconds", 8, PATH=f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    assert records(tmp_path, 1)["device_contract"]["status"].startswith("timeout after")
    assert time.monotonic() - begin < 8 + 3


def about(kit, **values):
    path = kit / "kit.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_a_machine_whose_c_library_is_too_old_is_refused(changed, tmp_path):
    needed = json.loads((changed / "kit.json").read_text())
    assert [2, 17] <= [int(part) for part in needed["glibc"].split(".")] <= [2, 35], "Ubuntu 22.04 has 2.35"
    assert [int(part) for part in needed["glibc_of_runtime"].split(".")] >= [int(part) for part in needed["glibc"].split(".")]
    about(changed, glibc="2.9999")
    _, error, code = session(changed, tmp_path, "--rehearse", 1, "--only", "inventory")
    assert code == 4 and "needs glibc 2.9999" in one_line(error)


def test_the_kits_runtime_needs_a_c_library_too(changed, tmp_path):
    about(changed, glibc_of_runtime="2.9999")
    said, _, code = session(changed, tmp_path / "new", "--rehearse", 1, "--only", "nothing")
    assert code == 0, "this machine's runtime is new enough"
    program(tmp_path / "ldd", "echo 'libstdc++.so.6 => not found'")
    _, error, code = session(changed, tmp_path / "old", "--rehearse", 1, "--only", "nothing", PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert code == 4 and "C++ runtime that the kit brings" in one_line(error) and "2.9999" in error


@pytest.mark.parametrize("card, made_for, refused", [("9.0", "90-real", False), ("8.0", "90-real", True), ("12.0", "90-real", True), ("8.9", "86-real", False), ("8.0", "86-real", True),
                                                      ("12.0", "80;90", False), ("7.5", "80;90", True), ("not supported", "90-real", False), ("9.0", "none: without CUDA", False)])
def test_a_card_that_the_kernels_are_not_for_is_refused(changed, tmp_path, card, made_for, refused):
    program(tmp_path / "nvidia-smi", 'case "$1" in', "-L) echo 'GPU 0: a stand-in';;", f"*) echo '{card}';;", "esac")
    about(changed, gpu_arch=made_for)
    _, error, code = session(changed, tmp_path, 1, "--only", "nothing", PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert code == (4 if refused else 0)
    if refused:
        assert f"this card has {card}: make gpu-kit GPU_ARCH={card.replace('.', '')}" in one_line(error)


@pytest.mark.parametrize("free, budget, resident", [("24564", "19GiB", False), ("143000", "40GiB", True), ("[N/A]", "40GiB", True)])
def test_a_smaller_card_has_smaller_budgets_and_no_resident_run(changed, tmp_path, free, budget, resident):
    program(tmp_path / "nvidia-smi", 'case "$*" in', "-L) echo 'GPU 0: a stand-in';;", f"*compute_cap,memory.free*) echo '9.0, {free}';;", "esac")
    about(changed, gpu_arch="90-real")
    program(changed / "bin/tierflow", "exit 3")
    (changed / "scripts/resident.py").write_text("")
    for part, model in ((3, "8b_8192"), (2, "1b")):
        said, _, _ = session(changed, tmp_path, part, "--only", f"streamed_{model},resident", PATH=f"{tmp_path}:{os.environ['PATH']}")
        status = records(tmp_path, part)[f"resident_{model}"]["status"]
        assert f"--device-memory {budget if part == 3 else '16GiB'}" in said
        assert status == "ok" if resident else re.match(r"absent: 24\.0 GiB of the card are free, and a resident run takes more than \d+\.\d GiB", status)


def test_a_streamed_run_that_is_ended_says_what_it_has(changed, tmp_path):
    step = json.dumps({"step": 1, "loss": 6.0, "step_s": 2.0, "tokens_per_s": 64.0, "limit": "compute", "device_memory_peak": 1, "host_memory": 1})
    planned = json.dumps({"step": {"step_s": 1.0}, "storage": {"bytes": 0, "free": 0}, **{name: {} for name in ("memory", "activations", "updates", "machine", "profile")}})
    program(changed / "bin/tierflow", f"[ $1 = train ] || {{ echo '{planned}'; exit; }}", 'while [ "$1" != --log-json ]; do shift; done', f"echo '{step}' >\"$2\"; exec sleep 100")
    session(changed, tmp_path, "--rehearse", 3, "--only", "streamed_8b_8192", "--step-seconds", 3)
    entry = records(tmp_path, 3)["streamed_8b_8192"]
    assert entry["status"] == "timeout after 3 s"
    assert {"stopped": "after 1 of 3 steps"} in entry["measured"]
    assert entry["measured"][-1]["step_s"] == 2.0 and entry["measured"][-1]["measured_to_predicted"] == 2.0 and entry["measured"][-1]["steps"] == 1


def test_two_steps_more_are_run_where_kernels_are_logged(changed, tmp_path):
    """The log begins after the steps that are timed; without it no step is added. A program stands in for the trainer and for the driver."""
    planned = json.dumps({"step": {"step_s": 1.0}, "storage": {"bytes": 0, "free": 0}, **{name: {} for name in ("memory", "activations", "updates", "machine", "profile")}})
    program(changed / "bin/tierflow", f"[ $1 = train ] || {{ echo '{planned}'; exit; }}", 'while [ "$1" != --steps ]; do shift; done; steps=$2', 'while [ "$1" != --log-json ]; do shift; done',
            'for i in $(seq $steps); do [ $i != 4 ] || while ! [ -e "$KERNEL_LOG_WHEN" ]; do sleep 0.05; done',
            '  echo \'{"step": \'$i\', "loss": 6.0, "step_s": 1.0, "tokens_per_s": 64.0, "limit": "compute", "device_memory_peak": 1, "host_memory": 1}\' >>"$2"; done',
            '[ $steps = 5 ] && [ "$CUDA_INJECTION64_PATH" = ' + f"{changed / 'lib/libkernel_log.so'} ] || exit 3", f"printf '%s' '{KERNELS}' >$KERNEL_LOG; exec sleep 100")
    (changed / "lib/libkernel_log.so").write_bytes(b"")
    command = [sys.executable, changed / "scripts/streamed.py", "--program", changed / "bin/tierflow", "--config", changed / "data/llama-tiny.json", "--data", "none", "--device", "cpu", "--sequence-length", "8",
               "--micro-batch", "1", "--micro-batches", "1", "--steps", "3", "--work", tmp_path / "work", "--host-memory", "1GiB", "--trace", tmp_path / "run.trace.json.gz", "--kernels", changed / "lib/libkernel_log.so"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, done.stderr
    assert [line["step"]["step"] for line in lines if "step" in line] == [1, 2, 3] and lines[-1]["steps"] == 3
    assert [line["kernel"] for line in lines if "kernel" in line] == ["gemm", "at::native::add<4, Plus>"]
    assert gzip.open(tmp_path / "run.kernels.gz", "rt").read() == KERNELS
