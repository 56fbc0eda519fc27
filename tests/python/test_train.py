"""The program from the outside: what a user types, and what must then hold."""
import ctypes
import fcntl
import json
import os
import pathlib
import re
import subprocess
import time

import numpy
import pytest
from program import BUILD, MIB, PROGRAM, config, needs_torch, run, small, steps_of

pytestmark = needs_torch


def test_result_loads_in_transformers_and_gives_the_loss_that_eval_prints(work):
    run(work, "train", "--config", "config.json", "--data", "text.txt", "--out", "out", *small("--steps", "8", "--lr", "1e-3"))
    tokens = numpy.frombuffer((work / "text.txt").read_bytes()[:128 * 40], dtype=numpy.uint8).astype("<u2")
    tokens.tofile(work / "tokens.bin")
    printed = json.loads(run(work, "eval", "--model", "out", "--data", "tokens.bin", "--json", *small()).stdout)

    import torch
    import transformers
    model = transformers.AutoModelForCausalLM.from_pretrained(work / "out", dtype=torch.bfloat16).eval()
    ids = torch.from_numpy(tokens.astype("int64")).view(-1, 128)
    with torch.no_grad():
        losses = [model(input_ids=row[None], labels=row[None]).loss.item() for row in ids]
    assert printed["sequences"] == len(losses) == 40
    assert printed["loss"] == pytest.approx(sum(losses) / len(losses), rel=2e-3)


@pytest.mark.parametrize("kind, name", [("cosine", "cosine"), ("linear", "linear"), ("constant", "constant_with_warmup")])
def test_learning_rates_are_those_of_transformers(work, kind, name):
    import torch
    import transformers
    run(work, "train", "--config", "config.json", "--data", "text.txt", "--out", "out", "--log-json", "log.json",
        *small("--steps", "7", "--warmup", "3", "--lr", "1e-3", "--lr-schedule", kind))
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-3)
    schedule = transformers.get_scheduler(name, optimizer, num_warmup_steps=3, num_training_steps=7)
    expected = []
    for _ in range(7):
        expected.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    assert [record["lr"] for record in steps_of(work / "log.json")] == pytest.approx(expected, rel=1e-12)


def test_files_that_are_not_read_are_said(work):
    (work / "folder").mkdir()
    (work / "text.txt").rename(work / "folder" / "text.txt")
    (work / "folder" / "more.csv").write_text("x")
    done = run(work, "train", "--config", "config.json", "--data", "folder", "--out", "out", *small("--steps", "1"))
    assert "tokens of text; 1 file of another kind not read, the first: folder/more.csv\n" in done.stderr


TWO_THREADS = {"OMP_NUM_THREADS": "2"}


def test_budgets_storage_engine_and_threads_do_not_change_a_bit(work):
    (work / "config.json").write_text(json.dumps(config(hidden=128, layers=3)))
    common = ["train", "--config", "config.json", "--data", "text.txt", "--steps", "6", "--lr", "1e-3", "--micro-batches", "2",
              "--device", "cpu", "--sequence-length", "128", "--micro-batch", "2"]
    run(work, *common, "--out", "resident", "--device-memory", "256MiB", "--host-memory", "256MiB", "--log-json", "resident.json", env=TWO_THREADS)
    run(work, *common, "--out", "streamed", "--device-memory", "24MiB", "--host-memory", "1MiB", "--storage", "store", "--log-json", "streamed.json", env=TWO_THREADS)
    run(work, *common, "--out", "threads", "--device-memory", "64MiB", "--host-memory", "2MiB", "--storage", "store,store2", "--engine", "threads", "--log-json", "threads.json", env=TWO_THREADS)
    run(work, *common, "--out", "one", "--device-memory", "256MiB", "--host-memory", "256MiB", "--threads", "1", "--log-json", "one.json")
    resident = [(r["loss"], r["grad_norm"]) for r in steps_of(work / "resident.json")]
    assert len(resident) == 6
    assert [(r["loss"], r["grad_norm"]) for r in steps_of(work / "one.json")] == resident
    assert (work / "one" / "model.safetensors").read_bytes() == (work / "resident" / "model.safetensors").read_bytes()
    for other in "streamed.json", "threads.json":
        assert [(r["loss"], r["grad_norm"]) for r in steps_of(work / other)] == resident, other
        assert steps_of(work / other)[-1]["lanes"]["disk_read"]["bytes"] > 0
        assert (work / other.split(".")[0] / "model.safetensors").read_bytes() == (work / "resident" / "model.safetensors").read_bytes()
    assert not [*work.glob("store*/*")], "the storage folders are left empty"


