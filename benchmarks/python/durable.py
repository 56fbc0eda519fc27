#!/usr/bin/env python3
"""What it costs a Python loop that every step is committed: streamed.py with and without `durable`, in turn. One JSON object.

    PYTHONPATH=build/python .venv/bin/python benchmarks/python/durable.py --storage DIR [--rounds 3] [--steps 8]"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys


def seconds(args, *more):
    """The median step of one run."""
    words = [sys.executable, pathlib.Path(__file__).with_name("streamed.py"), "--storage", args.storage, "--shape", args.shape, "--steps", args.steps, "--host-memory", args.host_memory, *more]
    done = subprocess.run([*map(str, words)], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(done.stderr)
    return json.loads(done.stdout)["step_s"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--storage", required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--shape", default="1x4x512", help="micro-batches x rows x length")
    parser.add_argument("--host-memory", default="512MiB")
    args = parser.parse_args()
    rounds = [{"step_s": seconds(args), "durable_step_s": seconds(args, "--durable")} for _ in range(args.rounds)]
    print(json.dumps({"rounds": rounds, "slowed_by": statistics.median(each["durable_step_s"] / each["step_s"] - 1 for each in rounds)}))


if __name__ == "__main__":
    main()
