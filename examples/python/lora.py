"""LoRA with PEFT over a frozen base that streams: the base has no optimizer state and is never written again.

    python examples/python/lora.py path/to/model out --storage /mnt/nvme/run --device 8GiB --host 16GiB
"""

import argparse
import pathlib

import peft
import torch

import tierflow


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--storage", action="append", default=[])
    parser.add_argument("--device", required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--allow-any-filesystem", action="store_true")
    args = parser.parse_args()

    budget = tierflow.Budget(args.device, args.host, args.storage)
    plan = tierflow.plan(args.model, budget, trainable=False, allow_any_filesystem=args.allow_any_filesystem)
    print(plan)
    base = tierflow.load(args.model, plan)
    torch.manual_seed(0)
    model = peft.get_peft_model(base, peft.LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")).train()
    opt = tierflow.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3)  # torch.optim.AdamW does as well: adapters stay in memory
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, base.config.vocab_size, (4, 32), generator=generator)  # your data here
    for step in range(1, args.steps + 1):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1.0)
        opt.step()
        opt.zero_grad()
        print(f"step {step}: loss {loss.item():.4f}")
    model.save_pretrained(args.out)  # the adapters alone


if __name__ == "__main__":
    main()
