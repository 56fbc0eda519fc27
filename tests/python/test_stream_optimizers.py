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
