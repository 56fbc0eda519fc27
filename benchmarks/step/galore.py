#!/usr/bin/env python3
"""Projected gradients (`--method galore`) beside full fine-tuning, both with their state on storage: held-out loss, bytes that a step writes inside of a window and where one begins,
and the step beside its slowest lane. One JSON line a method, then one with the comparison.

    .venv/bin/python benchmarks/step/galore.py --storage DIR --data FILE [--steps 300] [--rank 128] [--update-gap 200]

The model is --config with random weights, the same for both, trained first for --before steps by full fine-tuning. What it writes lies in DIR/galore and is removed at the end. Where it is broken off, the same
command goes on: parts that ended are taken as they are, and the one at hand from its last committed step. Progress and a prediction of what is left go to stderr. With the defaults (152M) about 50 minutes on two cores that
nothing else uses (650 steps of 2048 tokens at 4 to 5 s); see `--config examples/demo/config.json --before 4 --steps 8 --update-gap 4 --rank 8 --sequence-length 64 --host-memory 8MiB --device-memory 64MiB` for a trial."""
import argparse
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile

from layers import checked

ROOT = pathlib.Path(__file__).parents[2]


def read_log(log):
    """What processes that followed one another wrote of one run: a step that was taken again counts as it was the last time."""
    records = {}
    files = sorted(log.parent.glob(f"{log.name}.*"), key=lambda file: file.stat().st_mtime)
    for number, line in enumerate(line for file in [*files, log] if file.exists() for line in file.read_text().splitlines()):
        try:
            record = json.loads(line)
        except ValueError:  # where it was killed
            continue
        records[("step", record["step"]) if "loss" in record else ("window", record["window"]["step"]) if "window" in record else number] = record
    return list(records.values())


def trained(args, name, steps, *options):
    log, store = args.folder / f"{name}.jsonl", args.folder / f"{name}-store"
    if not (args.folder / name / "config.json").exists():
        words = [args.program, "train", *options, "--data", args.data, "--steps", steps, "--out", args.folder / name, "--storage", store, "--device", args.device, "--device-memory", args.device_memory,
                 "--host-memory", args.host_memory, "--sequence-length", args.sequence_length, "--micro-batch", args.micro_batch, "--micro-batches", args.micro_batches, "--held-out", args.held_out,
                 "--eval-sequences", 0, "--warmup", min(10, steps // 10), "--durability", f"every={args.commit_every}", "--log-json", log, *args.more]
        with tempfile.TemporaryDirectory() as cache, (args.folder / f"{name}.txt").open("w+") as said:
            program = subprocess.Popen([*map(str, words)], stdout=subprocess.DEVNULL, stderr=said, env={**os.environ, "XDG_CACHE_HOME": cache})
            try:
                while True:
                    try:
                        program.wait(args.every)
                        break
                    except subprocess.TimeoutExpired:
                        tell(args, name, read_log(log), steps)
            except BaseException:
                program.terminate()
                program.wait()
                raise
            if program.returncode != 0:
                said.seek(0)
                sys.exit(said.read())
    args.done[name] = steps
    return read_log(log)


def tell(args, name, records, steps):
    """How far it is, and how long what is left takes at the last steps' speed."""
    taken = [record for record in records if "loss" in record]
    if not taken:
        return
    left = steps - taken[-1]["step"] + sum(count for part, count in args.parts.items() if part != name and part not in args.done)
    seconds = statistics.median(record["step_s"] for record in taken[-20:])
    print(f"{name}: step {taken[-1]['step']} of {steps}, loss {taken[-1]['loss']:.4f}, {seconds:.2f} s a step; about {left * seconds / 60:.0f} minutes are left", file=sys.stderr, flush=True)


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
    parser.add_argument("--commit-every", type=int, default=25, help="steps that may have to be taken again where it is broken off")
    parser.add_argument("--every", type=float, default=15, help="seconds between two lines of progress")
    parser.add_argument("--more", nargs=argparse.REMAINDER, default=[], help="further options of `tierflow train`")
    args = parser.parse_args()
    args.folder = args.storage / "galore"
    args.folder.mkdir(parents=True, exist_ok=True)
    args.parts, args.done = {"base": args.before, "full": args.steps, "projected": args.steps}, {}
    asked = json.dumps({name: str(value) for name, value in vars(args).items() if name not in ("every", "program", "done")}, sort_keys=True)
    before = args.folder / "asked.json"
    if before.exists() and before.read_text() != asked:
        sys.exit(f"{args.folder} is of a run with other options: remove it, or give those")
    before.write_text(asked)
    trained(args, "base", args.before, "--config", args.config, "--lr", 1e-3)
    full = figures(trained(args, "full", args.steps, "--model", args.folder / "base", "--lr", args.lr), None)
    print(json.dumps({"method": "full", **full}), flush=True)
    words = ["--method", "galore", "--rank", args.rank, "--update-gap", args.update_gap, "--scale", args.scale, "--model", args.folder / "base"]
    galore = figures(trained(args, "projected", args.steps, *words, "--lr", args.lr), args.update_gap)
    print(json.dumps({"method": "galore", **galore}), flush=True)
    plan = json.loads(checked([args.program, "plan", *words, "--storage", args.folder / "plan-store", "--device", args.device, "--device-memory", args.device_memory, "--host-memory", args.host_memory,
                               "--sequence-length", args.sequence_length, "--micro-batch", args.micro_batch, "--micro-batches", args.micro_batches, "--json"]))["galore"]
    print(json.dumps({"held_out_beside_full": round(galore["held_out"] / full["held_out"] - 1, 4), "written_beside_full": round(galore["written_a_step"] / full["written_a_step"], 4),
                      "written_a_step_beside_plan": galore["written_a_step"] - plan["written_per_step"], "step_beside_slowest_lane": round(galore["step_s"] / galore["slowest_lane_s"], 3),
                      "step_beside_full": round(galore["step_s"] / full["step_s"], 3)}), flush=True)
    shutil.rmtree(args.folder)


if __name__ == "__main__":
    main()
