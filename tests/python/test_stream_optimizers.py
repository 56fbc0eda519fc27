"""Optimizers, hooks and wrappers of others over a streamed model: each works, or says what to do."""

import numpy as np
import pytest
from streaming import LR, UP, PlainLoop, batches, make, masters, roomy, scarce, tierflow, torch, transformers


def halves(model):
    """Parameters of two layers and the rest."""
    named = dict(model.named_parameters())
    first = [p for name, p in named.items() if ".layers.0." in name or ".layers.1." in name]
    return first, [p for p in named.values() if not any(p is q for q in first)]


@pytest.mark.parametrize("interleaved", [False, True])
def test_two_optimizers_each_step_their_own(batch, model, interleaved):
    loop, plain = None, make("llama")
    loop = PlainLoop(plain, LR)
    first, rest = (tierflow.optim.AdamW(part, lr=LR) for part in halves(model))
    for _ in range(2):
        loop.backward(plain(**batch).loss)
        loop.step()
        model(**batch).loss.backward()
        first.step()
        if interleaved:
            first.zero_grad()
        rest.step()
        if not interleaved:
            first.zero_grad()
        rest.zero_grad()
    assert all(torch.equal(master.flatten(), loop.master(name)) for name, master in masters(model).items())


def test_a_gradient_waits_for_the_optimizer_that_has_it(batch, model):
    first, rest = (tierflow.optim.AdamW(part, lr=LR) for part in halves(model))
    model(**batch).loss.backward()
    expected = model.lm_head.weight.grad + 0
    first.step()
    first.zero_grad()
    assert model.get_parameter(UP).grad is None and torch.equal(model.lm_head.weight.grad + 0, expected)
    model(**batch).loss.backward()  # adds to what waits, as in torch
    assert model.lm_head.weight.grad.float().norm() > expected.float().norm()
    rest.zero_grad()
    assert model.lm_head.weight.grad is None and model.get_parameter(UP).grad is not None


def test_optimizers_that_share_a_module_say_so(batch, model):
    ups = [p for name, p in model.named_parameters() if "up_proj" in name]
    rest = [p for name, p in model.named_parameters() if "up_proj" not in name]
    first, second = tierflow.optim.AdamW(ups, lr=LR), tierflow.optim.AdamW(rest, lr=LR)
    model(**batch).loss.backward()
    first.step()
    with pytest.raises(tierflow.UsageError, match="groups of one optimizer"):
        second.step()
    second.zero_grad()
    first.zero_grad()
    model(**batch).loss.backward()
    second.step()


def test_a_group_that_is_added_trains(batch, model):
    before = masters(model)
    opt = tierflow.optim.AdamW([model.get_parameter(UP)], lr=LR)
    opt.add_param_group({"params": [model.lm_head.weight], "lr": LR / 2})
    model(**batch).loss.backward()
    opt.step()
    assert {name for name, master in masters(model).items() if not torch.equal(master, before[name])} == {UP, "lm_head.weight"}


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"lr": -1e-5}, r"AdamW\(lr=-1e-05\): lr is a number, at least 0"),
        ({"lr": float("nan")}, r"lr=nan"),
        ({"lr": float("inf")}, r"lr=inf"),
        ({"lr": "1e-5"}, r"lr='1e-5'"),
        ({"eps": -1}, r"eps=-1"),
        ({"weight_decay": None}, r"weight_decay=None"),
        ({"betas": (0.9,)}, r"betas=\(0.9,\)\): betas are two numbers"),
        ({"betas": (0.9, 1)}, r"betas=\(0.9, 1\)"),
        ({"betas": 0.9}, r"betas=0.9"),
    ],
)
def test_values_that_adamw_cannot_take_are_named(given, named, model):
    with pytest.raises(tierflow.UsageError, match=named):
        tierflow.optim.AdamW(model.parameters(), **given)
    opt = tierflow.optim.AdamW([model.get_parameter(UP)], lr=torch.tensor(LR), betas=[0.9, np.float32(0.99)], eps=np.array(1e-8))
    with pytest.raises(tierflow.UsageError, match=named):
        opt.add_param_group({"params": [model.lm_head.weight], **given})
    assert len(opt.param_groups) == 1


