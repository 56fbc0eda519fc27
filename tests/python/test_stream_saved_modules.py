"""PEFT's modules_to_save over a streamed base: copies in memory, trained with the bits of a resident model; and what cannot be copied."""

import copy

import pytest
from streaming import batches, frozen, roomy, tierflow, torch, transformers
from test_stream_adapters import adapted, over_each_base, trained
from test_stream_adapters import folder as folder  # a fixture

peft = pytest.importorskip("peft")


@pytest.mark.parametrize(
    "saved, precision", [(["embed_tokens", "lm_head"], "nf4"), (["norm"], "bf16")], ids=["table and head", "norms, those in layers too"]
)
def test_saved_modules_are_trained_with_the_bits_of_a_resident_model(saved, precision, folder, tmp_path):
    before = (folder / "model.safetensors").read_bytes()
    _, values = over_each_base(tmp_path, folder, precision, {"modules_to_save": saved})
    names = {name for name in values if "modules_to_save" in name}
    assert len(names) == 2 if "lm_head" in saved else len(names) == 1 + 2 * 3
    assert any("lora_A" in name for name in values) and (folder / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize("fused", [False, True])
def test_a_folder_of_saved_modules_is_read_by_a_resident_model(fused, folder, tmp_path):
    plan = frozen(tmp_path, "bf16")
    if fused:
        plan.budget = tierflow.Budget(device="1MiB", host="64KiB", storage=[tmp_path / "store"])
    model = tierflow.load(folder, plan, fused_layers=fused)
    original = {name: value.clone() for name, value in model.state_dict().items()}
    tuned = adapted(model, {"modules_to_save": ["embed_tokens", "lm_head"]})
    optimizer = torch.optim.AdamW([p for p in tuned.parameters() if p.requires_grad], lr=1e-2)
    for batch in batches("llama", 2):
        tuned(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    tuned.save_pretrained(tmp_path / "adapter")
    with pytest.raises(tierflow.UsageError, match="an adapter is inside of the model"):
        model.save_pretrained(tmp_path / "whole")
    batch = batches("llama", 1)[0]
    resident = peft.PeftModel.from_pretrained(transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16), tmp_path / "adapter")
    with torch.no_grad():
        ours, theirs = (each.eval()(**batch).logits for each in (tuned, resident))
    assert torch.allclose(ours, theirs, rtol=0.05, atol=0.05) if fused else torch.equal(ours, theirs)
    head = tuned.base_model.model.lm_head
    assert not torch.equal(head.modules_to_save["default"].weight, original["lm_head.weight"])
    assert torch.equal(head.original_module.weight + 0, original["lm_head.weight"])
    tierflow.close(model)


def test_the_layer_major_step_trains_saved_modules(folder, tmp_path):
    results = []
    for layer_major in True, False:
        model = tierflow.load(folder, roomy(trainable=False))
        tuned = adapted(model, {"modules_to_save": ["lm_head"]})
        optimizer = torch.optim.AdamW([p for p in tuned.parameters() if p.requires_grad], lr=1e-2)
        micro_batches = batches("llama", 2)
        if layer_major:
            tierflow.Trainer(tuned, optimizer, clip=None).step(micro_batches)
        else:
            for batch in micro_batches:
                (tuned(**batch).loss / len(micro_batches)).backward()
            optimizer.step()
        results.append({name: p.detach().clone() for name, p in tuned.named_parameters() if p.requires_grad})
        tierflow.close(model)
    assert results[0].keys() == results[1].keys() and any("modules_to_save" in name for name in results[0])
    assert all(torch.equal(value, results[1][name]) for name, value in results[0].items())


def test_a_copy_of_a_module_is_an_ordinary_one(folder):
    model = tierflow.load(folder, roomy())
    head = copy.deepcopy(model.lm_head)
    assert type(head) is torch.nn.Linear and type(head.weight) is torch.nn.Parameter and torch.equal(head.weight, model.lm_head.weight + 0)
    x = torch.randn(2, 64).bfloat16()
    assert torch.equal(head(x), model.lm_head(x))
    head.load_state_dict({"weight": torch.zeros_like(head.weight)}, assign=True)
    assert head.float().weight.dtype == torch.float32 and not head.weight.any()
    copy.deepcopy(copy.deepcopy(head))
    for part in model, model.model, model.model.layers:
        with pytest.raises(tierflow.UsageError, match="cannot be copied"):
            copy.deepcopy(part)
    tierflow.close(model)


def test_pefts_tied_head_is_trained_once(tmp_path):
    torch.manual_seed(11)
    config = transformers.LlamaConfig(vocab_size=160, hidden_size=64, intermediate_size=112, num_hidden_layers=2, num_attention_heads=4, tie_word_embeddings=True)
    transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(tmp_path / "model")
    options = {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}
    model = tierflow.load(tmp_path / "model", roomy(trainable=False))
    streamed = trained(model, options)
    resident = trained(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.bfloat16), options)
    assert streamed[0] == resident[0] and all(torch.equal(value, resident[1][name]) for name, value in streamed[1].items())
    tierflow.close(model)
