"""What this machine is, as JSON lines: processor, memory, drive, kernel, torch, the card, and whether each file of the kit finds its
libraries. Fails where one does not."""

import argparse
import json
import mmap
import os
import pathlib
import platform
import shutil
import subprocess
import sys


def said(*words):
    """What a program prints; None where it is missing or fails."""
    try:
        done = subprocess.run([*map(str, words)], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def text(path):
    try:
        return pathlib.Path(path).read_text().strip()
    except OSError:
        return None


def fields(path, names):
    lines = [line.split(":", 1) for line in (text(path) or "").splitlines() if ":" in line]
    return {name: value.strip() for name, value in ((key.strip(), value) for key, value in lines) if name in names}


def direct_io(folder):
    """Whether a file there can be written past the page cache."""
    path = pathlib.Path(folder) / "direct"
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        try:
            with mmap.mmap(-1, 4096) as page:
                return os.write(file, page) == 4096
        finally:
            os.close(file)
            path.unlink()
    except OSError as error:
        return f"no: {error.strerror}"


def libraries(kit):
    """Of each file of the kit the libraries that the loader does not find, and the torch that it does find."""
    missing, torch = {}, {}
    for path in sorted([*(kit / "bin").iterdir(), *(kit / "lib").glob("*.so*")]):
        lines = [line.split() for line in (said("ldd", path) or "").splitlines()]
        lost = [words[0] for words in lines if words[-2:] == ["not", "found"]]
        if lost:
            missing[path.name] = lost
        torch |= {path.name: words[2] for words in lines if words[0] == "libtorch_cpu.so" and path.name not in missing}
    return missing, torch


def torch_says():
    import torch

    made = {"torch": torch.__version__, "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version(), "threads": torch.get_num_threads(), "gpus": torch.cuda.device_count()}
    for index in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        made[f"gpu{index}"] = {"name": card.name, "capability": [card.major, card.minor], "multiprocessors": card.multi_processor_count, "l2": card.L2_cache_size, "free": free, "total": total}
    return made


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kit", type=pathlib.Path, required=True)
    parser.add_argument("--folder", type=pathlib.Path, required=True, help="on the drive that will be measured")
    args = parser.parse_args()

    def show(**values):
        print(json.dumps(values), flush=True)

    show(kernel=platform.release(), glibc=platform.libc_ver()[1], python=platform.python_version(), cores=os.cpu_count(), usable_cores=len(os.sched_getaffinity(0)),
         processor=fields("/proc/cpuinfo", {"model name"}).get("model name"), vectors=[flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if f" {flag}" in (text("/proc/cpuinfo") or "")])
    show(memory=fields("/proc/meminfo", {"MemTotal", "MemAvailable", "SwapTotal", "HugePages_Total"}), huge_pages=text("/sys/kernel/mm/transparent_hugepage/enabled"),
         memlock=said("sh", "-c", "ulimit -l"), cgroup_memory=text("/sys/fs/cgroup/memory.max"))
    disk = shutil.disk_usage(args.folder)
    show(folder=str(args.folder), disk_total=disk.total, disk_free=disk.free, filesystem=said("stat", "--file-system", "--format", "%T", args.folder), direct_io=direct_io(args.folder),
         io_uring_disabled=text("/proc/sys/kernel/io_uring_disabled"))
    query = "name,driver_version,memory.total,memory.free,pcie.link.gen.max,pcie.link.width.max,clocks.max.sm,clocks.max.mem,power.limit,ecc.mode.current"
    card = said("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader")
    show(nvidia_smi=dict(zip(query.split(","), card.split(", "))) if card else None, nvcc=said("nvcc", "--version") is not None, compute_sanitizer=shutil.which("compute-sanitizer"))
    print(said("nvidia-smi", "topo", "-m") or "no topology", flush=True)
    seen = torch_says()
    show(**seen)
    if card and not seen["gpus"]:
        print(f"torch for CUDA {seen['cuda']} sees no GPU, and nvidia-smi does: the driver may be too old for it, or CUDA_VISIBLE_DEVICES hides the card", flush=True)
    missing, torch = libraries(args.kit)
    show(libraries_not_found=missing)
    show(libtorch_of_programs=torch)
    return int(bool(missing) or bool(card and not seen["gpus"]))


if __name__ == "__main__":
    sys.exit(main())
