"""Adapters are saved as PEFT and transformers save them, whether they were there before the model streamed or came after."""

import json

import pytest
from safetensors.torch import load_file
from streaming import batches, make, roomy, scarce, tierflow, torch

peft = pytest.importorskip("peft")
LORA = dict(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False)


def config(**others):
    return peft.LoraConfig(**LORA, **others)


def trained(model):
    """A step of it, on what trains."""
    opt = tierflow.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for batch in batches("llama", 2):
        model(**batch).loss.backward()
        opt.step()
        opt.zero_grad()
    return model.eval()


def logits(model):
    with torch.no_grad():
        return model(**batches("llama", 1)[0]).logits


def adapters(model):
    return {name[name.index("layers.") :]: p.detach() + 0 for name, p in model.named_parameters() if "lora_" in name}


def expect_same_values(found, model):
    wanted, found = adapters(model), adapters(found)
    assert wanted.keys() == found.keys() and len(wanted) == 12
    assert all(torch.equal(found[name].float(), value.float()) for name, value in wanted.items())


@pytest.mark.parametrize("plan", [roomy, scarce], ids=["roomy", "scarce"])
def test_adapters_that_stream_are_saved_as_pefts(plan, tmp_path):
    plan = roomy() if plan is roomy else scarce(tmp_path / "store")
    model = trained(tierflow.wrap(peft.get_peft_model(make("llama"), config(task_type="CAUSAL_LM"), autocast_adapter_dtype=False), plan))
    begun = adapters(peft.get_peft_model(make("llama"), config(), autocast_adapter_dtype=False))
    model.save_pretrained(tmp_path / "adapter")
    assert {path.name for path in (tmp_path / "adapter").iterdir()} == {"README.md", "adapter_config.json", "adapter_model.safetensors"}
    again = peft.PeftModel.from_pretrained(make("llama"), tmp_path / "adapter", autocast_adapter_dtype=False).eval()
    expect_same_values(again, model)
    assert torch.equal(logits(again), logits(model))
    assert not any(torch.equal(value, begun[name]) for name, value in adapters(model).items() if name in begun)


def test_adapters_that_stream_are_merged_and_several_are_saved(tmp_path):
    model = peft.get_peft_model(make("llama"), config(task_type="CAUSAL_LM"), autocast_adapter_dtype=False)
    model.add_adapter("other", config())
    model = tierflow.wrap(model, roomy())
    model.save_pretrained(tmp_path / "both")
    model.save_pretrained(tmp_path / "one", selected_adapters=["other"])
    assert (tmp_path / "both" / "other" / "adapter_model.safetensors").read_bytes() == (tmp_path / "one" / "other" / "adapter_model.safetensors").read_bytes()
    assert (tmp_path / "both" / "adapter_model.safetensors").exists() and not (tmp_path / "one" / "adapter_model.safetensors").exists()
    expected = logits(model)
    merged = model.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    again = make("llama")
    again.load_state_dict(load_file(tmp_path / "merged" / "model.safetensors"))
    assert torch.equal(logits(again), logits(merged)) and (logits(merged) - expected).norm() < 0.05 * expected.norm()


@pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
def test_an_adapter_that_transformers_adds_is_saved_as_its_own(first, tmp_path):
    model = make("llama")
    if first:
        model.add_adapter(config())
    model = tierflow.wrap(model, roomy(trainable=first))
    if not first:
        model.add_adapter(config())
    trained(model).save_pretrained(tmp_path / "adapter", is_main_process=True, state_dict=model.state_dict())
    plain = make("llama")
    plain.add_adapter(config())
    plain.save_pretrained(tmp_path / "theirs")
    assert {path.name for path in (tmp_path / "adapter").iterdir()} == {path.name for path in (tmp_path / "theirs").iterdir()}
    ours, theirs = (json.loads((tmp_path / folder / "adapter_config.json").read_text()) for folder in ("adapter", "theirs"))
    assert {name: sorted(value) if isinstance(value, list) else value for name, value in ours.items()} == {
        name: sorted(value) if isinstance(value, list) else value for name, value in theirs.items()
    }
    expect_same_values(peft.PeftModel.from_pretrained(make("llama"), tmp_path / "adapter"), model)


@pytest.mark.parametrize("target", ["embed_tokens", "lm_head"])
def test_adapters_of_an_embedding_or_a_head_say_how_they_are_saved(target, tmp_path):
    config = peft.LoraConfig(r=4, target_modules=[target], init_lora_weights=False)
    model = peft.get_peft_model(tierflow.wrap(make("llama"), roomy(trainable=False)), config).eval()
    with pytest.raises(tierflow.UsageError, match="save_embedding_layers=False"):
        model.save_pretrained(tmp_path / "adapter")
    model.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    again = peft.PeftModel.from_pretrained(make("llama"), tmp_path / "adapter").eval()
    assert torch.equal(logits(again), logits(model))
    begun = tierflow.wrap(peft.get_peft_model(make("llama"), config), roomy())
    begun.save_pretrained(tmp_path / "streamed")  # with the embedding, as PEFT does
    assert any(name.endswith(f"{target}.base_layer.weight") for name in load_file(tmp_path / "streamed" / "adapter_model.safetensors"))
