"""A model of blocks whose forward() does what a test says, and what it is compared with."""

import random

import numpy as np
import pytest
from streaming import roomy, tierflow, torch

nn = torch.nn


class Block(nn.Module):
    """x + tanh(linear(x)), or what `does` makes of the block and its arguments."""

    def __init__(self, does=None, width=16):
        super().__init__()
        self.linear, self.drop, self.does, self.calls = nn.Linear(width, width), nn.Dropout(0.5), does, 0

    def forward(self, x, *rest):
        return self.does(self, x, *rest) if self.does else x + torch.tanh(self.linear(x))


class Stack(nn.Module):
    """A linear layer, blocks, and a linear layer. between: changes what goes from a block to the next; rest: makes what blocks share beside it."""

    def __init__(self, does=None, count=3, between=lambda x: x, rest=lambda: (), end=lambda x, *rest: x):
        super().__init__()
        self.start, self.blocks, self.head = nn.Linear(16, 16), nn.ModuleList(Block(does) for _ in range(count)), nn.Linear(16, 1)
        self.between, self.rest, self.end = between, rest, end

    def forward(self, x):
        x, rest = self.start(x), self.rest()
        for block in self.blocks:
            x = self.between(block(x, *rest))
        return self.head(self.end(x, *rest)).float().square().mean()


def stack(*given, **options):
    torch.manual_seed(0)
    return Stack(*given, **options).bfloat16().train()


def inputs(count=1):
    return [torch.randn(4, 16, generator=torch.Generator().manual_seed(each)).bfloat16() for each in range(count)]


def close_to(streamed, plain):
    for name, p in plain.named_parameters():
        found = streamed.get_parameter(name).grad
        assert (found is None) == (p.grad is None), name
        if found is not None:
            torch.testing.assert_close(found + 0, p.grad, rtol=0.02, atol=1e-3, msg=lambda m, name=name: f"{name}: {m}")


def as_plain(makes, backward, steps=1):
    """That gradients are those of plain torch. backward: of a model; gives the losses."""
    plain, streamed = makes(), tierflow.wrap(makes(), roomy())
    seen = []
    for model in (plain, streamed):
        torch.manual_seed(5), random.seed(5), np.random.seed(5)
        seen.append([backward(model) for _ in range(steps)])
    assert seen[0] == seen[1]
    close_to(streamed, plain)
    return plain, streamed


def once(model):
    loss = model(*inputs())
    loss.backward()
    return loss.item()


def refused(text, makes, backward=once):
    model = tierflow.wrap(makes(), roomy())
    with pytest.raises(tierflow.UsageError, match=text):
        backward(model)