@pytest.mark.parametrize("made", [lambda p: torch.optim.AdamW(p, lr=LR), lambda p: torch.optim.SGD(p, lr=LR), lambda p: torch.optim.Adam(p, foreach=True)])
def test_optimizers_of_others_say_which_to_take(made, batch, model):
    before = masters(model)
    opt = made(model.parameters())
    model(**batch).loss.backward()
    with pytest.raises(tierflow.UsageError, match="use tierflow.optim.AdamW"):
        opt.step()
    assert all(torch.equal(master, before[name]) for name, master in masters(model).items())
    plain = torch.nn.Linear(2, 2)
    plain(torch.ones(1, 2)).sum().backward()
    made(plain.parameters()).step()


def test_a_trainer_without_optimizers_says_what_to_pass(model, tmp_path):
    pytest.importorskip("accelerate")
    rows = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 4
    args = transformers.TrainingArguments(output_dir=tmp_path, max_steps=1, report_to=[], use_cpu=True, disable_tqdm=True, save_strategy="no")
    with pytest.raises(tierflow.UsageError, match=r"optimizers=\(tierflow.optim.AdamW"):
        transformers.Trainer(model, args, train_dataset=rows).train()


def test_hooks_on_parameters_say_that_they_are_not_called(model, batch):
    p = model.get_parameter(UP)
    for register in (p.register_hook, p.register_post_accumulate_grad_hook):
        with pytest.raises(tierflow.UsageError, match="would never be called"):
            register(lambda *_: None)
    seen = []
    model.model.layers[0].register_full_backward_hook(lambda module, grads, outs: seen.append(outs))
    model(**batch).loss.backward()
    assert len(seen) == 1


def test_data_parallelism_is_refused_before_it_writes(model, tmp_path):
    import torch.distributed as dist

    before = masters(model)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        outer = torch.nn.ModuleDict({"model": model})
        for wrapped in (model, outer):
            with pytest.raises(tierflow.UsageError, match="in one process"):
                torch.nn.parallel.DistributedDataParallel(wrapped)
        with pytest.raises(tierflow.UsageError, match="in one process"):
            dist.broadcast(model.lm_head.weight.data, 0)
    finally:
        dist.destroy_process_group()
    assert all(torch.equal(master, before[name]) for name, master in masters(model).items())


def test_a_gradient_scaler_scales_and_skips(batch):
    runs = []
    for scaled in (False, True):
        model = tierflow.wrap(make("llama"), roomy())
        opt = tierflow.optim.AdamW(model.parameters(), lr=LR)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled)
        scaler.scale(model(**batch).loss).backward()
        scaler.unscale_(opt)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9).item()
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        runs.append((norm, masters(model)))
    assert runs[1][0] == pytest.approx(runs[0][0], rel=1e-6)
    assert all(torch.equal(runs[0][1][name], runs[1][1][name]) for name in runs[0][1])
    hook = model.model.layers[1].register_forward_hook(lambda module, args, out: out * float("inf"))
    scaler.scale(model(**batch).loss).backward()
    hook.remove()
    scaler.step(opt)
    scaler.update()
    assert scaler.get_scale() == 512.0 and tierflow.stats(model)["skipped_steps"] == 0
    assert all(torch.equal(master, runs[1][1][name]) for name, master in masters(model).items())


def test_gradients_asked_for_by_name_say_what_to_do(model, batch):
    with pytest.raises(tierflow.UsageError, match="call backward"):
        torch.autograd.grad(model(**batch).loss, list(model.parameters()))
    embedded = torch.randn(2, 24, 64, dtype=torch.bfloat16, requires_grad=True)
    for ask in (lambda loss: torch.autograd.grad(loss, embedded), lambda loss: loss.backward(inputs=[embedded])):
        with pytest.raises(tierflow.UsageError, match="is not there"):
            ask(model(inputs_embeds=embedded, labels=batch["labels"]).loss)
    assert all(p.grad is None for p in model.parameters())
    model(inputs_embeds=embedded, labels=batch["labels"]).loss.backward()
    assert embedded.grad is not None


@pytest.mark.parametrize("stored, shuffled, said", [(False, True, False), (True, False, False), (True, True, True)])
def test_another_order_is_spoken_of_where_it_costs_something(stored, shuffled, said, tmp_path, caplog):
    """Not where all weights are in memory, nor for the change from training to evaluation."""
    model = tierflow.wrap(make("llama"), scarce(tmp_path / "store") if stored else roomy())
    data = batches("llama", 1)[0]
    for count in range(40):
        order = torch.randperm(3, generator=torch.Generator().manual_seed(count)).tolist() if shuffled else range(3)
        model.model.layers = torch.nn.ModuleList(model.model.layers[i] for i in order)
        with torch.set_grad_enabled(count % 10 == 0):
            loss = model(**data).loss
        if loss.requires_grad:
            loss.backward()
            model.zero_grad()
    assert ("another order" in caplog.text) == said


