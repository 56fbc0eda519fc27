"""What a module reads beside its inputs: the backward, which computes it again, finds everything as it was, or the call is refused."""

import logging
import random

import numpy as np
import pytest
from stacks import as_plain, close_to, inputs, nn, once, stack
from streaming import batches, make, roomy, tierflow, torch


def dropped(block, x):
    return x + block.drop(torch.tanh(block.linear(x)))


@pytest.mark.parametrize(
    "does",
    [
        dropped,
        lambda b, x: x + nn.functional.dropout(torch.tanh(b.linear(x)), 0.5, True),
        lambda b, x: x + torch.tanh(b.linear(x)) * torch.rand(()),
        lambda b, x: x + torch.tanh(b.linear(x)) * random.random(),
        lambda b, x: x + torch.tanh(b.linear(x)) * float(np.random.rand()),
    ],
    ids=["only dropout trains", "always", "torch", "python", "numpy"],
)
def test_random_numbers_in_eval_mode_are_the_same_in_the_recomputation(does):
    def backward(model):
        model.eval()
        for block in model.blocks:
            block.drop.train()
        return once(model)

    as_plain(lambda: stack(does), backward, steps=2)


def test_the_state_of_random_numbers_is_kept_only_where_some_were_drawn():
    for does, kept in ((dropped, True), (None, False)):
        model = tierflow.wrap(stack(does), roomy())
        out = model.blocks[0](inputs()[0])
        moments = [node.frame.moment for node in (out.grad_fn,)]
        assert [moment.random is not None for moment in moments] == [kept]


@pytest.mark.parametrize("first", [True, False])
def test_modes_are_those_of_the_forward(first):
    def backward(model):
        loss = model.train(first)(*inputs())
        model.train(not first)
        loss.backward()
        assert all(m.training is not first for m in model.modules())
        return loss.item()

    as_plain(lambda: stack(dropped), backward)


def adapted(stream, fused=False):
    peft = pytest.importorskip("peft")
    model = tierflow.wrap(make("llama"), roomy(trainable=False), fused_layers=fused) if stream else make("llama")
    torch.manual_seed(1)
    config = lambda: peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)  # noqa: E731
    model = peft.get_peft_model(model, config(), adapter_name="a")
    model.add_adapter("b", config())
    return model.train()


@pytest.mark.parametrize("fused", [False, True], ids=["own", "fused"])
def test_adapters_are_those_of_the_forward(fused):
    models = adapted(False), adapted(True, fused)
    one, other = batches("llama", 2)
    for model in models:
        model.set_adapter("a")
        loss = model(**one).loss
        with model.disable_adapter():
            with torch.no_grad():
                model(**one)
            loss = loss - model(**one).loss
        model.set_adapter("b")
        loss = loss + model(**other).loss
        model.set_adapter("a")
        for name, p in model.named_parameters():
            if "lora_" in name:
                p.requires_grad_(True)
        loss.backward()
        assert model.active_adapters == ["a"]
    plain, streamed = models
    for name, p in plain.named_parameters():
        if "lora_" in name:
            found, wanted = streamed.get_parameter(name).grad, p.grad
            assert (found - wanted).norm() < (0.1 if fused else 0.02) * wanted.norm(), name


def test_the_reference_of_pairs_is_without_adapters_in_fused_layers_too():
    peft = pytest.importorskip("peft")
    ids = torch.randint(3, 160, (1, 2, 12), generator=torch.Generator().manual_seed(1))
    losses = []
    for fused in (False, True):
        model = tierflow.wrap(make("llama"), roomy(trainable=False), fused_layers=fused)
        torch.manual_seed(1)
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)).train()
        opt = tierflow.optim.AdamW([p for p in model.parameters() if p.requires_grad])
        losses.append(tierflow.Trainer(model, opt, loss="dpo").backward([{"input_ids": ids, "labels": ids}]))
    assert abs(losses[1] - losses[0]) < 0.01
    assert abs(losses[1] - 0.6931) > 0.03  # that of two models that are the same


