#!/usr/bin/env python3
"""A training step of transformers' model with everything resident in plain PyTorch: what streaming is compared with; with --lora-rank that of PEFT's adapters, over weights
in bf16 or in bitsandbytes' 4 bits. Prints one JSON line."""
import argparse
import json
import resource
import statistics
import time

import torch
from transformers import AutoConfig, AutoModelForCausalLM


def adapted(model, args):
    import peft

    if args.base_precision != "bf16":
        import bitsandbytes

        for layer in model.model.layers:
            for part in (layer.self_attn, layer.mlp):
                for name, linear in [(name, child) for name, child in part.named_children() if isinstance(child, torch.nn.Linear)]:
                    stored = bitsandbytes.nn.Linear4bit(linear.in_features, linear.out_features, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4",
                                                        compress_statistics=args.base_precision == "nf4-double")
                    stored.load_state_dict(linear.state_dict())
                    setattr(part, name, stored)
    model.enable_input_require_grads()
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    return peft.get_peft_model(model, peft.LoraConfig(r=args.lora_rank, lora_alpha=2 * args.lora_rank, target_modules=names, task_type="CAUSAL_LM"))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", required=True, help="config.json of the model")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--sequence-length", type=int, default=512)
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, default=1)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--clip", type=float, default=0, help="global gradient norm; 0: none")
    parser.add_argument("--lora-rank", type=int, default=0, help="train adapters of every linear layer of the blocks in place of the weights; 0: the weights")
    parser.add_argument("--base-precision", default="bf16", choices=["bf16", "nf4", "nf4-double"])
    parser.add_argument("--no-checkpointing", action="store_true", help="keep activations instead of recomputing them")
    args = parser.parse_args()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**json.load(open(args.config)))).to(torch.bfloat16)
    model = (adapted(model, args) if args.lora_rank else model).to(args.device)
    if not args.no_checkpointing:
        model.gradient_checkpointing_enable()
    model.train()
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-4, fused=True)
    shape = (args.micro_batch, args.sequence_length)
    wait = torch.cuda.synchronize if args.device == "cuda" else lambda: None
    times = []
    for _ in range(args.steps):
        batches = [torch.randint(0, model.config.vocab_size, shape).to(args.device) for _ in range(args.micro_batches)]
        wait()
        begin = time.perf_counter()
        for ids in batches:
            (model(input_ids=ids, labels=ids).loss / args.micro_batches).backward()
        if args.clip > 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        optimizer.zero_grad()
        wait()
        times.append(time.perf_counter() - begin)
    tokens = args.micro_batch * args.micro_batches * args.sequence_length
    print(json.dumps({"name": "resident" if args.no_checkpointing else "resident with checkpointing", "tokens_per_step": tokens,
                      "tokens_per_s": tokens / statistics.median(times[1:]), **({"device_memory_peak": torch.cuda.max_memory_allocated()} if args.device == "cuda" else {}),
                      "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024}))


if __name__ == "__main__":
    main()