OWN = {"lr": 3e-3, "betas": (0.5, 0.7), "eps": 1e-3, "weight_decay": 0.2}


def test_a_group_has_every_setting_of_its_own(batch):
    """As an optimizer has it for all its parameters, streamed ones and ordinary ones."""
    seen = []
    for as_group in True, False:
        model = tierflow.wrap(make("llama"), roomy())
        torch.manual_seed(2)
        model.lm_head = torch.nn.Linear(64, 160, bias=False).bfloat16()  # an ordinary module
        own = [model.get_parameter(UP), model.lm_head.weight]
        opt = tierflow.optim.AdamW([{"params": own, **OWN}] if as_group else own, **({} if as_group else OWN))
        for p in model.parameters():
            p.requires_grad_(any(p is one for one in own))
        for _ in range(2):
            model(**batch).loss.backward()
            opt.step()
            opt.zero_grad()
        seen.append((model.get_parameter(UP).master(), model.lm_head.weight.detach().clone()))
        tierflow.close(model)
    assert all(torch.equal(one, other) for one, other in zip(*seen, strict=True))
    weight, other = (torch.nn.Parameter(torch.linspace(-1, 1, 40)) for _ in range(2))
    ours, theirs = tierflow.optim.AdamW([{"params": [weight], **OWN}]), torch.optim.AdamW([other], **OWN)
    for step in range(3):
        weight.grad, other.grad = (torch.linspace(1, 3, 40).roll(step) for _ in range(2))
        ours.step()
        theirs.step()
    assert torch.equal(weight, other)


def test_a_closure_computes_the_loss_and_its_gradients(batch, model):
    opt, before = tierflow.optim.AdamW(model.parameters(), lr=LR), masters(model)

    def closure():
        loss = model(**batch).loss
        loss.backward()
        return loss

    with torch.no_grad():
        loss = opt.step(closure)
    assert loss.item() == make("llama")(**batch).loss.item()
    assert all(not torch.equal(master, before[name]) for name, master in masters(model).items())


def test_gradients_of_ordinary_parameters_are_zeros_where_that_is_asked_for(model):
    extra = torch.nn.Parameter(torch.ones(3))
    opt = tierflow.optim.AdamW([*model.parameters(), extra], lr=LR)
    extra.sum().backward()
    opt.zero_grad(set_to_none=False)
    assert torch.equal(extra.grad, torch.zeros(3))
    opt.zero_grad()
    assert extra.grad is None


def test_an_optimizer_of_others_may_have_streamed_parameters_that_are_frozen(model, batch):
    model.requires_grad_(False)
    model.lm_head = torch.nn.Linear(64, 160, bias=False).bfloat16()
    opt, before = torch.optim.AdamW(model.parameters(), lr=LR), model.lm_head.weight.detach().clone()
    model(**batch).loss.backward()
    opt.step()
    assert not torch.equal(model.lm_head.weight, before)


@pytest.mark.parametrize("factor", [float("nan"), float("inf")])
def test_a_factor_that_is_not_finite_skips_the_step(factor, model, batch):
    opt, before = tierflow.optim.AdamW(model.parameters(), lr=LR), masters(model)
    model(**batch).loss.backward()
    model.get_parameter(UP).grad.mul_(factor)
    opt.step()
    opt.zero_grad()
    assert tierflow.stats(model)["skipped_steps"] == 1
    assert all(torch.equal(master, before[name]) for name, master in masters(model).items())
    model(**batch).loss.backward()
    opt.step()
    assert not torch.equal(masters(model)[UP], before[UP])


@pytest.mark.parametrize("drop", [lambda model, opt: model.zero_grad(), lambda model, opt: opt.zero_grad()])
def test_a_factor_goes_with_the_gradient_that_it_scaled(drop, model, batch):
    opt = tierflow.optim.AdamW(model.parameters(), lr=LR)
    model(**batch).loss.backward()
    expected = model.get_parameter(UP).grad + 0
    for p in model.parameters():
        p.grad.mul_(0.25)
    assert torch.equal(model.get_parameter(UP).grad + 0, expected * 0.25)
    drop(model, opt)
    model(**batch).loss.backward()
    assert torch.equal(model.get_parameter(UP).grad + 0, expected)


