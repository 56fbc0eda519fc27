#!/usr/bin/env python3
"""A Llama training step under DeepSpeed ZeRO-3 with parameters and optimizer in host memory. Prints one JSON line."""
import argparse
import json
import os
import statistics
import sys
import time


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", required=True, help="config.json of the model")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--sequence-length", type=int, default=4096)
    parser.add_argument("--micro-batch", type=int, default=1)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--clip", type=float, default=1.0)
    args = parser.parse_args()
    if args.device != "cuda":
        sys.exit("DeepSpeed ZeRO-3 offload is measured on a GPU alone")
    try:
        import deepspeed
    except ImportError:
        sys.exit("deepspeed is not installed: pip install deepspeed")
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}.items():
        os.environ.setdefault(name, value)
    settings = {
        "train_micro_batch_size_per_gpu": args.micro_batch, "gradient_accumulation_steps": args.micro_batches, "gradient_clipping": args.clip, "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu", "pin_memory": True}, "offload_optimizer": {"device": "cpu", "pin_memory": True},
                              "overlap_comm": True, "contiguous_gradients": True},
    }
    with deepspeed.zero.Init(config_dict_or_path=settings):
        model = LlamaForCausalLM(LlamaConfig(**json.load(open(args.config))))
    model.gradient_checkpointing_enable()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)
    times = []
    for _ in range(args.steps):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(args.micro_batches):
            ids = torch.randint(0, model.config.vocab_size, (args.micro_batch, args.sequence_length), device=engine.device)
            engine.backward(engine(input_ids=ids, labels=ids).loss)
            engine.step()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    tokens = args.micro_batch * args.micro_batches * args.sequence_length
    print(json.dumps({"name": "zero3 offload", "tokens_per_step": tokens, "tokens_per_s": tokens / statistics.median(times[1:]),
                      "device_memory_peak": torch.cuda.max_memory_allocated()}))


if __name__ == "__main__":
    main()
