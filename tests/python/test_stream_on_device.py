"""What a streamed model computes on the device that is there: on the CPU always, and on a card where torch finds one (`make test-gpu`)."""

import pytest
from streaming import LENGTH, LR, VOCAB, batches, make, masters, tierflow, torch, train

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"))]
pytestmark = pytest.mark.parametrize("device", DEVICES)


@pytest.fixture(autouse=True)
def deterministic(device):
    """As far as torch can: kernels of modules' own code add up in one order."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def roomy(device, **options):
    budget = tierflow.Budget(device="1GiB", host="1GiB")
    return tierflow.Plan(budget, device=device, **{"precision": "fp32-master+adam32", **options})


def scarce(device, folder):
    """Weights and state come from storage, a chunk at a time. On a card torch's allocator needs room of its own."""
    folder.mkdir(exist_ok=True)
    budget = tierflow.Budget(device="600KiB" if device == "cpu" else "64MiB", host="1MiB", storage=[folder], activations=0.0 if device == "cpu" else 0.9)
    return tierflow.Plan(budget, device=device, precision="fp32-master+adam32", allow_any_filesystem=True, extra={"chunk_elements": 65536})


def on(device, given):
    return [{name: value.to(device) for name, value in batch.items()} for batch in given]


def plain(family, device):
    return make(family).to(torch.bfloat16).to(device).train()


def close(one, other):
    one, other = one.float().flatten(), other.float().flatten()
    return torch.nn.functional.cosine_similarity(one, other, dim=0) > 0.998 and abs(one.norm() / other.norm() - 1) < 0.03


def as_plain(family, device, backward):
    """backward(model) has the loss and the gradients of the same model in torch alone."""
    reference, streamed = plain(family, device), tierflow.wrap(make(family), roomy(device)).train()
    expected, found = backward(reference), backward(streamed)
    assert found == pytest.approx(expected, rel=2e-3)
    for name, p in reference.named_parameters():
        if p.grad is not None and p.grad.norm() > 0:
            assert close(streamed.get_parameter(name).grad + 0, p.grad), name
    tierflow.close(streamed)


@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral"])
def test_gradients_are_those_of_torch(device, family):
    def backward(model):
        total = 0.0
        for batch in on(device, batches(family, 2)):
            loss = model(**batch).loss
            loss.backward()
            total += loss.item()
        return total

    as_plain(family, device, backward)


def test_a_hook_and_autocast_that_are_there_for_the_forward_alone(device):
    def backward(model):
        handle = model.model.layers[1].mlp.register_forward_hook(lambda _, args, out: 2 * out)
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = model(**on(device, batches("llama", 1))[0]).loss
        handle.remove()
        loss.backward()
        return loss.item()

    as_plain("llama", device, backward)


def test_dropout_draws_again_what_it_drew(device):
    def backward(model):
        for layer in model.model.layers:
            layer.mlp.register_forward_hook(lambda _, args, out: torch.nn.functional.dropout(out, 0.3))
        torch.manual_seed(5)
        loss = model(**on(device, batches("llama", 1))[0]).loss
        loss.backward()
        return loss.item()

    as_plain("llama", device, backward)


@pytest.mark.parametrize("fused", [False, True])
def test_the_same_bits_in_every_order_and_under_every_budget(device, fused, tmp_path, monkeypatch):
    given = batches
    monkeypatch.setattr("streaming.batches", lambda family, count: on(device, given(family, count)))
    runs = []
    for trainer in (False, True):
        for plan in (roomy(device), scarce(device, tmp_path / "store")):
            model = tierflow.wrap(make("llama"), plan, fused_layers=fused).train()
            runs.append((train(model, "llama", clip=1.0, trainer=trainer), masters(model)))
            tierflow.close(model)
    for seen, weights in runs[1:]:
        assert seen == runs[0][0] and all(torch.equal(value, runs[0][1][name]) for name, value in weights.items())


def test_adapters_over_a_quantised_base_train(device):
    peft = pytest.importorskip("peft")
    base = tierflow.wrap(make("llama"), roomy(device, trainable=False, base_precision="nf4-double"))
    model = peft.get_peft_model(base, peft.LoraConfig(r=8, target_modules="all-linear", lora_dropout=0.0))
    optimizer = tierflow.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=10 * LR)
    (batch,) = on(device, batches("llama", 1))
    seen = []
    for _ in range(8):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.item())
    assert seen[-1] < 0.9 * seen[0], seen
    tierflow.close(base)


def test_generates_what_torch_does(device):
    ids = torch.randint(3, VOCAB, (1, LENGTH), generator=torch.Generator().manual_seed(1)).to(device)
    found = []
    for model in (plain("llama", device).eval(), tierflow.wrap(make("llama"), roomy(device)).eval()):
        with torch.no_grad():
            found.append(model(input_ids=ids).logits.float().cpu())
        text = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
        assert text.shape == (1, LENGTH + 8)
    torch.testing.assert_close(found[1], found[0], rtol=0.05, atol=0.05)
    tierflow.close(model)
