#!/usr/bin/env python3
"""What it costs a Python loop that every step is committed: streamed.py with and without `durable`, in turn. One JSON object.

    PYTHONPATH=build/python .venv/bin/python benchmarks/python/durable.py --storage DIR [--rounds 3] [--steps 8]

"commit_share": the part of all steps' time for which the commit lane was busy with manifests, superblocks and flushes, beside the backward."""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys

HERE = pathlib.Path(__file__).parent


def run(args, *more):
    """What one run prints."""
    words = [sys.executable, HERE / "streamed.py", "--storage", args.storage, "--config", args.config, "--shape", args.shape, "--steps", args.steps, "--host-memory", args.host_memory,
             "--device-memory", args.device_memory, *more]  # fmt: skip
    done = subprocess.run([*map(str, words)], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(done.stderr)
    return json.loads(done.stdout)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--storage", type=pathlib.Path, required=True, help="folder on the drive to measure; what the runs make in it is removed")
    parser.add_argument("--config", type=pathlib.Path, default=HERE.parent / "step/llama-152m.json")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--shape", default="1x4x512", help="micro-batches x rows x length")
    parser.add_argument("--host-memory", default="512MiB")
    parser.add_argument("--device-memory", default="2GiB")
    args = parser.parse_args()
    args.storage.mkdir(parents=True, exist_ok=True)
    rounds = []
    for _ in range(args.rounds):
        plain, durable = run(args), run(args, "--durable")
        rounds.append({"step_s": plain["step_s"], "durable_step_s": durable["step_s"], "slowed_by": round(durable["step_s"] / plain["step_s"] - 1, 4),
                       "commit_share": round(durable["busy_s"]["commit"] / durable["all_steps_s"], 4)})  # fmt: skip
    print(json.dumps({"rounds": rounds, **{key: statistics.median(each[key] for each in rounds) for key in ("slowed_by", "commit_share")}}, indent=1))


if __name__ == "__main__":
    main()
