"""attn_implementation="tierflow": the attention of the program under transformers' models."""

import pytest
from streaming import TEXT, batches, make, roomy, scarce, tierflow, torch, train, transformers


@pytest.fixture(autouse=True)
def registered():
    import tierflow.hf  # noqa: F401


def gradients(implementation, batch):
    model = make("llama")
    model.set_attn_implementation(implementation)
    loss = model(**batch).loss
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}


def test_agrees_with_sdpa():
    batch = batches("llama", 1)[0]
    (loss, ours), (expected, theirs) = gradients("tierflow", batch), gradients("sdpa", batch)
    assert abs(loss - expected) < 1e-2
    for name, gradient in theirs.items():
        assert torch.nn.functional.cosine_similarity(ours[name].float().flatten(), gradient.float().flatten(), dim=0) > 0.999, name


def test_is_used_where_it_applies_and_leaves_the_rest_to_sdpa(monkeypatch):
    calls = []
    monkeypatch.setattr("tierflow.attention._native", type("Counted", (), {"attention": lambda *a: calls.append(1) or tierflow._native.attention(*a)}))
    batch = batches("llama", 1)[0]
    gradients("tierflow", batch)
    assert len(calls) == TEXT["num_hidden_layers"]
    padded = {**batch, "attention_mask": batch["attention_mask"].clone()}
    padded["attention_mask"][0, :5] = 0
    assert gradients("tierflow", padded)[0] == gradients("sdpa", padded)[0]
    windowed = make("mistral")
    windowed.set_attn_implementation("tierflow")
    assert windowed(**batch).loss.item() == make("mistral")(**batch).loss.item()
    single = make("llama").float()
    single.set_attn_implementation("tierflow")
    assert single(**batch).loss.item() == make("llama").float()(**batch).loss.item()
    assert len(calls) == TEXT["num_hidden_layers"]


def test_streamed_runs_have_the_bits_of_resident_ones(tmp_path):
    make("llama").save_pretrained(tmp_path / "model")
    runs = []
    for trainer, plan in ((False, roomy()), (False, scarce(tmp_path / "store")), (True, scarce(tmp_path / "store"))):
        model = tierflow.load(tmp_path / "model", plan, attn_implementation="tierflow").train()
        first = model(**batches("llama", 1)[0]).loss.item()
        runs.append(train(model, "llama", trainer=trainer, clip=1.0))
        tokens = model.generate(batches("llama", 1)[0]["input_ids"], max_new_tokens=4, do_sample=False)
        runs[-1].append(tokens.tolist())
        model.save_pretrained(tmp_path / "out")
        tierflow.close(model)
    assert runs[0] == runs[1] == runs[2]
    plain = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.bfloat16, attn_implementation="tierflow").train()
    assert plain(**batches("llama", 1)[0]).loss.item() == first
    assert "tierflow" not in (tmp_path / "out" / "config.json").read_text()
