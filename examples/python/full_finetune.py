"""Full fine-tuning of a transformers model on a text, in your own loop; then, with --layer-major, the way that fetches each layer once a step.

    python examples/python/full_finetune.py path/to/model corpus.txt out --storage /mnt/nvme/run --device 20GiB --host 64GiB

The folder needs a tokenizer; without one, bytes are the tokens.
"""

import argparse
import pathlib

import torch
import transformers

import tierflow


def sequences(model_folder: pathlib.Path, text: pathlib.Path, length: int) -> torch.Tensor:
    """[sequences, length] token ids."""
    if (model_folder / "tokenizer.json").exists():
        tokenizer = transformers.AutoTokenizer.from_pretrained(model_folder)
        ids = tokenizer(text.read_text(encoding="utf-8"), return_tensors="pt").input_ids[0]
    else:
        ids = torch.tensor(list(text.read_bytes()))
    return ids[: len(ids) // length * length].reshape(-1, length)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument("text", type=pathlib.Path)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--storage", action="append", default=[], help="a folder for the state; repeat it for more drives")
    parser.add_argument("--device", default=None, help="device memory, e.g. 20GiB (on the CPU device: RAM as well)")
    parser.add_argument("--host", default=None, help="RAM for state and buffers")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--rows", type=int, default=1, help="sequences in a micro-batch")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--layer-major", action="store_true")
    parser.add_argument("--fused-layers", action="store_true", help="faster where the model's layers are known; other last bits")
    parser.add_argument("--allow-any-filesystem", action="store_true", help="storage need not be a local drive")
    args = parser.parse_args()

    budget = tierflow.Budget(args.device, args.host, args.storage) if args.device and args.host else "auto"
    options = {} if args.device and args.host else {"storage": args.storage}
    plan = tierflow.plan(args.model, budget, micro_batches=args.micro_batches, allow_any_filesystem=args.allow_any_filesystem, **options)
    print(plan)
    model = tierflow.load(args.model, plan, fused_layers=args.fused_layers).train()
    opt = tierflow.optim.AdamW(model.parameters(), lr=args.lr)
    schedule = torch.optim.lr_scheduler.LinearLR(opt, start_factor=1.0, end_factor=0.1, total_iters=args.steps)
    data = sequences(args.model, args.text, args.length)
    loader = torch.utils.data.DataLoader(data, batch_size=args.rows, shuffle=True, drop_last=True, generator=torch.Generator().manual_seed(0))

    def micro_batches():
        while True:
            for ids in loader:
                yield {"input_ids": ids, "labels": ids}

    stream = micro_batches()
    trainer = tierflow.Trainer(model, opt, clip=1.0)
    for step in range(1, args.steps + 1):
        own = [next(stream) for _ in range(args.micro_batches)]
        if args.layer_major:
            result = trainer.step(own)
            loss, norm = result.loss, result.grad_norm
        else:
            loss = 0.0
            for batch in own:
                part = model(**batch).loss / len(own)
                part.backward()
                loss += part.item()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
            opt.step()
            opt.zero_grad()
        schedule.step()
        print(f"step {step}: loss {loss:.4f}, gradient norm {norm:.3f}")
    model.save_pretrained(args.out)
    print(f"wrote {args.out}")


if __name__ == "__main__":
    main()
