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


def operands(heads=4, kv_heads=2, queries=9, keys=9, **changes):
    generator = torch.Generator().manual_seed(7)
    made = [torch.randn(2, count, length, 16, generator=generator).bfloat16() for count, length in ((heads, queries), (kv_heads, keys), (kv_heads, keys))]
    module = torch.nn.Module()
    module.is_causal, module.num_key_value_groups = changes.pop("causal", True), heads // kv_heads
    of, mask = changes.pop("of", lambda tensor: tensor), changes.pop("mask", None)
    return (module, *map(of, made), mask), changes


NOT_COVERED = {
    "dropout": operands(dropout=0.5),
    "another scale": operands(scaling=0.1),
    "one query behind a cache": operands(queries=1),
    "one token": operands(queries=1, keys=1),
    "all tokens see each other": operands(is_causal=False),
    "all tokens of this module do": operands(causal=False),
    "fp32": operands(of=lambda tensor: tensor.float()),
    "transposed": operands(of=lambda tensor: tensor.transpose(2, 3).contiguous().transpose(2, 3)),
    "a mask": operands(mask=torch.ones(2, 1, 9, 9, dtype=torch.bool).tril(-1)),
}


@pytest.mark.parametrize("case", [*NOT_COVERED, "causal"])
def test_a_call_that_it_does_not_cover_is_sdpas_to_the_bit(case, monkeypatch):
    from tierflow.attention import attention
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    native = tierflow._native.attention
    calls = []
    monkeypatch.setattr("tierflow.attention._native", type("Counted", (), {"attention": lambda *given: calls.append(1) or native(*given)}))
    given, how = NOT_COVERED.get(case) or operands(scaling=16**-0.5)
    found, expected = [], []
    for into, compute in (found, attention), (expected, sdpa_attention_forward):
        torch.manual_seed(3)
        into.append(compute(*given, **how)[0])
    assert len(calls) == (case == "causal")
    assert found[0].shape == expected[0].shape and found[0].dtype == expected[0].dtype
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=0.02 if case == "causal" else 0, equal_nan=True)


@pytest.mark.parametrize("name", ["position_bias", "softcap", "cache"])
def test_what_changes_the_scores_goes_on_to_sdpa(name, monkeypatch):
    from tierflow.attention import attention

    seen = []
    monkeypatch.setattr("tierflow.attention.sdpa_attention_forward", lambda *given, **how: seen.append(how[name]) or (None, None))
    given, how = operands()
    attention(*given, **how, **{name: 30.0})
    assert seen == [30.0]
