#!/usr/bin/env python3
"""Projected gradients (`--method galore`) beside full fine-tuning, both with their state on storage: held-out loss, bytes that a step writes inside of a window and where one begins,
and the step beside its slowest lane. One JSON line a method, then one with the comparison.

    .venv/bin/python benchmarks/step/galore.py --storage DIR --data FILE [--steps 300] [--rank 128] [--update-gap 200]

The model is --config with random weights, the same for both, trained first for --before steps by full fine-tuning. What it writes lies in DIR and is removed."""
import argparse
import json
import pathlib
import shutil
import statistics
import tempfile

from layers import checked

ROOT = pathlib.Path(__file__).parents[2]


def trained(args, name, steps, *options):
    log = args.folder / f"{name}.jsonl"
    with tempfile.TemporaryDirectory() as cache:
        checked([args.program, "train", *options, "--data", args.data, "--steps", steps, "--out", args.folder / name, "--storage", args.folder / "store", "--device", args.device, "--device-memory", args.device_memory,
                 "--host-memory", args.host_memory, "--sequence-length", args.sequence_length, "--micro-batch", args.micro_batch, "--micro-batches", args.micro_batches, "--held-out", args.held_out,
                 "--eval-sequences", 0, "--warmup", min(10, steps // 10), "--durability", "export-only", "--fresh", "--log-json", log, *args.more], XDG_CACHE_HOME=cache)
    return [json.loads(line) for line in log.read_text().splitlines()]


def figures(records, gap):
    steps, summary = [record for record in records if "loss" in record], records[-1]["summary"]
    inside = [step for step in steps[1:] if gap is None or (step["step"] - 1) % gap != 0]
    written = lambda some: round(statistics.median(1e12 * record["tb_written"] for record in some))  # noqa: E731
    middle = lambda lane: statistics.median(step["lanes"][lane]["busy_s"] for step in inside)  # noqa: E731
    lane = max((name for name in inside[0]["lanes"]), key=middle)
    found = {"held_out_before": summary["held_out_loss_before"], "held_out": summary["held_out_loss_after"], "step_s": round(statistics.median(step["step_s"] for step in inside), 4), "slowest_lane": lane,
             "slowest_lane_s": round(middle(lane), 4), "written_a_step": written(inside), "gradients_and_words_down": statistics.median(step["lanes"]["download"]["bytes"] for step in inside),
             "storage_bytes": summary["storage_bytes"], "peak_rss": summary["peak_rss"]}
    if gap is not None:
        begun = [record["window"] for record in records if "window" in record]
        found |= {"windows": len(begun), "window_s": round(statistics.median(window["seconds"] for window in begun), 3), "written_where_one_begins": written(begun)}
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--storage", type=pathlib.Path, required=True, help="folder on the drive to measure; a folder `galore` is made in it, and removed")
    parser.add_argument("--data", required=True, help="text to learn and to hold out from")
    parser.add_argument("--program", default=ROOT / "build/tierflow")
    parser.add_argument("--config", default=ROOT / "benchmarks/step/llama-152m.json")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--before", type=int, default=50)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rank", type=int, default=128)
    parser.add_argument("--update-gap", type=int, default=200)
    parser.add_argument("--scale", type=float, default=2)
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--sequence-length", type=int, default=512)
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, default=1)
    parser.add_argument("--held-out", type=float, default=0.05)
    parser.add_argument("--host-memory", default="512MiB")
    parser.add_argument("--device-memory", default="2GiB")
    parser.add_argument("--more", nargs=argparse.REMAINDER, default=[], help="further options of `tierflow train`")
    args = parser.parse_args()
    args.folder = args.storage / "galore"
    args.folder.mkdir(parents=True)
    try:
        trained(args, "base", args.before, "--config", args.config, "--lr", 1e-3)
        full = figures(trained(args, "full", args.steps, "--model", args.folder / "base", "--lr", args.lr), None)
        print(json.dumps({"method": "full", **full}), flush=True)
        words = ["--method", "galore", "--rank", args.rank, "--update-gap", args.update_gap, "--scale", args.scale, "--model", args.folder / "base"]
        galore = figures(trained(args, "projected", args.steps, *words, "--lr", args.lr), args.update_gap)
        print(json.dumps({"method": "galore", **galore}), flush=True)
        plan = json.loads(checked([args.program, "plan", *words, "--storage", args.folder / "store", "--device", args.device, "--device-memory", args.device_memory, "--host-memory", args.host_memory,
                                   "--sequence-length", args.sequence_length, "--micro-batch", args.micro_batch, "--micro-batches", args.micro_batches, "--json"]))["galore"]
        print(json.dumps({"held_out_beside_full": round(galore["held_out"] / full["held_out"] - 1, 4), "written_beside_full": round(galore["written_a_step"] / full["written_a_step"], 4),
                          "written_a_step_beside_plan": galore["written_a_step"] - plan["written_per_step"], "step_beside_slowest_lane": round(galore["step_s"] / galore["slowest_lane_s"], 3),
                          "step_beside_full": round(galore["step_s"] / full["step_s"], 3)}), flush=True)
    finally:
        shutil.rmtree(args.folder, ignore_errors=True)


if __name__ == "__main__":
    main()
