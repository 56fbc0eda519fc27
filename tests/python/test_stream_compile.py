"""Streamed models in code that torch.compile() makes: turns run as they are, and what is around them and inside of them is compiled."""

import pytest
import safetensors.torch
from streaming import LR, batches, make, roomy, scarce, tierflow, torch, transformers

BACKEND = "eager"  # dynamo's own work, and the bits of code that is not compiled


def llama():
    """With attention that has a mask in any case: transformers leaves masks out only where nothing is compiled, and torch's kernels go by that."""
    model = make("llama")
    model.set_attn_implementation("eager")
    return model


def whole(model):
    return torch.compile(model, backend=BACKEND)


def in_place(model):
    model.compile(backend=BACKEND)
    return model


def each_layer(model):
    for layer in model.model.layers:
        layer.compile(backend=BACKEND)
    return model


def inside_of_turns(model):
    for layer in model.model.layers:
        layer.mlp.compile(backend=BACKEND)
    return model


def losses(plan, compiled=lambda model: model, before=lambda model: model):
    torch._dynamo.reset()
    model = tierflow.wrap(before(llama()), plan).train()
    called, optimizer = compiled(model), tierflow.optim.AdamW(model.parameters(), lr=LR)
    found = []
    for batch in batches("llama", 3):
        loss = called(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    ids = batches("llama", 1, rows=1)[0]["input_ids"][:, :5]
    text = model.eval().generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)[0].tolist()
    tierflow.close(model)
    return found, text


@pytest.mark.parametrize("compiled", [whole, in_place, each_layer, inside_of_turns])
def test_a_compiled_model_computes_what_it_does_otherwise(tmp_path, compiled):
    assert losses(scarce(tmp_path / "store"), compiled) == losses(roomy())


def test_modules_that_were_compiled_before_stream_as_others_do():
    assert losses(roomy(), before=inside_of_turns) == losses(roomy())


def test_a_trainer_may_compile(tmp_path):
    def trained(**options):
        torch._dynamo.reset()
        model = tierflow.wrap(llama(), roomy())
        arguments = transformers.TrainingArguments(
            tmp_path, per_device_train_batch_size=2, max_steps=3, learning_rate=LR, report_to=[], save_strategy="no", logging_steps=1, use_cpu=True, disable_tqdm=True, **options
        )
        rows = [{name: values[0] for name, values in batch.items()} for batch in batches("llama", 8, rows=1)]
        trainer = transformers.Trainer(model, arguments, train_dataset=rows, optimizers=(tierflow.optim.AdamW(model.parameters(), lr=LR), None))
        trainer.train()
        tierflow.close(model)
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    assert trained(torch_compile=True, torch_compile_backend=BACKEND) == trained()


def test_names_are_those_of_the_model_that_was_compiled(tmp_path):
    """And a compiled model may be wrapped."""
    torch._dynamo.reset()
    model = whole(llama())
    names = [name.removeprefix("_orig_mod.") for name, _ in model.named_parameters()]
    assert tierflow.wrap(model, roomy()) is model
    optimizer = tierflow.optim.AdamW(model.parameters(), lr=LR)
    tierflow.save(model, tmp_path / "weights")
    assert sorted(safetensors.torch.load_file(tmp_path / "weights" / "model.safetensors")) == sorted(names)
    for saved in model, model._orig_mod:
        tierflow.save_checkpoint(saved, optimizer, tmp_path / "checkpoint")
        for loaded in model, model._orig_mod:
            tierflow.load_checkpoint(loaded, optimizer, tmp_path / "checkpoint")
    tierflow.close(model)


def test_a_run_goes_on_whether_it_is_compiled_or_not(tmp_path):
    budget = tierflow.Budget(device="64MiB", host="128MiB", storage=[tmp_path], durable=True)
    for done, compiled in enumerate([whole, lambda model: model, whole]):
        torch._dynamo.reset()
        model = tierflow.wrap(llama(), tierflow.Plan(budget, allow_any_filesystem=True))
        called, optimizer = compiled(model), tierflow.optim.AdamW(model.parameters(), lr=LR)
        assert tierflow.resume(called, optimizer) == done
        called(**batches("llama", 1)[0]).loss.backward()
        optimizer.step()
        tierflow.close(called)


def test_a_trace_is_refused():
    model = tierflow.wrap(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)), roomy())
    with pytest.raises(tierflow.Error, match="torch.jit.trace of a streamed model"):
        torch.jit.trace(model, torch.zeros(2, 8, dtype=torch.bfloat16))
    tierflow.close(model)
