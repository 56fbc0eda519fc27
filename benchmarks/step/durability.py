#!/usr/bin/env python3
"""What surviving costs: steps that are committed beside steps that are not, in turn; then a kill -9, and how fast the same command is
training again. Medians. What an export takes: benchmarks/storage/export.py.

    .venv/bin/python benchmarks/step/durability.py --storage DIR [--rounds 3] [--steps 8]

One JSON object. "commit_share": the part of a step's time for which the commit lane was busy with manifests, superblocks and flushes, beside the computation.
It bounds what these cost where the difference between two runs is lost in the drive's noise."""
import argparse
import json
import os
import pathlib
import shutil
import signal
import statistics
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).parents[2]


def train(args, durability, steps):
    return [args.program, "train", "--config", args.config, "--storage", args.folder, "--device", "cpu", "--device-memory", args.device_memory, "--host-memory", args.host_memory,
            "--sequence-length", args.sequence_length, "--micro-batch", 4, "--clip", args.clip, "--data", args.data, "--held-out", 0, "--steps", steps, "--lr-schedule", "constant",
            "--durability", durability, "--log-json", args.log, "--no-export"]


def run(command):
    begun = time.monotonic()
    done = subprocess.run([*map(str, command)], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(done.stderr)
    return time.monotonic() - begun


def steps_of(args):
    return [record for record in map(json.loads, args.log.read_text().splitlines()) if "loss" in record] if args.log.exists() else []


def clean(args):
    shutil.rmtree(args.folder, ignore_errors=True)
    for log in args.log.parent.glob(args.log.name + "*"):
        log.unlink()


def one_run(args, durability):
    clean(args)
    run(train(args, durability, args.steps))
    steps = steps_of(args)[2:]  # the first ones fill caches
    return {"step_s": statistics.median(step["step_s"] for step in steps), "bytes": statistics.median(1e12 * step["tb_written"] for step in steps),
            "commit_share": statistics.median(step["lanes"]["commit"]["busy_s"] / step["step_s"] for step in steps)}


def killed_and_resumed(args):
    """Seconds from the command to the end of its first step, less that step; verifying the state is part of it."""
    clean(args)
    process = subprocess.Popen([*map(str, train(args, "step", 1000))], stderr=subprocess.DEVNULL)
    while len(steps_of(args)) < 3:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    args.log.unlink()
    os.sync()
    begun = time.monotonic()
    process = subprocess.Popen([*map(str, train(args, "step", 1000))], stderr=subprocess.DEVNULL)
    while len(steps_of(args)) < 1:
        time.sleep(0.02)
    seconds = time.monotonic() - begun - steps_of(args)[0]["step_s"]
    process.send_signal(signal.SIGTERM)
    process.wait()
    return seconds


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--storage", type=pathlib.Path, required=True, help="folder on the drive to measure; a folder `durability` is made in it, and removed")
    parser.add_argument("--program", default=ROOT / "build/tierflow")
    parser.add_argument("--config", default=ROOT / "benchmarks/step/llama-152m.json")
    parser.add_argument("--data", default=pathlib.Path(os.__file__).parent / "json", help="text; its content does not matter")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--clip", default="1.0")
    parser.add_argument("--host-memory", default="512MiB")
    parser.add_argument("--device-memory", default="2GiB")
    args = parser.parse_args()
    args.sequence_length = min(512, json.loads(pathlib.Path(args.config).read_text()).get("max_position_embeddings", 512))
    args.storage.mkdir(parents=True, exist_ok=True)
    args.folder, args.log = args.storage / "durability", args.storage / "durability.json"
    plain, committed = [], []
    for _ in range(args.rounds):
        plain.append(one_run(args, "export-only"))
        committed.append(one_run(args, "step"))
    middle = lambda runs, key: statistics.median(each[key] for each in runs)  # noqa: E731
    result = {"step_s": {"export-only": middle(plain, "step_s"), "step": middle(committed, "step_s")},
              "overhead": [round(b["step_s"] / a["step_s"] - 1, 4) for a, b in zip(plain, committed)],
              "commit_share": round(middle(committed, "commit_share"), 4),
              "bytes": {"export-only": middle(plain, "bytes"), "step": middle(committed, "bytes")}}
    resumed = [killed_and_resumed(args) for _ in range(args.rounds)]
    result |= {"resume_to_first_step_s": statistics.median(resumed)}
    clean(args)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
