"""train() and eval(), and PEFT's adapters, are each micro-batch's own in a layer-major step, as they are in a loop."""

import pytest
from stacks import inputs, stack
from streaming import batches, make, roomy, tierflow, torch


def as_its_mode_says(block, x):
    return x + torch.tanh(block.linear(x)) * (2.0 if block.training else 0.5)


def towards_itself(model, batch):
    """Of some micro-batches: how far the model in train mode is from the model in eval mode."""
    x, judged = batch
    if not judged:
        return model(x)
    model.eval()
    with torch.no_grad():
        reference = model(x)
    model.train()
    return (model(x) - reference).square()


def gradients(model):
    return {name: None if p.grad is None else p.grad + 0 for name, p in model.named_parameters()}


def in_both_orders(makes, loss, micro_batches, steps=2):
    """That gradients have the same bits in a loop and in the Trainer. Returns the Trainer's model."""
    loop, model = makes(), makes()
    trainer = tierflow.Trainer(model, tierflow.optim.AdamW([p for p in model.parameters() if p.requires_grad]), loss=loss)
    for _ in range(steps):  # the second knows which module comes last
        expected = []
        for batch in micro_batches:
            expected.append(loss(loop, batch))
            (expected[-1] / len(micro_batches)).backward()
        assert trainer.backward(micro_batches) == sum(each.item() for each in expected) / len(micro_batches)
        wanted, found = gradients(loop), gradients(model)
        assert all((found[name] is None) if grad is None else torch.equal(found[name], grad) for name, grad in wanted.items())
        loop.zero_grad(), trainer.opt.zero_grad()
        assert [m.training for m in model.modules()] == [m.training for m in loop.modules()]
        assert [p.requires_grad for p in model.parameters()] == [p.requires_grad for p in loop.parameters()]
    return model


@pytest.mark.parametrize("judged", [(True, False, False), (False, True, False), (False, False, True), (True, True, False)])
def test_a_micro_batch_that_goes_to_eval_mode_and_back_leaves_the_others_in_train_mode(judged):
    model = in_both_orders(lambda: tierflow.wrap(stack(as_its_mode_says), roomy()), towards_itself, list(zip(inputs(3), judged, strict=True)))
    assert all(m.training for m in model.modules())


def test_the_model_stays_in_the_modes_in_which_the_last_micro_batch_left_it():
    def loss(model, batch):
        found = model(batch[0])
        model.train(batch[1])
        return found

    trainer = tierflow.Trainer(model := tierflow.wrap(stack(as_its_mode_says), roomy()), tierflow.optim.AdamW(model.parameters()), loss=loss)
    for last in (False, True):
        trainer.step(list(zip(inputs(2), (not last, last), strict=True)))
        assert all(m.training is last for m in model.modules())


def adapted():
    peft = pytest.importorskip("peft")
    model = tierflow.wrap(make("llama"), roomy(trainable=False))
    torch.manual_seed(1)
    config = lambda: peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)  # noqa: E731
    model = peft.get_peft_model(model, config(), adapter_name="a")
    model.add_adapter("b", config())
    model.set_adapter("a")
    return model.train()


def without(model, batch):
    with torch.no_grad(), model.disable_adapter():
        return model(**batch).logits.float()


def of_another(model, batch):
    model.set_adapter("b")
    with torch.no_grad():
        found = model(**batch).logits.float()
    model.set_adapter("a")
    return found


@pytest.mark.parametrize("reference", [without, of_another])
@pytest.mark.parametrize("judged", [(True, False, False), (False, True, True)])
def test_a_micro_batch_that_switches_adapters_leaves_those_of_the_others(reference, judged):
    def loss(model, batch):
        batch = dict(batch)
        wanted = reference(model, batch) if batch.pop("judged") else 0.0
        return (model(**batch).logits.float() - wanted).square().mean()

    in_both_orders(adapted, loss, [{**batch, "judged": each} for batch, each in zip(batches("llama", 3), judged, strict=True)])


def test_an_evaluation_has_each_micro_batch_with_its_own_adapters():
    model = adapted().eval()
    functions = {"a": lambda given: model(**given).logits.float(), "none": lambda given: without(model, given), "b": lambda given: of_another(model, given)}
    (batch,) = batches("llama", 1)
    with torch.no_grad():
        expected = [function(batch) for function in functions.values()]
    trainer = tierflow.Trainer(model, tierflow.optim.AdamW([p for p in model.parameters() if p.requires_grad]))
    found = trainer.evaluate([dict(batch, which=name) for name in functions], lambda _, each: functions[each["which"]]({k: v for k, v in each.items() if k != "which"}))
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_after_a_step_that_failed_modes_and_adapters_are_as_before_it():
    model = adapted()

    def loss(model, batch):
        batch = dict(batch)
        fails = batch.pop("fails")
        with torch.no_grad(), model.disable_adapter():
            model.train(not fails)
            if fails:
                model.get_input_embeddings()(batch["input_ids"])
                raise RuntimeError("a mistake")
            return model(**batch).loss

    before = [(m.training, getattr(m, "_disable_adapters", None)) for m in model.modules()], [p.requires_grad for p in model.parameters()]
    trainer = tierflow.Trainer(model, tierflow.optim.AdamW([p for p in model.parameters() if p.requires_grad]), loss=loss)
    with pytest.raises(RuntimeError, match="a mistake"):
        trainer.step([{**batch, "fails": fails} for batch, fails in zip(batches("llama", 2), (False, True), strict=True)])
    assert before == ([(m.training, getattr(m, "_disable_adapters", None)) for m in model.modules()], [p.requires_grad for p in model.parameters()])
