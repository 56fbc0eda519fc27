"""Hooks and patches that are there for the forward alone: the backward, which computes it again, finds them as a graph would; and what it cannot find is said."""

import contextlib
import logging
from unittest import mock

import pytest
from stacks import as_plain, inputs, nn, once, stack
from streaming import batches, make, roomy, tierflow, torch

PLACES = {
    "forward hook": lambda m, hook: m.register_forward_hook(lambda _, args, out: hook(out)),
    "forward hook with keywords": lambda m, hook: m.register_forward_hook(lambda _, args, kwargs, out: hook(out), with_kwargs=True),
    "forward pre-hook": lambda m, hook: m.register_forward_pre_hook(lambda _, args: (hook(args[0]),)),
    "backward hook": lambda m, hook: m.register_full_backward_hook(lambda _, grads, outs: (hook(grads[0]),)),
    "backward pre-hook": lambda m, hook: m.register_full_backward_pre_hook(lambda _, outs: (hook(outs[0]),)),
    "hook of all modules": lambda m, hook: nn.modules.module.register_module_forward_hook(lambda module, args, out: hook(out) if module is m else None),
}


@pytest.mark.parametrize("switches", [False, True], ids=["", "then eval()"])
@pytest.mark.parametrize("place", PLACES)
def test_hooks_of_the_forward_alone_are_there_in_the_recomputation(place, switches):
    def backward(model):
        handles = [PLACES[place](block.linear, lambda x: 2 * x) for block in model.blocks]
        loss = model(*inputs())
        for handle in handles:
            handle.remove()
        model.train(not switches)
        after = [PLACES[place](block.linear, lambda x: 3 * x) for block in model.blocks]  # are not of this forward
        loss.backward()
        for handle in after:
            handle.remove()
        return loss.item()

    as_plain(stack, backward)


def test_a_hook_that_removes_itself_runs_once_in_the_recomputation_too():
    def backward(model):
        for block in model.blocks:

            def once_only(_, args, out, at=len(block.linear._forward_hooks), held=[]):
                held[at].remove()
                return 2 * out

            once_only.__defaults__[1].append(block.linear.register_forward_hook(once_only))
        return once(model)

    as_plain(lambda: stack(lambda b, x: x + torch.tanh(b.linear(x)) + torch.tanh(b.linear(x))), backward)


def test_a_forward_that_was_patched_for_one_module_alone_is_there_in_the_recomputation():
    def backward(model):
        with contextlib.ExitStack() as patched:
            for block in model.blocks:
                linear = block.linear
                patched.enter_context(mock.patch.object(linear, "forward", lambda x, own=linear.forward: 2 * own(x)))
            loss = model(*inputs())
        loss.backward()
        assert not any("forward" in vars(block.linear) for block in model.blocks)
        return loss.item()

    as_plain(stack, backward)


def test_a_forward_that_was_patched_for_a_class_is_refused():
    model = tierflow.wrap(stack(), roomy())
    own = nn.Linear.forward
    with mock.patch.object(nn.Linear, "forward", lambda self, x: 2 * own(self, x)):
        loss = model(*inputs())
    with pytest.raises(tierflow.UsageError, match=r"the forward\(\) of a class of its modules was replaced between a forward and its backward"):
        loss.backward()


def test_adapters_that_a_hook_of_one_forward_chooses_train_as_with_peft():
    peft = pytest.importorskip("peft")
    batch = batches("llama", 1)[0]
    models = []
    for stream in (False, True):
        model = tierflow.wrap(make("llama"), roomy(trainable=False)) if stream else make("llama")
        torch.manual_seed(1)
        config = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", alora_invocation_tokens=[int(batch["input_ids"][0, 5])], init_lora_weights=False)
        models.append(peft.get_peft_model(model, config))
        models[-1](input_ids=batch["input_ids"][:1], labels=batch["input_ids"][:1]).loss.backward()
    grads = [{name: p.grad for name, p in model.named_parameters() if "lora_" in name} for model in models]
    assert all(grad.abs().sum() > 0 for grad in grads[0].values())
    for name, grad in grads[0].items():
        assert (grads[1][name] - grad).norm() < 0.02 * grad.norm(), name


def test_what_a_hook_adds_to_a_frozen_block_has_its_gradient():
    added = []

    def makes():
        model = stack(lambda b, x: x + b.drop(torch.tanh(b.linear(x))))
        model.start.requires_grad_(False)
        model.blocks[0].requires_grad_(False)
        return model

    def backward(model):
        vector = nn.Parameter(torch.zeros(16, dtype=torch.bfloat16))
        handle = model.blocks[0].linear.register_forward_hook(lambda _, args, out: out + vector)
        losses = [once(model), once(model)]
        handle.remove()
        added.append(vector.grad)
        return losses

    as_plain(makes, backward)
    assert (added[1] - added[0]).norm() < 0.02 * added[0].norm()


def test_what_a_hook_adds_to_a_frozen_block_has_its_gradient_in_a_layer_major_step():
    found = []
    for layer_major in (False, True):
        model = stack()
        model.start.requires_grad_(False)
        model.blocks[0].requires_grad_(False)
        vector = nn.Parameter(torch.zeros(16, dtype=torch.bfloat16))
        model.blocks[0].linear.register_forward_hook(lambda _, args, out, vector=vector: out + vector)
        model = tierflow.wrap(model, roomy())
        if layer_major:
            tierflow.Trainer(model, tierflow.optim.AdamW(model.parameters()), loss=lambda m, x: m(x)).backward(inputs(2))
        else:
            for x in inputs(2):
                (model(x) / 2).backward()
        found.append(vector.grad)
    assert found[0].abs().sum() > 0 and (found[1] - found[0]).norm() < 0.02 * found[0].norm()


