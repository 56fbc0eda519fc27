#!/usr/bin/env python3
"""A step of LoRA with the base on storage, for each precision of the base: tokens a second beside PEFT with everything resident (and bitsandbytes for 4 bits),
bytes read and written for each weight of the base (those of the blocks' linear layers apart from embedding and head), the step beside its slowest lane, and beside its plan. One JSON line a precision; medians of rounds, in turn.

    .venv/bin/python benchmarks/step/adapters.py --storage DIR [--rounds 3] [--steps 6] [--no-peer]

The model is made there from --config with random weights, and removed."""
import argparse
import json
import os
import pathlib
import shutil
import statistics
import sys
import tempfile

from layers import checked

ROOT = pathlib.Path(__file__).parents[2]


def tasks_of(trace):
    """Of the steps that were traced: each task's words, when it began, and its bytes."""
    events = json.loads(trace.read_text())["traceEvents"]
    measured = next(event["pid"] for event in events if event["name"] == "process_name" and event["args"]["name"] == "measured")
    return [(event["name"].split(), event["ts"], event["args"]["bytes"]) for event in events if event["ph"] == "X" and event["pid"] == measured and event.get("args")]


def written_to_base(tasks, adapters):
    """Bytes of weights' words that were written to storage, beyond those of the adapters, which are all that has to be: `adapters` bytes a step."""
    steps = sum(name[0] == "head" and name[-1] == "0" for name, _, _ in tasks)
    return max(0, sum(count for name, _, count in tasks if name[0] == "write_hi") - steps * adapters)


def read_a_step(tasks, layers):
    """Bytes of the blocks' words (of weights, and of adapters that are not in memory) that were read from storage in a step, and of everything else: embedding, head,
    state of adapters. The first step, which finds nothing in memory, does not count."""
    heads = sorted(at for name, at, _ in tasks if name[0] == "head" and name[-1] == "0")  # the first micro-batch's
    reads = [(name[0] == "read_hi" and 1 <= int(name[1]) <= layers, count) for name, at, count in tasks if name[0].startswith("read") and heads[0] < at < heads[-1]]
    blocks = sum(count for of_blocks, count in reads if of_blocks)
    return blocks / (len(heads) - 1), (sum(count for _, count in reads) - blocks) / (len(heads) - 1)


def ours(args, precision, config):
    log, trace = args.folder / "log.jsonl", args.folder / "trace.json"
    for old in args.folder.glob("log.jsonl*"):
        old.unlink()
    options = ["--method", "lora", "--lora-rank", args.lora_rank, "--lora-alpha", 2 * args.lora_rank, "--base-precision", precision, "--model", args.folder / "base", "--storage", args.folder / "store",
               "--device", "cpu", "--device-memory", args.device_memory, "--host-memory", args.host_memory, "--sequence-length", args.sequence_length, "--micro-batch", args.micro_batch]
    with tempfile.TemporaryDirectory() as cache:
        if args.plan:
            checked([args.program, "plan", *options], XDG_CACHE_HOME=cache)
        checked([args.program, "train", *options, "--data", args.data, "--held-out", 0, "--steps", args.steps, "--durability", "export-only", "--fresh", "--out", args.folder / "out", "--log-json", log, "--trace", trace],
                XDG_CACHE_HOME=cache)
    shutil.rmtree(args.folder / "out")
    records = [json.loads(line) for line in log.read_text().splitlines()]
    summary = records[-1]["summary"]
    steps = [record["step_s"] for record in records if "loss" in record][1:]  # the first one fills caches
    lanes = summary["lanes"]
    tasks = tasks_of(trace)
    blocks, otherwise = read_a_step(tasks, config["num_hidden_layers"])
    return {"step_s": statistics.median(steps), "read_blocks": blocks, "written_to_base": written_to_base(tasks, config["num_hidden_layers"] * adapter_bytes(config, args.lora_rank)), "read_otherwise": otherwise, "read": lanes["disk_read"]["bytes"] / args.steps, "written": 1e12 * summary["tb_written_per_step"],
            "lane": max((lane["busy_s"], name) for name, lane in lanes.items()), "training_s": summary["training_s"],
            "predicted_s": (summary["predicted"] or {}).get("step_s"), "peak_rss": summary["peak_rss"], "device": summary["device_memory_peak"], "host": summary["host_memory"],
            "storage": summary["storage_bytes"]}


