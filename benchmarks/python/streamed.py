#!/usr/bin/env python3
"""Steps of a streamed transformers model with random weights: tokens a second, as one JSON line. What compare.py runs.

    PYTHONPATH=build/python .venv/bin/python benchmarks/python/streamed.py --storage DIR --shape 1x1x512"""

import argparse
import json
import pathlib
import resource
import statistics
import tempfile
import time

import torch
import transformers

import tierflow


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", default=pathlib.Path(__file__).parents[1] / "step/llama-152m.json")
    parser.add_argument("--storage", required=True)
    parser.add_argument("--shape", default="1x1x512", help="micro-batches x rows x length")
    parser.add_argument("--order", choices=["loop", "layer-major"], default="loop")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--host-memory", default="512MiB")
    parser.add_argument("--device-memory", default="2GiB")
    parser.add_argument("--activations", type=float, default=0.5, help="share of the device memory that is left to them")
    parser.add_argument("--fused-layers", action="store_true")
    parser.add_argument("--durable", action="store_true", help="commit every step")
    args = parser.parse_args()
    pathlib.Path(args.storage).mkdir(parents=True, exist_ok=True)
    count, rows, length = (int(word) for word in args.shape.split("x"))
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(args.config), dtype=torch.bfloat16)
    with tempfile.TemporaryDirectory(dir=args.storage) as folder:
        plan = tierflow.Plan(tierflow.Budget(args.device_memory, args.host_memory, [folder], args.activations, durable=args.durable), allow_any_filesystem=True)
        tierflow.wrap(model, plan, fused_layers=args.fused_layers).train()
        opt = tierflow.optim.AdamW(model.parameters(), lr=1e-5)
        trainer = tierflow.Trainer(model, opt, clip=1.0)
        if args.durable:
            tierflow.resume(model, opt)
        seconds, used = [], []
        for _ in range(args.steps):
            ids = torch.randint(0, model.config.vocab_size, (count, rows, length))
            began, before = time.monotonic(), time.process_time()
            if args.order == "layer-major":
                trainer.step([{"input_ids": part, "labels": part} for part in ids])
            else:
                for part in ids:
                    (model(input_ids=part, labels=part).loss / count).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                opt.step()
                opt.zero_grad()
            seconds.append(time.monotonic() - began)
            used.append(time.process_time() - before)
        stats = tierflow.stats(model)
        lanes = {name: round(lane["busy_seconds"], 2) for name, lane in stats["lanes"].items()}
        tierflow.close(model, discard=args.durable)
    half = len(seconds) // 2  # the first steps differ: kernels are compiled, memory is touched, room for activations is found
    median, cpu = statistics.median(seconds[half:]), statistics.median(used[half:])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    activations = {name: stats["memory"][name] >> 20 for name in ("activations_share", "activations_peak")}
    print(json.dumps({"tokens_per_s": round(count * rows * length / median, 1), "step_s": round(median, 3), "all_steps_s": round(sum(seconds), 2), "cpu_s": round(cpu, 3), "peak_rss_mib": peak,
                      "activations_mib": activations, "busy_s": lanes}))  # fmt: skip


if __name__ == "__main__":
    main()
