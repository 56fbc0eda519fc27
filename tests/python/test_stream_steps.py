"""What a step says, and what it leaves as it was: micro-batches, threads, random numbers, autocast, who trains and who evaluates."""

import gc
import threading
import time

import pytest
from streaming import LR, UP, batches, make, roomy, tierflow, torch, transformers


def trainer_of(model, **options):
    return tierflow.Trainer(model, tierflow.optim.AdamW(model.parameters(), lr=LR), **options)


def test_a_result_has_the_norm_before_clipping_and_the_seconds(model):
    plain, data = make("llama"), batches("llama", 2)
    for batch in data:
        (plain(**batch).loss / 2).backward()
    expected = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(p.grad.double()) for p in plain.parameters()])).item()
    began = time.monotonic()
    result = trainer_of(model, clip=expected / 100).step(data)
    assert result.grad_norm == pytest.approx(expected, rel=1e-2) and not result.skipped
    assert 0 < result.seconds <= time.monotonic() - began
    assert all(p.grad is None for p in model.parameters())


def test_one_micro_batch_alone_is_not_a_list_of_them(model, batch):
    with pytest.raises(tierflow.UsageError, match="at least one micro-batch, in a list"):
        trainer_of(model).step(batch)


def test_a_step_computes_gradients_whatever_the_grad_mode_and_refuses_inference_mode(model):
    data, other = batches("llama", 2), tierflow.wrap(make("llama"), roomy())
    with torch.no_grad():
        first = trainer_of(model).step(data)
        assert not torch.is_grad_enabled()
    second = trainer_of(other).step(data)
    assert (first.loss, first.grad_norm) == (second.loss, second.grad_norm)
    with torch.inference_mode(), pytest.raises(tierflow.UsageError, match="outside of torch.inference_mode"):
        trainer_of(model).step(data)


def test_threads_of_micro_batches_end_with_their_trainer(model):
    names = lambda: [thread.name for thread in threading.enumerate() if thread.name == "tierflow micro-batch"]  # noqa: E731
    gc.collect()
    before, trainer = len(names()), trainer_of(model)
    trainer.step(batches("llama", 3))
    trainer.evaluate(batches("llama", 2))
    assert len(names()) == before + 3
    del trainer
    gc.collect()
    deadline = time.monotonic() + 30
    while len(names()) > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(names()) == before


def gpt2_with_dropout():
    torch.manual_seed(3)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=160, n_embd=64, n_layer=2, n_head=4, n_positions=64, initializer_range=0.08, resid_pdrop=0.5, embd_pdrop=0.5)).bfloat16()  # fmt: skip


def test_a_backward_leaves_the_random_numbers_where_the_forward_left_them():
    model, batch = tierflow.wrap(gpt2_with_dropout().train(), roomy()), batches("gpt2", 1)[0]
    torch.manual_seed(5)
    loss = model(**batch).loss
    left = torch.get_rng_state()
    loss.backward()
    assert torch.equal(torch.get_rng_state(), left)


@pytest.mark.parametrize("ahead, behind", [(True, False), (False, True)])
def test_the_recomputation_has_the_autocast_of_the_forward(ahead, behind, model, batch):
    """Whatever is switched on by now, as in torch, whose backward does not ask."""
    seen = []
    model.model.layers[1].mlp.register_forward_hook(lambda *_: seen.append(torch.is_autocast_enabled("cpu")))
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=ahead):
        loss = model(**batch).loss
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=behind):
        loss.backward()
    assert seen == [ahead, ahead]


@pytest.mark.parametrize("on", [True, False])
def test_micro_batches_see_the_autocast_of_the_step(on, model):
    seen = []

    def loss(model, batch):
        seen.append(torch.is_autocast_enabled("cpu"))
        return model(**batch).loss

    trainer = trainer_of(model, loss=loss)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=on):
        trainer.step(batches("llama", 2))
        trainer.evaluate(batches("llama", 2))
    assert seen == [on] * 4


def test_an_evaluation_has_no_gradients():
    model = tierflow.wrap(gpt2_with_dropout().eval(), roomy())
    trainer, data, modes = trainer_of(model), batches("gpt2", 2), []
    found = trainer.evaluate(data, lambda model, batch: modes.append(torch.is_grad_enabled()) or model(**batch).loss)
    assert modes == [False, False] and not any(value.requires_grad for value in found)
    assert trainer.evaluate(data) == [value.item() for value in found] and not model.training
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("from_step", [0, 2])
@pytest.mark.parametrize("penalised", ["forward", "values", "both"])
def test_a_loss_that_uses_a_parameter_after_the_last_module(from_step, penalised):
    """In every step, or only later; of one micro-batch alone as well."""
    calls = 0

    def loss(model, batch):
        nonlocal calls
        calls += 1
        number = calls
        found = model(**batch).loss
        if number > 3 * from_step and number % 3 != 1:
            p = model.get_parameter(UP)
            if penalised != "values":
                found = found + 0.1 * (p * p).sum()
            if penalised != "forward":
                found = found * (1 + p.detach().float().abs().mean())
        return found

    def run(layer_major):
        nonlocal calls
        calls = 0
        model = tierflow.wrap(make("llama"), roomy())
        opt = tierflow.optim.AdamW(model.parameters(), lr=1e-3)
        trainer, seen = tierflow.Trainer(model, opt, loss=loss), []
        for step in range(4):
            own = batches("llama", 3 * 4)[3 * step : 3 * step + 3]
            if layer_major:
                seen.append(trainer.backward(own))
            else:
                found = [loss(model, batch) for batch in own]
                for value in found:
                    (value / 3).backward()
                seen.append(sum(float(value.detach()) for value in found) / 3)
            if step == from_step:
                gradients = {name: p.grad + 0 for name, p in model.named_parameters()}
            opt.step()
            opt.zero_grad()
        return seen, gradients

    (losses, found), (expected_losses, expected) = run(True), run(False)
    assert losses[: from_step + 1] == expected_losses[: from_step + 1]
    assert losses == pytest.approx(expected_losses, rel=1e-3)
    for name, gradient in expected.items():
        assert torch.linalg.vector_norm((found[name] - gradient).float()) < 0.01 * torch.linalg.vector_norm(gradient.float()), name
