#!/usr/bin/env python3
"""Streamed steps beside resident transformers with checkpointing, in turn in one process: CPU seconds a micro-batch of 512 tokens, medians.

    PYTHONPATH=build/python .venv/bin/python benchmarks/python/against_resident.py --storage DIR

CPU seconds, unlike tokens/s, hold on a machine that others use as well; waiting for a drive is not in them. One JSON line a kind of step and attention
("fused": of the streamed model with fused_layers=True, which has its own)."""

import argparse
import functools
import json
import pathlib
import statistics
import tempfile
import time

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
    parser.add_argument("--rounds", type=int, default=7, help="the first two of them are not counted")
    args = parser.parse_args()
    pathlib.Path(args.storage).mkdir(parents=True, exist_ok=True)
    resident = make()
    resident.gradient_checkpointing_enable()
    plain = torch.optim.AdamW(resident.parameters(), lr=1e-5, fused=True)
    with tempfile.TemporaryDirectory(dir=args.storage) as folder:
        plan = tierflow.Plan(tierflow.Budget("2GiB", "512MiB", [folder]), allow_any_filesystem=True)
        kinds = {("resident, checkpointing", attention): (resident, 1, lambda batches: loop(resident, plain, batches)) for attention in ("sdpa", "tierflow")}
        for fused in (False, True):
            streamed = tierflow.wrap(make(), plan, fused_layers=fused)
            opt = tierflow.optim.AdamW(streamed.parameters(), lr=1e-5)
            trainer = tierflow.Trainer(streamed, opt)
            for attention in ["fused"] if fused else ["sdpa", "tierflow"]:
                kinds["streamed, own loop", attention] = streamed, 1, functools.partial(loop, streamed, opt)
                kinds["streamed, tierflow.Trainer", attention] = streamed, 2, trainer.step
        seconds = {}
        for _ in range(args.rounds):
            for (kind, attention), (model, count, step) in kinds.items():
                if attention != "fused":
                    model.set_attn_implementation(attention)
                ids = torch.randint(0, resident.config.vocab_size, (count, 1, 512))
                before = time.process_time()
                step([{"input_ids": part, "labels": part} for part in ids])
                seconds.setdefault((kind, attention), []).append((time.process_time() - before) / count)
        for model in {id(model): model for model, _, _ in kinds.values() if model is not resident}.values():
            tierflow.close(model)
    for (kind, attention), each in seconds.items():
        print(json.dumps({"step": kind, "attention": attention, "cpu_s": round(statistics.median(each[2:]), 2)}))


if __name__ == "__main__":
    main()
