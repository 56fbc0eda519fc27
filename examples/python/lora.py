"""LoRA with PEFT on conversations, over a frozen base that streams: the base has no optimizer state and is never written again.

    tierflow data prepare --model path/to/model --data chats.jsonl --out rows.tfd
    python examples/python/lora.py path/to/model rows.tfd out --storage /mnt/nvme/run --device 8GiB --host 16GiB
"""

import argparse
import pathlib

import peft
import torch

import tierflow


def epochs(batches):
    while True:
        yield from batches


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument("rows", type=pathlib.Path)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--storage", action="append", default=[])
    parser.add_argument("--device", required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--micro-batch", type=int, default=4)
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
    rows = tierflow.data.Rows(args.rows, vocab_size=base.config.vocab_size, sequence_length=args.length)
    batches = torch.utils.data.DataLoader(rows, args.micro_batch, shuffle=True)
    for step, batch in zip(range(1, args.steps + 1), epochs(batches)):
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1.0)
        opt.step()
        opt.zero_grad()
        print(f"step {step}: loss {loss.item():.4f}")
    model.save_pretrained(args.out)  # the adapters alone


if __name__ == "__main__":
    main()
