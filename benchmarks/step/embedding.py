#!/usr/bin/env python3
"""How much of an embedding and its optimizer state a full fine-tuning step moves from and to storage, as a share of what all of it would take: measured in a run, and counted for any shape without one.

    .venv/bin/python benchmarks/step/embedding.py --storage DIR [--config CONFIG] [--layers 2] [--sequence-length 512] [--steps 10] [--ids zipf]
    .venv/bin/python benchmarks/step/embedding.py --count [--config CONFIG] [--sequence-length 512] [--ids zipf]

The model is --config, cut to --layers, with random weights. The text is random: `zipf` draws token r with a probability as 1 / (r + 10), as vocabularies sort their merges by frequency; `uniform` draws each alike, the worst case.
--tokens FILE takes real ones: a .npy of ids. What a run writes lies in DIR/embedding and is removed at the end. One JSON line: of each step, but the first, the rows and the share; with --count the share that the rule
gives, on average over 50 steps: parts of as many elements as a row, rounded down to a multiple of 8192, or larger ones where they were more than 70,000; those of a step and of the step before are moved, against all of them. "share_of_untouched" comes on top in a long run:
parts that no token uses catch up after 513 to 1024 updates. The default is the shape of Qwen2.5-7B; a run of it takes 6 GB of storage for
the embedding, twice."""
import argparse
import json
import pathlib
import shutil
import statistics

import numpy
from layers import checked

ROOT = pathlib.Path(__file__).parents[2]
PART = 8192  # elements: swap::kSparseQuantum
MOST_PARTS = 70_000
MOST_MISSED = 1024  # updates: runtime/session/session_rows.cpp


def ids_of(args, vocabulary, count):
    if args.tokens:
        ids = numpy.load(args.tokens).reshape(-1).astype(numpy.int64)
        return numpy.resize(ids, count)
    random = numpy.random.default_rng(7)
    if args.ids == "uniform":
        return random.integers(0, vocabulary, count)
    weights = 1 / (numpy.arange(vocabulary) + 10)
    return random.choice(vocabulary, count, p=weights / weights.sum())


def counted(args, config):
    rows, columns = config["vocab_size"], config["hidden_size"]
    part = min(max(columns // PART * PART, PART), 8 * PART)
    while rows * columns // part > MOST_PARTS and part < 8 * PART:
        part += PART
    all_parts = -(-rows * columns // part)
    ids = ids_of(args, rows, 51 * args.sequence_length).reshape(51, -1)
    used = [{part_of for row in set(step.tolist()) for part_of in range(row * columns // part, ((row + 1) * columns - 1) // part + 1)} for step in ids]
    moved = [len(before | now) / all_parts for before, now in zip(used, used[1:])]
    return {"elements_of_a_part": part, "parts": all_parts, "rows_a_step": statistics.mean(len(set(step.tolist())) for step in ids), "parts_a_step": statistics.mean(map(len, used)),
            "share": statistics.mean(moved), "share_of_untouched": 1 / (0.75 * MOST_MISSED)}


def measured(args, config):
    folder = args.storage / "embedding"
    folder.mkdir(parents=True)
    try:
        config["num_hidden_layers"] = args.layers
        (folder / "config.json").write_text(json.dumps(config))
        numpy.save(folder / "tokens.npy", ids_of(args, config["vocab_size"], (args.steps + 4) * (args.sequence_length + 1)).astype(numpy.uint32))
        checked([args.program, "train", "--config", folder / "config.json", "--data", folder / "tokens.npy", "--storage", folder / "store", "--device", "cpu", "--device-memory", args.device_memory, "--host-memory", args.host_memory,
                 "--sequence-length", args.sequence_length, "--steps", args.steps, "--held-out", 0, "--eval-sequences", 0, "--no-export", "--log-json", folder / "log.jsonl", *args.more])
        steps = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
        used = [step["embedding"] for step in steps if "embedding" in step and "step" in step][1:]
        shares = [each["bytes"] / each["bytes_of_all"] for each in used]
        return {"rows": [each["rows"] for each in used], "shares": shares, "share": statistics.mean(shares)}
    finally:
        shutil.rmtree(folder)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=pathlib.Path, default=ROOT / "benchmarks/step/qwen2.5-7b.json")
    parser.add_argument("--program", default=ROOT / "build/tierflow")
    parser.add_argument("--storage", type=pathlib.Path)
    parser.add_argument("--count", action="store_true")
    parser.add_argument("--ids", choices=["zipf", "uniform"], default="zipf")
    parser.add_argument("--tokens", type=pathlib.Path)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--sequence-length", type=int, default=512)
    parser.add_argument("--device-memory", default="8GiB")
    parser.add_argument("--host-memory", default="2GiB")
    parser.add_argument("more", nargs="*", help="after --, for `tierflow train`")
    args = parser.parse_args()
    if not args.count and args.storage is None:
        parser.error("--storage DIR, or --count")
    config = json.loads(args.config.read_text())
    print(json.dumps({"config": args.config.name, "tokens_a_step": args.sequence_length, "ids": str(args.tokens or args.ids), **(counted if args.count else measured)(args, config)}))


if __name__ == "__main__":
    main()
