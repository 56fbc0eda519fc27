#!/usr/bin/env python3
"""What `tierflow plan` predicts beside what `tierflow train` then measures: the two in turn, the machine measured anew each time; medians.

    .venv/bin/python benchmarks/step/predicted.py --storage DIR [--shape 1x512 4x512 4x4x512] [--clip 1.0 none] [--rounds 3]

A shape is MICRO_BATCHxSEQUENCE or MICRO_BATCHESxMICRO_BATCHxSEQUENCE. One JSON line a shape and clip setting; errors in percent of what was measured."""
import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).parents[2]


def run(command, **environment):
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, env={**os.environ, **environment})
    if done.returncode != 0:
        sys.exit(done.stderr)
    return done.stdout


def one_round(args, shape, clip, folder):
    count, rows, length = shape
    options = ["--config", args.config, "--storage", args.storage, "--device", "cpu", "--device-memory", args.device_memory, "--host-memory", args.host_memory,
               "--sequence-length", length, "--micro-batch", rows, "--micro-batches", count, "--clip", clip]
    run([args.program, "plan", *options, "--refresh-profile"], XDG_CACHE_HOME=folder)
    log = pathlib.Path(folder) / "log.jsonl"
    run([args.program, "train", *options, "--data", args.data, "--no-export", "--held-out", 0, "--steps", args.steps, "--log-json", log], XDG_CACHE_HOME=folder)
    for path in pathlib.Path(args.storage).glob("*.tfv"):
        path.unlink()
    return json.loads(log.read_text().splitlines()[-1])["summary"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--storage", required=True, help="folder on the drive to measure; a store in it is removed")
    parser.add_argument("--program", default=ROOT / "build/tierflow")
    parser.add_argument("--config", default=ROOT / "benchmarks/step/llama-152m.json")
    parser.add_argument("--data", default=pathlib.Path(os.__file__).parent / "json", help="text; its content does not matter")
    parser.add_argument("--shape", nargs="+", default=["1x512", "4x512", "4x4x512"])
    parser.add_argument("--clip", nargs="+", default=["1.0", "none"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--host-memory", default="512MiB")
    parser.add_argument("--device-memory", default="2GiB")
    args = parser.parse_args()
    for text in args.shape:
        numbers = [int(word) for word in text.split("x")]
        shape = tuple([1] * (3 - len(numbers)) + numbers)
        for clip in args.clip:
            with tempfile.TemporaryDirectory() as folder:
                rounds = [one_round(args, shape, clip, folder) for _ in range(args.rounds)]
            median = statistics.median
            error = [100 * (r["predicted"]["step_s"] / r["predicted"]["measured_step_s"] - 1) for r in rounds]
            memory = [100 * (r["predicted"]["peak_rss"] / r["peak_rss"] - 1) for r in rounds]
            device = [100 * (r["predicted"]["device_memory_peak"] / r["device_memory_peak"] - 1) for r in rounds]
            print(json.dumps({"shape": text, "clip": clip, "predicted_s": round(median(r["predicted"]["step_s"] for r in rounds), 3),
                              "measured_s": round(median(r["predicted"]["measured_step_s"] for r in rounds), 3),
                              "error": round(median(error), 1), "errors": [round(e, 1) for e in error],
                              "peak_rss_error": round(median(memory), 1), "device_error": round(median(device), 1)}), flush=True)


if __name__ == "__main__":
    main()