def test_weights_that_changed_since_the_forward_are_refused():
    model = tierflow.wrap(stack(), roomy())
    opt = tierflow.optim.AdamW(model.parameters(), lr=1e-2)
    stale, loss = model(*inputs()), model(*inputs())
    loss.backward()
    opt.step()
    opt.zero_grad()
    with pytest.raises(tierflow.UsageError, match=r"head: its weights were changed by step\(\) or written between a forward and its backward\(\)"):
        stale.backward()
    opt.zero_grad()
    loss = model(*inputs())
    with torch.no_grad():
        model.blocks[1].linear.weight.mul_(0.5)
    with pytest.raises(tierflow.UsageError, match=r"blocks.1: its weights were changed"):
        loss.backward()
    opt.zero_grad()
    once(model)
    opt.step()


def test_ordinary_parameters_and_modules_that_changed_since_the_forward_are_refused():
    model = tierflow.wrap(stack(lambda b, x: x + torch.tanh(b.linear(x)) * getattr(b, "scale", 1)), roomy())
    model.blocks[1].scale = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    loss = model(*inputs())
    with torch.no_grad():
        model.blocks[1].scale.mul_(2)
    with pytest.raises(tierflow.UsageError, match="blocks.1: its parameters that do not stream were changed"):
        loss.backward()
    model.zero_grad()
    loss = model(*inputs())
    model.blocks[2].drop = nn.Dropout(0.1)
    with pytest.raises(tierflow.UsageError, match="blocks.2: modules in it were replaced or added"):
        loss.backward()
    model.zero_grad()
    once(model)


@pytest.mark.parametrize("trainer", [False, True], ids=["loop", "trainer"])
def test_buffers_are_updated_once_a_step(trainer):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True)) for _ in range(2))
            self.blocks.append(Counting())
            self.head = nn.Linear(4, 1)

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return self.head(x.mean((2, 3))).float().square().mean()

    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))
            self.register_buffer("count", torch.zeros(1))
            self.register_buffer("replaced", torch.zeros(1))
            self.register_buffer("large", torch.zeros(1 << 17))

        def forward(self, x):
            self.count += 1
            self.replaced = self.replaced + 1
            return x * self.scale * self.count.clone() * self.replaced

    def made():
        torch.manual_seed(0)
        return Net().bfloat16().train()

    data = [torch.randn(4, 4, 8, 8, generator=torch.Generator().manual_seed(each)).bfloat16() + 3 for each in range(2)]
    plain, streamed = made(), tierflow.wrap(made(), roomy())
    opt = tierflow.optim.AdamW(streamed.parameters())
    layer_major = tierflow.Trainer(streamed, opt, loss=lambda m, x: m(x))
    for _ in range(3):
        plain.zero_grad(), opt.zero_grad()
        for model in (plain, streamed):
            if trainer and model is streamed:
                layer_major.backward(data)
            else:
                losses = [model(x) / 2 for x in data]  # the second forward comes ahead of the first backward
                for loss in losses if not trainer else reversed(losses):
                    loss.backward()
        for (name, buffer), (_, other) in zip(plain.named_buffers(), streamed.named_buffers(), strict=True):
            assert torch.equal(buffer, other), name
        close_to(streamed, plain)


def test_plain_attributes_are_those_of_the_forward():
    def does(block, x):
        block.calls += 1
        return x + torch.tanh(block.linear(x)) * block.calls

    plain, streamed = as_plain(lambda: stack(does), once, steps=3)
    assert [block.calls for block in streamed.blocks] == [block.calls for block in plain.blocks] == [3] * 3


def test_attributes_and_hooks_that_lose_gradients_are_named(caplog):
    def does(block, x):
        block.aux = torch.tanh(block.linear(x))
        block.seen = block.aux.detach()
        return x + block.aux

    model = tierflow.wrap(stack(does), roomy())
    with caplog.at_level(logging.WARNING, "tierflow"):
        for _ in range(2):
            once(model)
    assert [record.message.split(" is ")[0] for record in caplog.records] == ["blocks.2.aux"]
    caplog.clear()
    model = tierflow.wrap(stack(), roomy())
    kept = []
    model.blocks[1].register_forward_hook(lambda module, args, out: kept.append(out))
    model.blocks[1].linear.register_forward_hook(lambda module, args, out: kept.append(out))
    with caplog.at_level(logging.WARNING, "tierflow"):
        for _ in range(2):
            once(model)
    assert [record.message.split(" inside of it")[0] for record in caplog.records] == ["blocks.1 has a forward hook on a module"]
