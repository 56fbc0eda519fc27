#!/usr/bin/env python3
"""Streamed steps beside resident transformers with checkpointing, in turn in one process: CPU seconds a micro-batch of 512 tokens, medians.

    PYTHONPATH=build/python .venv/bin/python benchmarks/python/against_resident.py --storage DIR

CPU seconds, unlike tokens/s, hold on a machine that others use as well; waiting for a drive is not in them. One JSON line an attention and kind of step."""

import argparse
import json
import pathlib
import resource
import statistics
import tempfile

import tierflow
import tierflow.hf
import torch
import transformers

CONFIG = pathlib.Path(__file__).parents[1] / "step/llama-152m.json"


def make():
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(CONFIG), dtype=torch.bfloat16).train()


def loop(model, opt, batches):
    for batch in batches:
        (model(**batch).loss / len(batches)).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
    opt.zero_grad()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--storage", required=True)
    parser.add_argument("--rounds", type=int, default=6, help="the first of them is not counted")
    args = parser.parse_args()
    resident = make()
    resident.gradient_checkpointing_enable()
    plain = torch.optim.AdamW(resident.parameters(), lr=1e-5, fused=True)
    with tempfile.TemporaryDirectory(dir=args.storage) as folder:
        streamed = tierflow.wrap(make(), tierflow.Plan(tierflow.Budget("2GiB", "512MiB", [folder]), allow_any_filesystem=True))
        opt = tierflow.optim.AdamW(streamed.parameters(), lr=1e-5)
        trainer = tierflow.Trainer(streamed, opt)
        kinds = {
            "resident, checkpointing": (1, lambda batches: loop(resident, plain, batches)),
            "streamed, own loop": (1, lambda batches: loop(streamed, opt, batches)),
            "streamed, tierflow.Trainer": (2, trainer.step),
        }
        seconds = {}
        for _ in range(args.rounds):
            for attention in ("sdpa", "tierflow"):
                resident.set_attn_implementation(attention)
                streamed.set_attn_implementation(attention)
                for kind, (count, step) in kinds.items():
                    ids = torch.randint(0, streamed.config.vocab_size, (count, 1, 512))
                    before = resource.getrusage(resource.RUSAGE_SELF)
                    step([{"input_ids": part, "labels": part} for part in ids])
                    after = resource.getrusage(resource.RUSAGE_SELF)
                    used = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
                    seconds.setdefault((attention, kind), []).append(used / count)
        tierflow.close(streamed)
    for (attention, kind), each in seconds.items():
        print(json.dumps({"attention": attention, "step": kind, "cpu_s": round(statistics.median(each[1:]), 2)}))


if __name__ == "__main__":
    main()
