#!/usr/bin/env python3
"""Tokens a second of Tierflow, state on storage, beside plain PyTorch with everything resident and, with --zero-infinity PYTHON, beside DeepSpeed
ZeRO-Infinity with parameters and optimizer state in files: all in turn, medians and ratios.

    .venv/bin/python benchmarks/step/compare.py --storage DIR [--shape 1x512 4x512 4x4x512] [--zero-infinity PEER_VENV/bin/python]
    .venv/bin/python benchmarks/step/compare.py --storage DIR --config benchmarks/step/mixtral-1.3b.json --shape 4x1x512 4x4x512 --no-checkpointing

A shape is MICRO_BATCHxSEQUENCE or MICRO_BATCHESxMICRO_BATCHxSEQUENCE. One JSON line a shape and clip setting; slowest_lane is what of a step's time the
slowest lane was busy. Of a mixture of experts there is also the share of a layer's experts that had tokens. Each starts with `tierflow plan`, which measures
the machine where it has not."""
import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).parents[2]


def checked(command):
    done = subprocess.run([*map(str, command)], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(done.stderr)
    return done.stdout


def tierflow(args, shape, clip, folder):
    count, rows, length = shape
    log = pathlib.Path(folder) / "log.jsonl"
    run = ["--config", args.config, "--storage", args.storage, "--device", "cpu", "--device-memory", args.device_memory, "--host-memory", args.host_memory,
           "--sequence-length", length, "--micro-batch", rows, "--micro-batches", count, "--clip", clip]
    checked([args.program, "plan", *run])
    checked([args.program, "train", *run, "--data", args.data, "--out", pathlib.Path(folder) / "out", "--steps", args.steps, "--eval-sequences", 1, "--log-json", log])
    subprocess.run(["rm", "-rf", pathlib.Path(folder) / "out"], check=True)
    records = [json.loads(line) for line in log.read_text().splitlines()]
    steps = [r for r in records if "loss" in r and "step" in r][1:]
    exposed = statistics.median(r["step_s"] - r["lanes"]["compute"]["busy_s"] for r in steps) / statistics.median(r["step_s"] for r in steps)
    slowest = statistics.median(max(lane["busy_s"] for lane in r["lanes"].values()) / r["step_s"] for r in steps)
    summary = records[-1]["summary"]
    return statistics.median(r["tokens_per_s"] for r in steps), summary["peak_rss"] // 2**20, exposed, slowest, summary.get("experts_touched", {}).get("mean")


def peer(args, shape, clip, python, script, *more):
    count, rows, length = shape
    command = [python, ROOT / "benchmarks/step" / script, "--config", args.config, "--sequence-length", length, "--micro-batch", rows, "--micro-batches", count,
               "--steps", args.steps, "--clip", 0 if clip == "none" else clip, *more]
    line = json.loads(checked(command).splitlines()[-1])
    return line["tokens_per_s"], line["peak_rss_mib"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--storage", required=True, help="folder on the drive to measure")
    parser.add_argument("--config", default=ROOT / "benchmarks/step/llama-152m.json", help="config.json of the model")
    parser.add_argument("--program", default=ROOT / "build/tierflow")
    parser.add_argument("--data", default=pathlib.Path(os.__file__).parent / "json", help="text; its content does not matter")
    parser.add_argument("--shape", nargs="+", default=["1x512", "4x512", "4x4x512"])
    parser.add_argument("--clip", nargs="+", default=["1.0", "none"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--host-memory", default="512MiB")
    parser.add_argument("--device-memory", default="2GiB")
    parser.add_argument("--no-checkpointing", action="store_true", help="compare with PyTorch that keeps activations")
    parser.add_argument("--zero-infinity", metavar="PYTHON", help="interpreter with deepspeed: compare with ZeRO-Infinity too")
    args = parser.parse_args()
    peers = {"resident": (sys.executable, "resident.py", *(["--no-checkpointing"] if args.no_checkpointing else []))}
    if args.zero_infinity:
        peers["zero_infinity"] = (args.zero_infinity, "zero_infinity.py", "--storage", args.storage)
    for text in args.shape:
        numbers = [int(word) for word in text.split("x")]
        shape = tuple([1] * (3 - len(numbers)) + numbers)
        for clip in args.clip:
            ours, theirs = [], {name: [] for name in peers}
            with tempfile.TemporaryDirectory() as folder:
                for _ in range(args.rounds):
                    ours.append(tierflow(args, shape, clip, folder))
                    for name, of in peers.items():
                        theirs[name].append(peer(args, shape, clip, *of))
            line = {"shape": text, "clip": clip, "tierflow_tokens_per_s": round(statistics.median(o[0] for o in ours), 1), "tierflow_rss_mib": max(o[1] for o in ours),
                    "outside_compute": round(statistics.median(o[2] for o in ours), 3), "slowest_lane": round(statistics.median(o[3] for o in ours), 3)}
            if ours[0][4] is not None:
                line["experts_touched"] = round(statistics.median(o[4] for o in ours), 3)
            for name, runs in theirs.items():
                line |= {f"{name}_tokens_per_s": round(statistics.median(t[0] for t in runs), 1), f"{name}_rss_mib": max(t[1] for t in runs),
                         f"ratio_to_{name}": round(statistics.median(o[0] / t[0] for o, t in zip(ours, runs)), 3)}
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
