"""A module of one's own: built without memory, its state on a drive, trained in a plain loop.

    python examples/python/own_module.py --storage /mnt/nvme/run
"""

import argparse
import tempfile

import torch
from torch import nn

import tierflow


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Regressor(nn.Module):
    """Elements of a ModuleList stream one at a time; so does every other module with parameters."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.first = nn.Linear(8, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.last = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x).squeeze(-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--storage", required=True)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--allow-any-filesystem", action="store_true")
    args = parser.parse_args()

    torch.manual_seed(0)
    model = Regressor(width=128, depth=8)  # for one larger than RAM: tierflow.init_empty(), and wrap(..., checkpoint=folder)
    budget = tierflow.Budget(device="4MiB", host="6MiB", storage=[args.storage])  # the state has 13 MB
    plan = tierflow.plan(model, budget, precision="fp32-master+adam32", allow_any_filesystem=args.allow_any_filesystem)
    print(plan)
    tierflow.wrap(model, plan)
    opt = tierflow.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(256, 8)
    y = x.sin().sum(-1)
    for step in range(1, args.steps + 1):
        loss = (model(x.bfloat16()).float() - y).square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        if step % 10 == 0 or step == 1:
            print(f"step {step}: loss {loss.item():.4f}")
    with tempfile.TemporaryDirectory() as out:
        tierflow.save(model, out)


if __name__ == "__main__":
    main()