def test_a_kept_store_exports_what_the_run_would_have(work):
    common = ["train", "--config", "config.json", "--data", "text.txt", "--steps", "4", "--lr", "1e-3"]
    run(work, *common, *small("--out", "direct"))
    kept = [*common, *small("--no-export", "--storage", "store", "--host-memory", "1MiB")]
    run(work, *kept)
    run(work, "export", "--storage", "store", "--out", "exported")
    for name in "model.safetensors", "config.json":
        assert (work / "exported" / name).read_bytes() == (work / "direct" / name).read_bytes()
    assert "the run is finished, after step 4 of 4" in run(work, *kept).stderr
    run(work, "export", "--storage", "store", "--out", "again")
    assert (work / "again" / "model.safetensors").read_bytes() == (work / "direct" / "model.safetensors").read_bytes()


def resident_share(path):
    """The share of a file's pages that the page cache holds."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
        address = libc.mmap(None, size, 1, 1, file.fileno(), 0)
        pages = (size + 4095) // 4096
        flags = (ctypes.c_ubyte * pages)()
        libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), flags)
        libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(size))
        return sum(flag & 1 for flag in flags) / pages


def peak_rss(process):
    status = pathlib.Path(f"/proc/{process.pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def test_memory_stays_within_the_budgets_and_the_state_out_of_the_page_cache(work):
    host, device = 12 * MIB, 112 * MIB
    (work / "config.json").write_text(json.dumps(config(hidden=512, layers=6)))
    bare = int(subprocess.run([str(BUILD / "bare_torch")], capture_output=True, text=True, check=True).stdout)
    process = subprocess.Popen(
        [str(PROGRAM), "train", "--config", "config.json", "--data", "text.txt", "--no-export", "--steps", "4", "--device", "cpu", "--device-memory",
         str(device), "--host-memory", str(host), "--storage", "store", "--sequence-length", "128", "--micro-batch", "2", "--log-json", "log.json"],
        cwd=work, stderr=subprocess.PIPE, text=True)
    peak, cached = 0, 0.0
    while process.poll() is None:
        try:
            peak = max(peak, peak_rss(process))
            for path in work.glob("store/*.tfv"):
                if (work / "log.json").exists() and len(steps_of(work / "log.json")) >= 2:
                    cached = max(cached, resident_share(path))
        except (FileNotFoundError, ProcessLookupError, IndexError, OSError):
            pass
        time.sleep(0.02)
    assert process.returncode == 0, process.stderr.read()
    summary = [json.loads(line) for line in (work / "log.json").read_text().splitlines()][-1]["summary"]
    assert summary["parameters"] * 6.03 > 8 * host, "the state is to be at least eight times the host budget"
    assert summary["host_memory"] <= host and summary["device_memory_peak"] <= device
    assert max(peak, summary["peak_rss"]) <= bare + host + device + 300 * MIB
    if summary["storage_mode"]["direct"]:
        assert cached < 0.05
    else:
        pytest.skip("the file system refuses O_DIRECT: the page cache was not looked at")


def test_adam8_follows_adam32_within_a_percent(work):
    losses = {}
    for precision in "fp32-master+adam32", "fp32-master+adam8":
        run(work, "train", "--config", "config.json", "--data", "text.txt", "--out", f"out-{precision[-2:]}", "--precision", precision, "--log-json", "log.json",
            *small("--steps", "200", "--lr", "2e-3", "--warmup", "10"))
        losses[precision] = [record["loss"] for record in steps_of(work / "log.json")]
    exact, eight_bits = (numpy.array(losses[key]) for key in ("fp32-master+adam32", "fp32-master+adam8"))
    assert exact[-20:].mean() < 0.7 * exact[0]
    window = numpy.ones(20) / 20
    difference = numpy.convolve(eight_bits, window, "valid") / numpy.convolve(exact, window, "valid") - 1
    assert numpy.abs(difference).max() < 0.01


def test_gradient_clipping_and_schedule_are_logged(work):
    run(work, "train", "--config", "config.json", "--data", "text.txt", "--out", "out", "--log-json", "log.json",
        *small("--steps", "6", "--lr", "1e-3", "--warmup", "2", "--lr-schedule", "linear", "--clip", "none"))
    records = [json.loads(line) for line in (work / "log.json").read_text().splitlines()]
    assert "summary" in records[-1]
    steps = [r for r in records if "loss" in r]
    assert [r["lr"] for r in steps] == pytest.approx([0, 5e-4, 1e-3, 7.5e-4, 5e-4, 2.5e-4])
    for key in "step", "loss", "tokens_per_s", "step_s", "lr", "grad_norm", "lanes":
        assert all(key in r for r in steps), key


@pytest.mark.parametrize("words, code, says", [
    (["--host-memory", "64KiB", "--storage", "store"], 2, "smallest that works"),
    (["--device-memory", "1MiB"], 2, "smallest that works"),
    (["--sequence-length", "4096"], 2, "positions"),
    (["--no-such-option"], 2, "no-such-option"),
    (["--precision", "fp8"], 2, "fp8"),
])
def test_bad_input_is_one_line_and_leaves_nothing(work, words, code, says):
    done = run(work, "train", "--config", "config.json", "--data", "text.txt", "--out", "out", "--steps", "2", *small(*words), ok=False)
    assert done.returncode == code, done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("tierflow: ")]
    assert len(errors) == 1 and says in errors[0], done.stderr
    assert not (work / "out").exists() and not (work / "store").exists()


def test_adam32_follows_transformers_with_torch_adamw(work):
    """Same weights, same sequences in every step: the reference is a transformers model whose fp32 masters torch.optim.AdamW updates."""
    import torch
    import transformers
    rows, length, steps, lr = 8, 64, 20, 2e-3
    run(work, "init", "--config", "config.json", "--out", "model", "--seed", "4")
    tokens = numpy.frombuffer((work / "text.txt").read_bytes()[:rows * length], dtype=numpy.uint8).astype("<u2")
    tokens.tofile(work / "tokens.bin")
    run(work, "train", "--model", "model", "--data", "tokens.bin", "--held-out", "0", "--out", "out", "--log-json", "log.json", "--micro-batches", "2",
        "--precision", "fp32-master+adam32", "--lr", lr, "--lr-schedule", "constant", "--weight-decay", "0.1", "--steps", steps,
        *small("--micro-batch", "4", "--sequence-length", str(length)))
    ours = [record["loss"] for record in steps_of(work / "log.json")]

    model = transformers.AutoModelForCausalLM.from_pretrained(work / "model", dtype=torch.bfloat16).train()
    parameters = list(model.parameters())
    masters = [parameter.detach().float().clone() for parameter in parameters]
    optimizer = torch.optim.AdamW([{"params": [m for m in masters if m.dim() >= 2], "weight_decay": 0.1},
                                   {"params": [m for m in masters if m.dim() < 2], "weight_decay": 0.0}], lr=lr)
    ids = torch.from_numpy(tokens.astype("int64")).view(rows, length)
    reference = []
    for _ in range(steps):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        reference.append(loss.item())
        for master, parameter in zip(masters, parameters):
            master.grad = parameter.grad.float()
            parameter.grad = None
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters, parameters):
                parameter.copy_(((master.view(torch.int32) + 0x8000) & -0x10000).view(torch.float32))
    assert reference[-1] < 0.6 * reference[0]
    assert ours == pytest.approx(reference, rel=1e-2)


def test_the_write_limit_ends_the_run_with_the_result_of_the_steps_before(work):
    common = ["train", "--config", "config.json", "--data", "text.txt", "--lr-schedule", "constant", "--lr", "1e-3", "--held-out", "0",
              "--storage", "store", "--durability", "export-only", *small("--host-memory", "1MiB")]

    def summary(name):
        return json.loads((work / name).read_text().splitlines()[-1])["summary"]

    run(work, *common, "--steps", "3", "--out", "three", "--log-json", "three.json")
    three = summary("three.json")
    per_step = [r["tb_written"] for r in steps_of(work / "three.json")]
    assert len(per_step) == 3 and min(per_step[1:]) > 0 and three["tb_written"] > sum(per_step)
    assert all(r["attention"] in ("blocks", "torch") for r in steps_of(work / "three.json"))  # what computed it, on a CPU
    assert three["tb_written_per_step"] == pytest.approx(sum(per_step) / 3)

    limit = three["tb_written"] + per_step[-1] / 2
    done = run(work, *common, "--steps", "100", "--out", "limited", "--log-json", "limited.json", "--max-tb-written", f"{limit:.15f}", ok=False)
    assert done.returncode == 10, done.stderr
    assert "after step 3 of 100" in done.stderr
    assert summary("limited.json")["steps"] == 3 and summary("limited.json")["tb_written"] == three["tb_written"] < limit
    assert (work / "limited" / "model.safetensors").read_bytes() == (work / "three" / "model.safetensors").read_bytes()
    assert not (work / "store").exists()

    kept = [*common, "--steps", "100", "--no-export", "--max-tb-written", f"{limit:.15f}"]
    assert run(work, *kept, ok=False).returncode == 10
    run(work, "export", "--storage", "store", "--out", "exported")
    assert (work / "exported" / "model.safetensors").exists()

    common[common.index("store")] = "other"
    refused = run(work, *common, "--steps", "1", "--out", "out", "--max-tb-written", "0.0000001", ok=False)
    assert refused.returncode == 2 and not (work / "other").exists()
    least = refused.stderr.split("smallest that works is ")[1].split()[0]
    assert run(work, *common, "--steps", "9", "--out", "least", "--max-tb-written", least, ok=False).returncode == 10


def test_a_log_that_cannot_be_written_does_not_end_the_run(work):
    done = run(work, "train", "--config", "config.json", "--data", "text.txt", "--out", "out", "--log-json", "/dev/full", *small("--steps", "2"))
    assert "/dev/full cannot be written" in done.stderr
    assert (work / "out" / "model.safetensors").exists()


@pytest.fixture
def loop_drive(tmp_path):
    """An ext4 of 96 MiB on a loop device: its folder and a function that takes the medium away."""
    image, mount, device = tmp_path / "image", tmp_path / "mount", ""

    def shell(*words):
        return subprocess.run([*map(str, words)], check=True, capture_output=True, text=True).stdout.strip()

    def lose():
        # The device ends after a mebibyte from now on. (Cutting the image instead would let writes grow it again, with zeros between.)
        get_status, set_status, size_limit = 0x4C05, 0x4C04, slice(32, 40)
        with open(device, "rb") as loop:
            status = bytearray(232)
            fcntl.ioctl(loop, get_status, status)
            status[size_limit] = MIB.to_bytes(8, "little")
            for _ in range(100):
                try:
                    return fcntl.ioctl(loop, set_status, bytes(status))
                except BlockingIOError:  # pages of the device were written meanwhile
                    time.sleep(0.01)

    try:
        image.touch()
        os.truncate(image, 96 * MIB)
        mount.mkdir()
        device = shell("losetup", "--find", "--show", "--direct-io=on", image)
        shell("mkfs.ext4", "-q", "-F", device)
        shell("mount", device, mount)
    except (OSError, subprocess.CalledProcessError) as error:
        if device:
            shell("losetup", "--detach", device)
        pytest.skip(f"this machine does not let us mount a loop device: {error}")
    yield mount, lose
    subprocess.run(["umount", "--lazy", str(mount)], check=True)
    subprocess.run(["losetup", "--detach", device], check=True)


def test_a_lost_drive_ends_the_run_with_one_line(work, loop_drive):
    mount, lose = loop_drive
    process = subprocess.Popen(
        [str(PROGRAM), "train", "--config", "config.json", "--data", "text.txt", "--out", "out", "--log-json", "log.json",
         *small("--steps", "100000", "--held-out", "0", "--storage", str(mount / "store"), "--host-memory", "1MiB")],
        cwd=work, stderr=subprocess.PIPE, text=True)
    deadline = time.time() + 60
    while time.time() < deadline and not ((work / "log.json").exists() and steps_of(work / "log.json")):
        time.sleep(0.05)
    lose()
    lost = time.time()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 5 and time.time() - lost < 10, errors
    last = errors.splitlines()[-1]
    assert last.startswith("tierflow: ") and re.search(r"/state(-scratch)?\.tfv", last) and len([line for line in errors.splitlines() if line.startswith("tierflow: ")]) == 1
    assert not (work / "out").exists()


def test_a_trace_shows_every_lane_and_what_compute_waited_for(work):
    (work / "config.json").write_text(json.dumps(config(hidden=128, layers=6)))
    common = ["train", "--config", "config.json", "--data", "text.txt", *small("--steps", "6", "--storage", "state", "--host-memory", "2MiB", "--device-memory", "24MiB")]
    done = run(work, *common, "--out", "traced", "--trace", "trace.json")
    assert "trace of 4 steps" in done.stderr + done.stdout and "compute waited" in done.stderr + done.stdout
    events = json.loads((work / "trace.json").read_text())["traceEvents"]
    lanes = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {"disk_read", "disk_write", "upload", "download", "compute", "update", "compute waits for"} <= lanes
    computed = [event for event in events if event["ph"] == "X" and event["name"].startswith("head ")]
    assert len(computed) == 4  # one visit of the head in each traced step

    run(work, *common, "--out", "plain")
    assert (work / "traced/model.safetensors").read_bytes() == (work / "plain/model.safetensors").read_bytes()
    refused = run(work, *common, "--out", "refused", "--trace", "no/such/folder/trace.json", ok=False)
    assert refused.returncode == 4 and "--trace" in refused.stderr and not (work / "refused").exists()


@pytest.mark.parametrize("device", ["cuda", "auto"])
def test_without_a_gpu_it_says_so(work, device):
    done = subprocess.run([str(PROGRAM), "train", "--config", "config.json", "--data", "text.txt", "--out", "out", *small("--device", device, "--steps", "1")],
                          cwd=work, capture_output=True, text=True, timeout=300, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    if device == "cuda":
        assert done.returncode == 4
        line = done.stderr.splitlines()[-1]
        assert line.startswith("tierflow: open the CUDA device: ") and "--device cpu" in line
        assert not (work / "out").exists()
    else:
        assert done.returncode == 0, done.stderr
        assert "device: CPU; no CUDA device: " in done.stderr