def peer(args, precision):
    if args.no_peer or precision == "int8":
        return None
    out = checked([sys.executable, ROOT / "benchmarks/step/resident.py", "--config", args.config, "--sequence-length", args.sequence_length, "--micro-batch", args.micro_batch, "--steps", args.steps,
                   "--lora-rank", args.lora_rank, "--base-precision", precision, "--no-checkpointing"])
    return json.loads(out.splitlines()[-1])


def linear_layers(config):
    """Of a block: inputs and outputs of each."""
    head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    hidden, inner, heads, kv = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"], config["num_key_value_heads"]
    return [(hidden, heads * head), (heads * head, hidden), *2 * [(hidden, kv * head)], *2 * [(hidden, inner)], (inner, hidden)]


def adapter_bytes(config, rank):
    """What a block's adapters take on storage, at most: bf16 words, each tensor in whole blocks of 256, in whole pages."""
    words = sum(-(-rank * inputs // 256) + -(-rank * outputs // 256) for inputs, outputs in linear_layers(config)) * 256
    return -(-2 * words // 4096) * 4096


def base_weights(config):
    """Linear layers of the blocks, and everything."""
    hidden = config["hidden_size"]
    linear = config["num_hidden_layers"] * sum(inputs * outputs for inputs, outputs in linear_layers(config))
    return linear, linear + hidden * config["vocab_size"] * (1 if config.get("tie_word_embeddings") else 2)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--storage", type=pathlib.Path, required=True, help="folder on the drive to measure; a folder `adapters` is made in it, and removed")
    parser.add_argument("--program", default=ROOT / "build/tierflow")
    parser.add_argument("--config", default=ROOT / "benchmarks/step/llama-152m.json")
    parser.add_argument("--data", default=pathlib.Path(os.__file__).parent / "json", help="text; its content does not matter")
    parser.add_argument("--precisions", nargs="+", default=["bf16", "int8", "nf4", "nf4-double"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--lora-rank", type=int, default=16)
    parser.add_argument("--sequence-length", type=int, default=512)
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--host-memory", default="96MiB")
    parser.add_argument("--device-memory", default="2GiB")
    parser.add_argument("--no-peer", action="store_true")
    parser.add_argument("--plan", action="store_true", help="compare with what `tierflow plan` predicts")
    args = parser.parse_args()
    args.folder = args.storage / "adapters"
    args.folder.mkdir(parents=True)
    try:
        checked([args.program, "init", "--config", args.config, "--out", args.folder / "base"])
        config = json.loads(pathlib.Path(args.config).read_text())
        linear, everything = base_weights(config)
        tokens = args.micro_batch * args.sequence_length
        for precision in args.precisions:
            runs = [(ours(args, precision, config), peer(args, precision)) for _ in range(args.rounds)]
            middle = lambda key: statistics.median(run[key] for run, _ in runs)  # noqa: E731
            last = runs[-1][0]
            result = {"base": precision, "tokens_per_s": round(tokens / middle("step_s"), 1), "step_s": round(middle("step_s"), 3), "bytes_read_a_weight": round(middle("read") / everything, 3),
                      "bytes_read_a_linear_weight": round(middle("read_blocks") / linear, 3), "bytes_read_otherwise_a_step": round(middle("read_otherwise")), "bytes_written_a_step": round(middle("written")),
                      "bytes_written_to_the_base": max(run["written_to_base"] for run, _ in runs),
                      "slowest_lane": last["lane"][1], "slowest_lane_share": round(statistics.median(run["lane"][0] / run["training_s"] for run, _ in runs), 3),
                      "device_bytes": last["device"], "of_device_budget": args.device_memory, "host_bytes": last["host"], "of_host_budget": args.host_memory, "peak_rss": last["peak_rss"], "storage_bytes": last["storage"], "weights": everything, "linear_weights": linear}
            if last["predicted_s"]:
                result["predicted_step_s"] = round(statistics.median(run["predicted_s"] for run, _ in runs), 3)
                result["prediction_error"] = round(statistics.median(run["predicted_s"] / run["step_s"] - 1 for run, _ in runs), 3)
            if runs[0][1]:
                result["peft_tokens_per_s"] = round(statistics.median(other["tokens_per_s"] for _, other in runs), 1)
                result["times_peft"] = round(statistics.median(tokens / run["step_s"] / other["tokens_per_s"] for run, other in runs), 2)
            print(json.dumps(result), flush=True)
    finally:
        shutil.rmtree(args.folder, ignore_errors=True)


if __name__ == "__main__":
    main()