def test_norms_of_gradients_that_are_not_finite_are_those_of_torch(batch):
    for value in float("nan"), float("inf"):
        norms = []
        for model in tierflow.wrap(make("llama"), roomy()), make("llama"):
            model.lm_head.register_full_backward_hook(lambda module, grads, outs: (torch.full_like(grads[0], value),))
            model(**batch).loss.backward()
            norms.append(torch.linalg.vector_norm(model.model.norm.weight.grad).item())
        assert str(norms[0]) == str(norms[1])


def broken_off(model, batch):
    """A backward that ends in the middle."""
    hook = model.model.layers[1].mlp.register_full_backward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(**batch).loss.backward()
    hook.remove()


def broken_off_between(model, batch):
    """A backward that ends between two modules that stream."""
    hook = model.model.layers[1].register_forward_hook(lambda module, args, out: out.register_hook(lambda grad: 1 / 0) and None)
    with pytest.raises(ZeroDivisionError):
        model(**batch).loss.backward()
    hook.remove()


breaks_off = pytest.mark.parametrize("broken_off", [broken_off, broken_off_between])


@breaks_off
def test_what_is_left_of_a_broken_off_backward_goes_for_all_optimizers(model, batch, broken_off):
    first, rest = (tierflow.optim.AdamW(part, lr=LR) for part in halves(model))
    broken_off(model, batch)
    assert model.lm_head.weight.grad is not None
    with pytest.raises(tierflow.UsageError, match="gradients are incomplete"):
        rest.step()
    first.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    model(**batch).loss.backward()
    first.step()
    rest.step()


@breaks_off
def test_a_module_may_drop_what_is_left_of_a_broken_off_backward(model, batch, broken_off):
    opt, before = tierflow.optim.AdamW(model.parameters(), lr=LR), masters(model)
    broken_off(model, batch)
    model.zero_grad()
    model(**batch).loss.backward()
    opt.step()
    assert not torch.equal(masters(model)[UP], before[UP])


def test_an_optimizer_that_is_gone_leaves_no_gradient_lost(batch, model):
    ups = [p for name, p in model.named_parameters() if "up_proj" in name]
    rest = [p for name, p in model.named_parameters() if "up_proj" not in name]
    first, second = tierflow.optim.AdamW(ups, lr=LR), tierflow.optim.AdamW(rest, lr=LR)
    model(**batch).loss.backward()
    first.step()
    del second
    first.zero_grad()
    model(**batch).loss.backward()
    tierflow.optim.AdamW(rest, lr=LR).step()


@pytest.mark.parametrize("own, other", [(UP, "lm_head.weight"), ("lm_head.weight", UP)])
def test_one_gradient_that_is_not_finite_skips_what_streams_and_what_does_not(own, other, model, batch, caplog):
    model.lm_head = torch.nn.Linear(64, 160, bias=False).bfloat16()  # an ordinary module
    opt = tierflow.optim.AdamW([model.get_parameter(UP), model.lm_head.weight], lr=LR)
    values = lambda: {name: model.get_parameter(name).detach().float() + 0 for name in (own, other)}  # noqa: E731
    before = values()
    for skips in True, False:
        model(**batch).loss.backward()
        if skips:
            model.get_parameter(own).grad.mul_(float("inf"))
        opt.step()
        opt.zero_grad()
        assert all(torch.equal(value, before[name]) == skips for name, value in values().items())
    assert tierflow.stats(model)["skipped_steps"] == 1 and caplog.text.count("the step is skipped whole") == 1
    assert opt.state[model.get_parameter(UP)]["step"] == opt.state[model.lm_head.weight]["step"] == 1


@pytest.mark.parametrize("clip", [1.0, None])
def test_adapters_skip_a_step_as_well(clip, model, batch):
    peft = pytest.importorskip("peft")
    tuned = peft.get_peft_model(model.requires_grad_(False), peft.LoraConfig(r=4, target_modules=["q_proj"]))
    trained = [p for p in tuned.parameters() if p.requires_grad]
    before = [p.detach().clone() for p in trained]
    trainer = tierflow.Trainer(tuned, tierflow.optim.AdamW(trained, lr=LR), clip=clip)
    hook = model.model.layers[2].register_forward_hook(lambda module, args, out: out * float("inf"))
    assert trainer.step([batch]).skipped and tierflow.stats(tuned)["skipped_steps"] == 1
    hook.remove()
    assert all(torch.equal(p, was) for p, was in zip(trained, before, strict=True))
    assert not trainer.step([batch]).skipped and tierflow.stats(tuned)["skipped_steps"] == 1
    assert any(not torch.equal(p, was) for p, was in zip(trained, before, strict=True))
