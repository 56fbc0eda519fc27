#!/usr/bin/env python3
"""transformers' `generate()` on a streamed model beside the same model resident, in turn in one process: tokens a second, medians, and their ratio. Weights in RAM (goal 0.95), and with --storage
from the drive, where the link is the limit. One JSON line a kind. slowest_lane: the one that worked the largest share of the time, computation included, and that share.

    PYTHONPATH=build/python .venv/bin/python benchmarks/python/generate.py [--storage DIR] [--batch 8] [--new-tokens 32] [--rounds 5]
    PYTHONPATH=build/python .venv/bin/python benchmarks/python/generate.py --storage DIR --device-memory 192MiB     # less than the weights, which then stream

Random weights, greedy, no stop token. With the defaults about 3 minutes on two cores that nothing else uses; with --config examples/demo/config.json a few seconds."""

import argparse
import json
import pathlib
import statistics
import tempfile
import time

import tierflow
import torch
import transformers

CONFIG = pathlib.Path(__file__).parents[1] / "step/llama-152m.json"


def make(config):
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(config), dtype=torch.bfloat16).eval()


def seconds_of(model, ids, count):
    """Wall and CPU seconds for `count` tokens behind each prompt."""
    begun, cpu = time.monotonic(), time.process_time()
    with torch.no_grad():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0)
    assert out.shape[1] == ids.shape[1] + count
    return time.monotonic() - begun, time.process_time() - cpu, out


def busy_of(model):
    return {lane: of["busy_seconds"] for lane, of in tierflow.stats(model)["lanes"].items()}


def slowest(rounds):
    """Of rounds, each with its seconds and the busy seconds of its lanes."""
    shares = {lane: statistics.median(busy[lane] / wall for wall, _, busy in rounds) for lane in rounds[0][2]}
    lane = max(shares, key=shares.__getitem__, default=None)
    return {} if lane is None else {"slowest_lane": lane, "busy": round(shares[lane], 3)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--storage")
    parser.add_argument("--config", default=CONFIG)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5, help="the first is not counted")
    parser.add_argument("--device-memory", default="1GiB")
    parser.add_argument("--host-memory", default="4GiB", help="that holds all weights")
    parser.add_argument("--small-host-memory", default="64MiB", help="with --storage: that does not")
    args = parser.parse_args()
    if args.storage:
        pathlib.Path(args.storage).mkdir(parents=True, exist_ok=True)
    resident = make(args.config)
    kinds = {"resident": resident, "streamed from RAM": tierflow.wrap(make(args.config), tierflow.Plan(tierflow.Budget(args.device_memory, args.host_memory), trainable=False))}
    with tempfile.TemporaryDirectory(dir=args.storage) as folder:
        if args.storage:
            plan = tierflow.Plan(tierflow.Budget(args.device_memory, args.small_host_memory, [folder]), trainable=False, allow_any_filesystem=True)
            kinds["streamed from storage"] = tierflow.wrap(make(args.config), plan)
        ids = torch.randint(1, resident.config.vocab_size, (args.batch, args.prompt_tokens), generator=torch.Generator().manual_seed(1))
        found = {kind: [] for kind in kinds}
        for number in range(args.rounds):
            texts = []
            for kind, model in kinds.items():
                before = {} if model is resident else busy_of(model)
                wall, cpu, out = seconds_of(model, ids, args.new_tokens)
                busy = {lane: now - before[lane] for lane, now in ({} if model is resident else busy_of(model)).items()}
                texts.append(out)
                if number > 0:
                    found[kind].append((wall, cpu, busy))
            assert all(torch.equal(text, texts[0]) for text in texts), "streamed, the model writes something else"
        for kind, model in kinds.items():
            if model is not resident:
                tierflow.close(model)
    middle = {kind: [statistics.median(each[part] for each in rounds) for part in (0, 1)] for kind, rounds in found.items()}
    for kind, (wall, cpu) in middle.items():
        print(json.dumps({"generate": kind, "tokens_per_s": round(args.batch * args.new_tokens / wall, 1), "beside_resident": round(middle["resident"][0] / wall, 3),
                          "cpu_beside_resident": round(middle["resident"][1] / cpu, 3), **slowest(found[kind])}), flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
