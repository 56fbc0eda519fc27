#!/usr/bin/env python3
"""A Llama training step under DeepSpeed ZeRO-Infinity on the CPU: parameters and optimizer state in files. Prints one JSON line.

    PEER_VENV/bin/python benchmarks/step/zero_infinity.py --config benchmarks/step/llama-152m.json --storage DIR

The interpreter needs torch, transformers and deepspeed; DeepSpeed compiles its kernels (asynchronous I/O, CPU Adam) at the first use."""
import argparse
import json
import os
import pathlib
import resource
import statistics
import tempfile
import time

for name, value in {"DS_ACCELERATOR": "cpu", "RANK": "0", "LOCAL_RANK": "0", "LOCAL_SIZE": "1", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}.items():
    os.environ.setdefault(name, value)
import torch  # noqa: E402


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="config.json of the model")
    parser.add_argument("--storage", required=True, help="folder on the drive to measure")
    parser.add_argument("--sequence-length", type=int, default=512)
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, default=1)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--clip", type=float, default=0, help="global gradient norm; 0: none")
    args = parser.parse_args()
    pathlib.Path(args.storage).mkdir(parents=True, exist_ok=True)
    import deepspeed
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**json.load(open(args.config))))
    model.gradient_checkpointing_enable()
    model.train()
    largest = max(parameter.numel() for parameter in model.parameters())
    with tempfile.TemporaryDirectory(dir=args.storage, prefix="zero-infinity-") as folder:
        settings = {
            "train_micro_batch_size_per_gpu": args.micro_batch, "gradient_accumulation_steps": args.micro_batches, "gradient_clipping": args.clip, "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0,
                                  "offload_optimizer": {"device": "nvme", "nvme_path": folder, "buffer_count": 4},
                                  "offload_param": {"device": "nvme", "nvme_path": folder, "buffer_count": 5, "buffer_size": max(20_000_000, 2 * largest)}},
            "aio": {"block_size": 1 << 20, "queue_depth": 16, "overlap_events": True},
        }
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)
        times = []
        for _ in range(args.steps):
            begin = time.perf_counter()
            for _ in range(args.micro_batches):
                ids = torch.randint(0, model.config.vocab_size, (args.micro_batch, args.sequence_length))
                engine.backward(engine(input_ids=ids, labels=ids).loss)
                engine.step()
            times.append(time.perf_counter() - begin)
    tokens = args.micro_batch * args.micro_batches * args.sequence_length
    print(json.dumps({"name": "ZeRO-Infinity", "tokens_per_step": tokens, "tokens_per_s": tokens / statistics.median(times[1:]),
                      "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024}))


if __name__ == "__main__":
    main()
