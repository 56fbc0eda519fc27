#!/usr/bin/env python3
"""The Python package beside the C++ program, state on storage, the two in turn: tokens and CPU seconds, medians and ratios.

    .venv/bin/python benchmarks/python/compare.py --storage DIR [--build build] [--run loop:1x1x512 layer-major:4x1x512] [--fused-layers]

A run is ORDER:MICRO_BATCHESxROWSxLENGTH; the program always goes layer-major, with its own layers where Python, without --fused-layers, runs those of
transformers. CPU seconds are a step's, and hold on a machine that others use as well. Of each run the later half of its steps counts. A ratio is the median of
the rounds'; above 1 the package is faster. One JSON line a run."""

import argparse
import itertools
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).parents[2]
CONFIG = ROOT / "benchmarks/step/llama-152m.json"


def used(process):
    """CPU seconds of a running process, threads included."""
    fields = pathlib.Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def program(args, shape, folder):
    count, rows, length = shape.split("x")
    log = pathlib.Path(folder) / "log.jsonl"
    log.touch()
    command = [args.build / "tierflow", "train", "--config", CONFIG, "--data", args.data, "--out", pathlib.Path(folder) / "out", "--storage", pathlib.Path(folder) / "state",
               "--device", "cpu", "--device-memory", args.device_memory, "--host-memory", args.host_memory, "--sequence-length", length, "--micro-batch", rows,
               "--micro-batches", count, "--steps", args.steps, "--eval-sequences", 1, "--log-json", log]  # fmt: skip
    process = subprocess.Popen([*map(str, command)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    steps, cpu = [], []
    with log.open() as lines:
        while process.poll() is None:
            time.sleep(0.005)
            for line in lines:
                record = json.loads(line)
                if "loss" in record and "step" in record:
                    steps.append(record["tokens_per_s"])
                    cpu.append(used(process))
    if process.returncode != 0:
        sys.exit(process.stderr.read())
    subprocess.run(["rm", "-rf", pathlib.Path(folder) / "out", pathlib.Path(folder) / "state", log], check=True)
    half = len(steps) // 2
    return statistics.median(steps[half:]), statistics.median([after - before for before, after in itertools.pairwise(cpu[half - 1 :])])


def package(args, order, shape, folder):
    command = [sys.executable, ROOT / "benchmarks/python/streamed.py", "--storage", folder, "--shape", shape, "--order", order, "--steps", args.steps,
               "--host-memory", args.host_memory, "--device-memory", args.device_memory] + ["--fused-layers"] * args.fused_layers  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(args.build / "python")}
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, env=environment)
    if done.returncode != 0:
        sys.exit(done.stderr)
    seen = json.loads(done.stdout.splitlines()[-1])
    return seen["tokens_per_s"], seen["cpu_s"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--storage", required=True, help="folder on the drive to measure")
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build")
    parser.add_argument("--data", default=pathlib.Path(os.__file__).parent / "json", help="text; its content does not matter")
    parser.add_argument("--run", nargs="+", default=["loop:1x1x512", "loop:1x4x512", "layer-major:4x1x512", "layer-major:4x4x512"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--fused-layers", action="store_true")
    parser.add_argument("--host-memory", default="512MiB")
    parser.add_argument("--device-memory", default="2GiB")
    args = parser.parse_args()
    pathlib.Path(args.storage).mkdir(parents=True, exist_ok=True)
    for run in args.run:
        order, shape = run.split(":")
        ours, theirs = [], []
        with tempfile.TemporaryDirectory(dir=args.storage) as folder:
            for _ in range(args.rounds):
                ours.append(package(args, order, shape, folder))
                theirs.append(program(args, shape, folder))
        speed = statistics.median(a[0] / b[0] for a, b in zip(ours, theirs, strict=True))
        work = statistics.median(b[1] / a[1] for a, b in zip(ours, theirs, strict=True))
        tokens, cpu = (tuple(statistics.median(each[i] for each in side) for side in (ours, theirs)) for i in (0, 1))
        print(json.dumps({"run": run, "fused_layers": args.fused_layers, "python_tokens_per_s": tokens[0], "program_tokens_per_s": tokens[1], "ratio": round(speed, 3),
                          "python_cpu_s": round(cpu[0], 2), "program_cpu_s": round(cpu[1], 2), "cpu_ratio": round(work, 3)}), flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
