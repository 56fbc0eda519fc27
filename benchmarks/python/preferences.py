#!/usr/bin/env python3
"""What a preference loss costs beside another: bytes of the base that a DPO step with LoRA reads from storage over those of a step of cross-entropy with the same tokens, whose reference is
computed in the visits of the step (goal 1.0); and how fast the pass is that computes references for full fine-tuning, beside a plain evaluation of the same tokens (goal 0.95), in wall and in
processor seconds. One JSON line each.

    PYTHONPATH=build/python .venv/bin/python benchmarks/python/preferences.py --storage DIR [--config benchmarks/step/llama-152m.json] [--rounds 3]

Random weights and tokens; what it writes lies in DIR and is removed. Rounds in turn, in one process; the first round fills caches and does not count. With the defaults about 4 minutes on two cores that nothing else uses;
with --config examples/demo/config.json --host-memory 4MiB --device-memory 256MiB --sequence-length 128 a few seconds."""

import argparse
import json
import pathlib
import statistics
import subprocess
import tempfile
import time

import tierflow
import torch

ROOT = pathlib.Path(__file__).parents[2]


def batches(args, seed, pairs):
    generator = torch.Generator().manual_seed(seed)
    vocabulary = json.loads(pathlib.Path(args.config).read_text())["vocab_size"]
    made = []
    for _ in range(args.micro_batches):
        ids = torch.randint(0, vocabulary, (args.micro_batch, 2, args.sequence_length), generator=generator)
        labels = ids.clone()
        labels[..., : args.sequence_length // 2] = -100  # the prompt
        made.append({"input_ids": ids, "labels": labels} if pairs else {"input_ids": ids.flatten(0, 1), "labels": labels.flatten(0, 1)})
    return made


def session(args, base, folder, pairs, **more):
    return tierflow.Session(base, tierflow.Budget(device=args.device_memory, host=args.host_memory, storage=[folder]), micro_batch=args.micro_batch * (1 if pairs else 2), micro_batches=args.micro_batches,
                            sequence_length=args.sequence_length, loss={"kind": "dpo"} if pairs else None, allow_any_filesystem=True, **more)  # fmt: skip


def bytes_read(args, base, folder, pairs):
    """Of a step after the first, and its seconds."""
    with session(args, base, folder, pairs, method="lora", adapters={"rank": args.lora_rank, "alpha": 2 * args.lora_rank}) as trained:
        read, seconds = [], []
        for number in range(args.rounds + 1):
            before = trained.bytes_moved()["disk_read"]
            seconds.append(trained.step(batches(args, number, pairs))["seconds"])
            read.append(trained.bytes_moved()["disk_read"] - before)
    return statistics.median(read[1:]), statistics.median(seconds[1:])


def pass_costs(args, base, folder):
    """Of a reference pass and of a plain evaluation, in turn, over so many micro-batches as a step has: wall seconds, processor seconds, and bytes read and uploaded.
    What is computed of each token, and what is read of the weights, are the same. Medians; the first pass of each session does not count."""
    found: dict[bool, list[tuple[float, float, int]]] = {True: [], False: []}
    for number in range(args.rounds):
        for pairs in (True, False):
            with session(args, base, folder, pairs) as model:
                model.evaluate(batches(args, number, pairs))
                for _ in range(3):
                    moved, begun = model.bytes_moved(), (time.monotonic(), time.process_time())
                    model.evaluate(batches(args, number, pairs))
                    seconds, after = (time.monotonic() - begun[0], time.process_time() - begun[1]), model.bytes_moved()
                    found[pairs].append((*seconds, sum(after[lane] - moved[lane] for lane in ("disk_read", "upload"))))
    return ([statistics.median(column) for column in zip(*found[pairs])] for pairs in (True, False))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--storage", required=True)
    parser.add_argument("--program", default=ROOT / "build/tierflow")
    parser.add_argument("--config", default=ROOT / "benchmarks/step/llama-152m.json")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--lora-rank", type=int, default=16)
    parser.add_argument("--sequence-length", type=int, default=512)
    parser.add_argument("--micro-batch", type=int, default=2, help="pairs; sequences of cross-entropy are twice as many")
    parser.add_argument("--micro-batches", type=int, default=2)
    parser.add_argument("--host-memory", default="96MiB", help="small, so that the base is read from storage")
    parser.add_argument("--full-host-memory", default="", help="for full fine-tuning's state; --host-memory where left out")
    parser.add_argument("--device-memory", default="2GiB")
    args = parser.parse_args()
    pathlib.Path(args.storage).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.storage) as work:
        base = pathlib.Path(work) / "base"
        subprocess.run([args.program, "init", "--config", args.config, "--out", base], check=True, capture_output=True)
        (dpo, dpo_s), (plain, plain_s) = (bytes_read(args, base, pathlib.Path(work) / "state", pairs) for pairs in (True, False))
        print(json.dumps({"read_by_dpo": dpo, "read_by_cross_entropy": plain, "ratio": round(dpo / plain, 4), "step_seconds_ratio": round(dpo_s / plain_s, 3)}), flush=True)
        args.host_memory = args.full_host_memory or args.host_memory
        (reference, reference_cpu, reference_bytes), (own, own_cpu, own_bytes) = pass_costs(args, base, pathlib.Path(work) / "state")
        print(json.dumps({"reference_pass_s": round(reference, 4), "evaluation_s": round(own, 4), "speed_ratio": round(own / reference, 3),
                          "reference_pass_cpu_s": round(reference_cpu, 4), "evaluation_cpu_s": round(own_cpu, 4), "cpu_ratio": round(own_cpu / reference_cpu, 3),
                          "reference_pass_moved": reference_bytes, "evaluation_moved": own_bytes}), flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
