#!/usr/bin/env python3
"""Tokens a second of the Python package beside the C++ program, state on storage, the two in turn: medians and ratio.

    .venv/bin/python benchmarks/python/compare.py --storage DIR [--build build] [--run loop:1x1x512 layer-major:4x1x512]

A run is ORDER:MICRO_BATCHESxROWSxLENGTH; the program always goes layer-major, with its own layers where Python runs those of transformers.
One JSON line a run."""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).parents[2]
CONFIG = ROOT / "benchmarks/step/llama-152m.json"


def program(args, shape, folder):
    count, rows, length = shape.split("x")
    log = pathlib.Path(folder) / "log.jsonl"
    command = [args.build / "tierflow", "train", "--config", CONFIG, "--data", args.data, "--out", pathlib.Path(folder) / "out", "--storage", pathlib.Path(folder) / "state",
               "--device", "cpu", "--device-memory", args.device_memory, "--host-memory", args.host_memory, "--sequence-length", length, "--micro-batch", rows,
               "--micro-batches", count, "--steps", args.steps, "--eval-sequences", 1, "--log-json", log]  # fmt: skip
    done = subprocess.run([*map(str, command)], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(done.stderr)
    subprocess.run(["rm", "-rf", pathlib.Path(folder) / "out", pathlib.Path(folder) / "state"], check=True)
    records = [json.loads(line) for line in log.read_text().splitlines()]
    log.unlink()
    return statistics.median([r["tokens_per_s"] for r in records if "loss" in r and "step" in r][1:])


def package(args, order, shape, folder):
    command = [sys.executable, ROOT / "benchmarks/python/streamed.py", "--storage", folder, "--shape", shape, "--order", order, "--steps", args.steps,
               "--host-memory", args.host_memory, "--device-memory", args.device_memory]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(args.build / "python")}
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, env=environment)
    if done.returncode != 0:
        sys.exit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])["tokens_per_s"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--storage", required=True, help="folder on the drive to measure")
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build")
    parser.add_argument("--data", default=pathlib.Path(os.__file__).parent / "json", help="text; its content does not matter")
    parser.add_argument("--run", nargs="+", default=["loop:1x1x512", "loop:1x4x512", "layer-major:4x1x512", "layer-major:4x4x512"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--host-memory", default="512MiB")
    parser.add_argument("--device-memory", default="2GiB")
    args = parser.parse_args()
    for run in args.run:
        order, shape = run.split(":")
        ours, theirs = [], []
        with tempfile.TemporaryDirectory(dir=args.storage) as folder:
            for _ in range(args.rounds):
                ours.append(package(args, order, shape, folder))
                theirs.append(program(args, shape, folder))
        ratio = statistics.median(a / b for a, b in zip(ours, theirs, strict=True))
        print(json.dumps({"run": run, "python_tokens_per_s": statistics.median(ours), "program_tokens_per_s": statistics.median(theirs), "ratio": round(ratio, 3)}),
              flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