def test_hooks_of_one_micro_batch_are_not_those_of_another():
    peft = pytest.importorskip("peft")
    ids = [batch["input_ids"][:1] for batch in batches("llama", 2)]
    micro_batches = [{"input_ids": each, "labels": each} for each in ids]
    found = []
    for layer_major in (False, True):
        torch.manual_seed(1)
        config = peft.LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", alora_invocation_tokens=[int(ids[0][0, 5])], init_lora_weights=False)
        model = peft.get_peft_model(tierflow.wrap(make("llama"), roomy(trainable=False)), config)
        trained = [p for p in model.parameters() if p.requires_grad]
        if layer_major:
            tierflow.Trainer(model, tierflow.optim.AdamW(trained)).backward(micro_batches)
        else:
            for batch in micro_batches:
                (model(**batch).loss / 2).backward()
        found.append([p.grad for p in trained])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_a_padded_encoder_in_eval_mode_gives_what_it_gives_with_a_graph():
    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.blocks = nn.ModuleList([nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)])

        def forward(self, x):
            return self.blocks[0](x, src_key_padding_mask=torch.tensor([[False] * 2 + [True] * 2])).float().square().mean()

    def backward(model):
        loss = model.eval()(inputs()[0][None])
        loss.backward()
        return loss.item()

    as_plain(lambda: Encoder().bfloat16(), backward)


def test_parameters_of_another_are_not_mistaken_for_the_models_own():
    model = tierflow.wrap(stack(), roomy())
    others = {name: torch.zeros(p.shape, dtype=torch.bfloat16, requires_grad=True) for name, p in model.named_parameters()}
    loss = torch.func.functional_call(model, others, tuple(inputs()))
    with pytest.raises(tierflow.UsageError, match="other tensors were put in the place of its parameters, or taken away"):
        loss.backward()


def test_what_another_generator_drew_is_said(caplog):
    generator = torch.Generator().manual_seed(0)
    model = tierflow.wrap(stack(lambda b, x: x + torch.tanh(b.linear(x)) * torch.rand((), generator=generator)), roomy())
    with caplog.at_level(logging.WARNING, "tierflow"):
        once(model)
        once(model)
    assert [record.getMessage().split(":")[0] for record in caplog.records if "computes the forward again, and the result was another one" in record.getMessage()] == ["blocks.2"]


def test_a_tensor_in_an_attribute_is_that_of_the_forward():
    def moved(block, x):
        block.factor = getattr(block, "factor", torch.ones(())) * 0.5
        return x + torch.tanh(block.linear(x)) * block.factor

    as_plain(lambda: stack(moved), once, steps=2)


def test_a_weight_that_is_written_while_its_module_runs_is_refused():
    model = tierflow.wrap(nn.Sequential(nn.Embedding(10, 8, max_norm=0.1), nn.Linear(8, 4)).bfloat16(), roomy())
    model(torch.arange(10))  # how it comes to another version is not known yet
    with pytest.raises(tierflow.UsageError, match=r"0.weight was written while its module ran"):
        model(torch.arange(10))
    tierflow.wrap(nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 4)).bfloat16(), roomy())(torch.arange(10))


def test_a_scalar_that_is_written_while_its_module_runs_is_refused():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones((), dtype=torch.bfloat16), requires_grad=False)

        def forward(self, x):
            self.scale.mul_(0.5)
            return x * self.scale

    model = tierflow.wrap(nn.Sequential(Scaled(), nn.Linear(16, 1).bfloat16()), roomy())
    model(inputs()[0])
    with pytest.raises(tierflow.UsageError, match=r"0.scale was written while its module ran"):
        model(inputs()[0])


def test_a_cache_that_would_stay_empty_is_refused():
    model = tierflow.wrap(make("llama"), roomy())
    ids = batches("llama", 1)[0]["input_ids"][:1]
    kept = model(input_ids=ids, use_cache=True).past_key_values
    with pytest.raises(tierflow.UsageError, match=r"a cache stays empty while gradients are on.*torch.no_grad"):
        model(input_ids=ids[:, :1], past_key_values=kept, use_cache=True)
    assert model(input_ids=ids, labels=ids, past_key_values=kept, use_cache=False).loss.requires_grad
    with torch.no_grad():
        kept = model(input_ids=ids, use_cache=True).past_key_values
        assert kept.get_seq_length() == ids.shape[1]
        model(input_ids=ids[:, :1], past_key_values=kept, use_cache=True)


@pytest.mark.parametrize("made", [torch.optim.AdamW, tierflow.optim.AdamW])
def test_an_optimizer_from_before_the_model_streamed_is_refused(made):
    model = stack()
    opt = made(model.parameters(), lr=1e-3)
    model = tierflow.wrap(model, roomy())
    once(model)
    with pytest.raises(tierflow.UsageError, match=r"was made before tierflow.wrap\(\)"):
        opt.step()
    tierflow.optim.AdamW(model.parameters(), lr=1e-3).step()
