"""DPO on pairs of answers: adapters beside a frozen base that streams.

    tierflow data prepare --model path/to/model --data pairs.jsonl --data-format preference --out pairs.tfd
    python examples/python/preferences.py path/to/model pairs.tfd out --storage /mnt/nvme/run --device 8GiB --host 16GiB

With --session the program's own session trains: its adapters stream too, and the reference is computed while a layer is there. Without, PEFT's adapters and
transformers' code. Prints of each step the loss, and by how much chosen answers gained on rejected ones.
Of the base that `make demo-lora` makes, with 96 of its answers chosen and always "Nobody knows that." rejected (--length 128):

    step 1: loss 0.6931, margin 0.000
    step 12: loss 0.0009, margin 7.229
"""

import argparse
import pathlib
from collections.abc import Iterator

import peft
import torch
import transformers

import tierflow


def epochs(batches: torch.utils.data.DataLoader) -> Iterator[dict[str, torch.Tensor]]:
    while True:
        yield from batches


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument("pairs", type=pathlib.Path)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--storage", action="append", default=[])
    parser.add_argument("--device", required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--session", action="store_true")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--micro-batch", type=int, default=4, help="pairs")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--allow-any-filesystem", action="store_true")
    args = parser.parse_args()

    budget = tierflow.Budget(args.device, args.host, args.storage)
    vocabulary = transformers.AutoConfig.from_pretrained(args.model).vocab_size
    pairs = tierflow.data.Pairs(args.pairs, vocab_size=vocabulary, sequence_length=args.length)
    torch.manual_seed(0)
    batches = epochs(torch.utils.data.DataLoader(pairs, args.micro_batch, shuffle=True, drop_last=True))
    if args.session:
        with tierflow.Session(args.model, budget, method="lora", adapters={"rank": 8, "alpha": 16}, loss={"kind": "dpo"}, micro_batch=args.micro_batch,
                              sequence_length=args.length, lr=5e-3, allow_any_filesystem=args.allow_any_filesystem) as session:  # fmt: skip
            for step in range(1, args.steps + 1):
                result = session.step([next(batches)])
                print(f"step {step}: loss {result['loss']:.4f}, margin {result['rewards/margins']:.3f}")
            session.save(args.out)
        return
    base = tierflow.load(args.model, tierflow.plan(args.model, budget, trainable=False, allow_any_filesystem=args.allow_any_filesystem))
    model = peft.get_peft_model(base, peft.LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")).train()
    opt = tierflow.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3)
    loss = tierflow.losses.DPO(beta=0.1)
    trainer = tierflow.Trainer(model, opt, loss=loss)
    for step in range(1, args.steps + 1):
        result = trainer.step([next(batches)])
        chosen, rejected = loss.rewards.mean(0)
        print(f"step {step}: loss {result.loss:.4f}, margin {chosen - rejected:.3f}")
    model.save_pretrained(args.out)  # the adapters alone


if __name__ == "__main__":
    main()
