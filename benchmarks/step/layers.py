#!/usr/bin/env python3
"""Seconds of each layer's forward and backward, predicted by `tierflow plan` and measured by `tierflow train`. One JSON line a visit, one for the step.

    .venv/bin/python benchmarks/step/layers.py --config benchmarks/step/opt-175b-2-layers.json --storage DIR --host-memory 4GiB --device-memory 11GiB --sequence-length 128

Each visit computes a layer (or half of one, or a tile) for one micro-batch; its time is that of the stage alone, what it waits for apart. The store is removed."""
import argparse
import collections
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).parents[2]


def checked(command, **environment):
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, env={**os.environ, **environment})
    if done.returncode != 0:
        sys.exit(done.stderr)
    return done.stdout


def visits(trace, timeline):
    """Durations of the compute lane's tasks by name, in seconds, the first of each left out where there are more: it fills caches."""
    events = json.loads(trace.read_text())["traceEvents"]
    process = next(e["pid"] for e in events if e["name"] == "process_name" and e["args"]["name"] == timeline)
    track = next(e["tid"] for e in events if e["name"] == "thread_name" and e["pid"] == process and e["args"]["name"] == "compute")
    found = collections.defaultdict(list)
    for event in events:
        if event["ph"] == "X" and event["pid"] == process and event["tid"] == track:
            found[event["name"]].append(event["dur"] * 1e-6)
    return {name: statistics.median(all[1:] or all) for name, all in found.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True)
    parser.add_argument("--storage", required=True, help="folder on the drive to measure; a store in it is removed")
    parser.add_argument("--program", default=ROOT / "build/tierflow")
    parser.add_argument("--data", default=pathlib.Path(os.__file__).parent / "json", help="text; its content does not matter")
    parser.add_argument("--host-memory", default="4GiB")
    parser.add_argument("--device-memory", default="11GiB")
    parser.add_argument("--sequence-length", type=int, default=128)
    parser.add_argument("--micro-batch", type=int, default=1)
    parser.add_argument("--micro-batches", type=int, default=1)
    parser.add_argument("--clip", default="none")
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    options = ["--config", args.config, "--storage", args.storage, "--device", "cpu", "--device-memory", args.device_memory, "--host-memory", args.host_memory,
               "--sequence-length", args.sequence_length, "--micro-batch", args.micro_batch, "--micro-batches", args.micro_batches, "--clip", args.clip]
    with tempfile.TemporaryDirectory() as folder:
        trace, log = pathlib.Path(folder) / "trace.json", pathlib.Path(folder) / "log.jsonl"
        checked([args.program, "plan", *options, "--refresh-profile"], XDG_CACHE_HOME=folder)
        checked([args.program, "train", *options, "--data", args.data, "--no-export", "--held-out", 0, "--steps", args.steps, "--trace", trace, "--log-json", log],
                XDG_CACHE_HOME=folder)
        for path in pathlib.Path(args.storage).glob("*.tfv"):
            path.unlink()
        predicted, measured = visits(trace, "predicted"), visits(trace, "measured")
        summary = json.loads(log.read_text().splitlines()[-1])["summary"]
    for name, seconds in predicted.items():
        print(json.dumps({"visit": name, "predicted_s": round(seconds, 3), "measured_s": round(measured[name], 3), "error": round(100 * (seconds / measured[name] - 1), 1)}))
    both = sum(predicted.values()), sum(measured[name] for name in predicted)
    of = summary["predicted"]
    print(json.dumps({"compute_predicted_s": round(both[0], 2), "compute_measured_s": round(both[1], 2), "compute_error": round(100 * (both[0] / both[1] - 1), 1),
                      "step_predicted_s": round(of["step_s"], 2), "step_measured_s": round(of["measured_step_s"], 2), "step_error": round(100 * (of["step_s"] / of["measured_step_s"] - 1), 1),
                      "peak_rss": summary["peak_rss"], "peak_rss_error": round(100 * (of["peak_rss"] / summary["peak_rss"] - 1), 1)}))


if __name__ == "__main__":
    main()
