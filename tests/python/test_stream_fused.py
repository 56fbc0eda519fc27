"""fused_layers=True: layers and loss that the program computes in the place of transformers' own."""

import logging

import pytest
from streaming import DENSE, GROUPED, TEXT, batches, make, masters, roomy, scarce, tierflow, torch, train, transformers

FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "gpt2", "opt", *DENSE]
LAYERS = TEXT["num_hidden_layers"]


def fused(family="llama", plan=None, model=None):
    return tierflow.wrap(model or make(family), plan or roomy(), fused_layers=True)


@pytest.fixture
def counted(monkeypatch):
    """Decoder layers that were computed so, forward."""
    from tierflow import fused as code

    calls, forward = [], code._Decoder.forward
    monkeypatch.setattr(code._Decoder, "forward", lambda self, *args: calls.append(self.turn.name) or forward(self, *args))
    return calls


def close_to(a, b, cosine=0.998, norm=0.03):
    a, b = a.float().flatten(), b.float().flatten()
    return torch.nn.functional.cosine_similarity(a, b, dim=0) > cosine and abs(a.norm() / b.norm() - 1) < norm


@pytest.mark.parametrize("family", FAMILIES)
def test_follows_transformers_and_has_the_same_bits_in_every_order_and_under_every_budget(family, tmp_path, counted):
    plain = make(family)
    expected = plain(**batches(family, 1)[0])
    expected.loss.backward()
    model = fused(family)
    found = model(**batches(family, 1)[0])
    found.loss.backward()
    torch.testing.assert_close(found.logits, expected.logits, rtol=0.05, atol=0.05)
    assert abs(found.loss.item() - expected.loss.item()) < 3e-3
    for name, p in plain.named_parameters():
        grad = model.get_parameter(name).grad + 0
        if family == "opt" and name.endswith("k_proj.bias"):  # adds the same to all scores of a query: its gradient is rounding
            assert max(grad.norm(), p.grad.norm()) < 0.05 * plain.get_parameter(name.replace("k_proj", "q_proj")).grad.norm()
        else:
            assert close_to(grad, p.grad), name
    assert len(counted) == LAYERS and tierflow.stats(model)["departures"] == 0
    tierflow.close(model)

    often = dict(steps=4, passes=3) if family not in DENSE else dict(steps=3, passes=2)
    own = tierflow.wrap(make(family), roomy())
    expected = train(own, family, **often, clip=1.0)
    tierflow.close(own)
    runs = []
    for trainer in (False, True):
        for plan in (roomy(), scarce(tmp_path / "store")):
            model = fused(family, plan)
            runs.append((train(model, family, **often, trainer=trainer, clip=1.0), masters(model)))
            engine = tierflow.model.engine_of(model)
            assert engine.activations.kept == 0
            tierflow.close(model)
    torch.testing.assert_close(torch.tensor(runs[0][0]), torch.tensor(expected), rtol=1e-2, atol=1e-2)
    for seen, weights in runs[1:]:
        assert seen == runs[0][0]
        assert all(torch.equal(weights[name], master) for name, master in runs[0][1].items())


def test_the_config_of_all_layers_is_read_once(monkeypatch, counted):
    read, native = [], tierflow._native
    monkeypatch.setattr(native, "DecoderConfig", lambda text, make=native.DecoderConfig: read.append(text) or make(text))
    model = fused()
    model(**batches("llama", 1)[0]).loss.backward()
    assert len(read) == 1 and len(counted) == LAYERS > 1
    tierflow.close(model)


def test_every_dense_decoder_is_tested_here():
    """Of those that transformers has."""
    known = {name for name in tierflow._native.DecoderLayer.architectures() if hasattr(transformers, name)}
    tested = {type(make(family)).__name__ for family in FAMILIES}
    assert {name.removesuffix("ForCausalLM") for name in known - tested} == {"Ministral3"}


def test_biases_and_tied_weights():
    config = transformers.LlamaConfig(**GROUPED, attention_bias=True, mlp_bias=True, head_dim=24, tie_word_embeddings=True)

    def made():
        torch.manual_seed(5)
        model = transformers.LlamaForCausalLM(config).bfloat16().train()
        with torch.no_grad():
            for name, p in model.named_parameters():
                if p.dim() == 1:
                    p.add_(torch.randn_like(p) * 0.1)
        return model

    batch, plain, model = batches("llama", 1)[0], made(), fused(model=made())
    plain(**batch).loss.backward()
    model(**batch).loss.backward()
    for name, p in plain.named_parameters():
        assert close_to(model.get_parameter(name).grad + 0, p.grad), name
    tierflow.close(model)


def test_keeps_activations_within_their_share_and_computes_the_rest_again():
    batch = batches("llama", 1, rows=8)[0]

    def run(share):
        """Losses, layers that were kept in the last step, and what the rest took."""
        plan = roomy()
        plan.budget = tierflow.Budget(device="16MiB", host="64MiB", activations=share / (16 << 20))
        model = fused(plan=plan)
        activations = tierflow.model.engine_of(model).activations
        opt = tierflow.optim.AdamW(model.parameters(), lr=1e-3)
        losses = []
        for _ in range(3):
            loss = model(**batch).loss
            kept = activations.kept
            loss.backward()
            opt.step()
            opt.zero_grad()
            losses.append(loss.item())
            assert activations.kept == 0
        size = model._tierflow.turns[1].layer._layer.kept_bytes(batch["input_ids"].numel())
        memory = tierflow.stats(model)["memory"]
        assert not kept or memory["activations_peak"] <= memory["activations_share"] == int(share)
        tierflow.close(model)
        return losses, kept / size, activations.rest, size

    run(8 << 20)  # kernels that are compiled on their first use take memory as well
    expected, layers, rest, size = run(8 << 20)
    assert layers == LAYERS
    assert run(rest + 1.5 * size)[:2] == (expected, 1)
    assert run(rest - size)[:2] == (expected, 0)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_kept_takes_the_memory_that_was_counted(family):
    model = fused(family, model=make(family).train())
    layer, native = next(t.layer for t in model._tierflow.turns if isinstance(t.layer, tierflow.fused._Decoder)), tierflow._native
    batch = batches(family, 1, rows=64)[0]
    model(**batch).loss.backward()
    if not layer._layer.keeps:
        assert family == "gemma2"  # its softcap goes through torch's attention
        return tierflow.close(model)
    held = []

    def forward(weights, operands, keep):
        before = native.allocated_bytes()
        held.append(layer._layer.forward_keeping(weights, *layer._input(operands)))
        held.append(native.allocated_bytes() - before - held[0][0].nbytes)
        return held[0][0], None

    layer.forward = forward
    model(**batch)  # what is made once, on a first use, counts there
    held.clear()
    model(**batch)
    assert held[1] == pytest.approx(layer._layer.kept_bytes(batch["input_ids"].numel()), rel=0.03)
    tierflow.close(model)


def departs(model, batch, counted, caplog, why, layers=0):
    counted.clear()
    caplog.clear()
    with caplog.at_level(logging.WARNING, "tierflow"):
        for _ in range(2):
            loss = model(**batch).loss
            loss.backward()
    assert len(counted) == 2 * layers
    said = [record.message for record in caplog.records if record.message.startswith("fused_layers")]
    assert [why in message for message in said] == [True]
    return loss.item()


def test_a_call_that_it_does_not_cover_runs_the_modules_own_code(counted, caplog, monkeypatch):
    batch = batches("llama", 1)[0]
    padded = {**batch, "attention_mask": batch["attention_mask"].clone()}
    padded["attention_mask"][0, :5] = 0
    model, plain = fused(), make("llama")
    assert departs(model, padded, counted, caplog, "padding") == pytest.approx(plain(**padded).loss.item(), abs=1e-4)
    positions = {**batch, "position_ids": torch.arange(24).repeat(2, 1) % 12}  # beside a mask of ones: no documents to sdpa
    with pytest.raises(tierflow.UsageError, match="several documents"):
        model(**positions)
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    departs(model, batch, counted, caplog, "dropout")
    counted.clear()
    model.eval()(**batch)
    assert len(counted) == LAYERS
    model.train()
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.0
    hook = model.model.layers[1].mlp.register_forward_hook(lambda *_: None)
    departs(model, batch, counted, caplog, "hooks", LAYERS - 1)
    hook.remove()
    model.model.layers[0].mlp.act_fn = torch.nn.Tanh()
    departs(model, batch, counted, caplog, "mlp.act_fn", LAYERS - 1)
    tierflow.close(model)


def test_a_number_that_its_config_does_not_make_runs_its_own_code(counted, caplog):
    batch, model, plain = batches("llama", 1)[0], fused(), make("llama")
    for each in (model, plain):
        each.model.layers[1].input_layernorm.variance_epsilon = 0.5
    loss = departs(model, batch, counted, caplog, "input_layernorm.variance_epsilon is 0.5", LAYERS - 1)
    assert loss == pytest.approx(plain(**batch).loss.item(), abs=3e-3)
    tierflow.close(model)


def test_a_config_that_changes_is_read_again(counted):
    batch, model, plain = batches("mistral", 1)[0], fused("mistral"), make("mistral")
    with torch.no_grad():
        before = model(**batch).logits
        for each in (model, plain):
            each.config.sliding_window = 3
        after = model(**batch).logits
        torch.testing.assert_close(after, plain(**batch).logits, rtol=0.05, atol=0.05)
    assert len(counted) == 2 * LAYERS and (after - before).abs().max() > 0.1
    tierflow.close(model)


def flattened(count, seed=4):
    """What transformers' collator makes of documents of these lengths, in one row."""
    generator = torch.Generator().manual_seed(seed)
    documents = [{"input_ids": torch.randint(3, 160, (length,), generator=generator).tolist()} for length in (9, 1, 14)]
    return [transformers.DataCollatorWithFlattening()(documents[i % 3 :] + documents[: i % 3]) for i in range(count)]


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
def test_packed_documents_attend_to_themselves_alone(family, counted):
    batch, plain, model = flattened(1)[0], make(family), fused(family)
    assert set(batch) == {"input_ids", "labels", "position_ids"}
    expected = plain(**batch, use_cache=False)  # with a cache, transformers does not look at the positions
    expected.loss.backward()
    found = model(**batch)
    found.loss.backward()
    assert len(counted) == LAYERS and tierflow.stats(model)["departures"] == 0
    torch.testing.assert_close(found.logits, expected.logits, rtol=0.05, atol=0.05)
    for name, p in plain.named_parameters():
        assert close_to(model.get_parameter(name).grad + 0, p.grad), name
    begins = [i for i, position in enumerate(batch["position_ids"][0].tolist()) if position == 0] + [24]
    with torch.no_grad():
        alone = [model(batch["input_ids"][:, a:b]).logits for a, b in zip(begins, begins[1:])]
        torch.testing.assert_close(found.logits, torch.cat(alone, 1), rtol=0.05, atol=0.05)
        whole = model(batch["input_ids"]).logits
    assert (whole - found.logits)[:, begins[1] :].abs().max() > 0.1
    rows = torch.stack([torch.arange(24) % 12, torch.arange(24) % 7])  # rows of different documents
    two = {"input_ids": torch.cat([batch["input_ids"], batch["input_ids"].flip(1)]), "position_ids": rows}
    with torch.no_grad():
        torch.testing.assert_close(model(**two).logits, plain(**two, use_cache=False).logits, rtol=0.05, atol=0.05)
    assert tierflow.stats(model)["departures"] == 0
    tierflow.close(model)


def test_packed_documents_have_the_same_bits_in_every_order_and_under_every_budget(tmp_path, counted, monkeypatch):
    monkeypatch.setattr("streaming.batches", lambda family, count: flattened(count))
    runs = []
    for trainer in (False, True):
        for plan in (roomy(), scarce(tmp_path / "store")):
            model = fused("mistral", plan)
            runs.append((train(model, "mistral", trainer=trainer, clip=1.0), masters(model)))
            tierflow.close(model)
    assert len(counted) == 4 * 3 * 2 * LAYERS  # runs, steps, micro-batches
    for seen, weights in runs[1:]:
        assert seen == runs[0][0]
        assert all(torch.equal(weights[name], master) for name, master in runs[0][1].items())


def test_a_model_without_such_layers_says_so_and_still_has_the_head_and_the_loss(caplog):
    batch = batches("llama", 1)[0]

    def olmo():  # the first, whose norms have no weights
        torch.manual_seed(11)
        return transformers.OlmoForCausalLM(transformers.OlmoConfig(**TEXT)).bfloat16().train()

    with caplog.at_level(logging.WARNING, "tierflow"):
        model = fused(model=olmo())
    assert "run their own code" in caplog.text
    plain = olmo()
    loss = model(**batch).loss
    loss.backward()
    expected = plain(**batch).loss
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6) and "CrossEntropy" in str(loss.grad_fn)
    for name, p in plain.named_parameters():
        assert close_to(model.get_parameter(name).grad + 0, p.grad), name
    tierflow.close(model)


def test_attentions_are_there_when_asked_for(counted):
    batch, model, plain = batches("llama", 1)[0], fused(), make("llama")
    for each in (model, plain):
        each.set_attn_implementation("eager")
    attentions = model(**batch, output_attentions=True).attentions
    assert not counted and torch.equal(attentions[0], plain(**batch, output_attentions=True).attentions[0])
    states = model(**batch, output_hidden_states=True).hidden_states
    assert len(counted) == LAYERS and len(states) == LAYERS + 1  # eager's mask says no more than that attention is causal
    tierflow.close(model)


def test_adapters_that_are_more_than_lora_run_the_layers_own_code(counted, caplog):
    peft = pytest.importorskip("peft")
    batch = batches("llama", 1)[0]

    def adapted(model, layers):
        torch.manual_seed(9)
        return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj"], layers_to_transform=layers, init_lora_weights=False, use_dora=True))

    model = adapted(fused(plan=roomy(trainable=False)), [1])
    plain = adapted(make("llama"), [1])
    departs(model, batch, counted, caplog, "q_proj", LAYERS - 1)
    plain(**batch).loss.backward()
    name = next(name for name, p in plain.named_parameters() if p.grad is not None and "lora_A" in name)
    assert close_to(model.get_parameter(name).grad, 2 * plain.get_parameter(name).grad)
    tierflow.close(model)


def test_evaluation_generation_and_autocast(counted):
    batch, model, plain = batches("llama", 1)[0], fused().eval(), make("llama").eval()
    with torch.no_grad():
        torch.testing.assert_close(model(**batch).logits, plain(**batch).logits, rtol=0.05, atol=0.05)
    with torch.inference_mode():
        assert model(**batch).loss.item() == pytest.approx(plain(**batch).loss.item(), abs=3e-3)
    assert len(counted) == 2 * LAYERS
    ids = batch["input_ids"]
    assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), plain.generate(ids, max_new_tokens=4, do_sample=False))
    assert len(counted) == 2 * LAYERS
    losses = []
    for on in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=on):
            loss = model.train()(**batch).loss
        loss.backward()
        losses.append(loss.item())
    assert len(counted) == 4 * LAYERS and losses[0] == losses[1]
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):
        assert torch.equal(model(**batch).logits, plain(**batch).logits) and len(counted) == 4 * LAYERS
    tierflow.close(model)


def test_parameters_frozen_after_loading_get_no_gradient(counted):
    batch, model, plain = batches("llama", 1)[0], fused(), make("llama")
    for each in (model, plain):
        for name, p in each.named_parameters():
            p.requires_grad_("up_proj" in name or "input_layernorm" in name)
        each(**batch).loss.backward()
    assert len(counted) == LAYERS
    for name, p in plain.named_parameters():
        grad = model.get_parameter(name).grad
        assert (grad is None) == (p.grad is None) and (p.grad is None or close_to(grad + 0, p.grad)), name
    tierflow.close(model)


@pytest.mark.parametrize("given", ["labels", "ignored", "items", "shifted", "nothing counts"])
def test_the_loss_is_that_of_transformers(given):
    batch = {k: v.clone() for k, v in batches("llama", 1)[0].items()}
    if given == "ignored":
        batch["labels"][0, 3:9] = -100
    elif given == "items":
        batch["num_items_in_batch"] = torch.tensor(7)
    elif given == "shifted":
        batch["shift_labels"] = batch["labels"].roll(3, 1)
    elif given == "nothing counts":
        batch["labels"].fill_(-100)
    model, plain = fused(), make("llama")
    loss, expected = model(**batch).loss, plain(**batch).loss
    assert loss.dtype == expected.dtype
    loss.backward()
    expected.backward()
    if given == "nothing counts":
        assert loss.isnan() and expected.isnan()
    else:
        assert loss.item() == pytest.approx(expected.item(), rel=1e-3)
        assert close_to(model.lm_head.weight.grad + 0, plain.lm_head.weight.grad)
    tierflow.close(model)


def test_a_label_outside_of_the_vocabulary_raises():
    batch, model = batches("llama", 1)[0], fused()
    for label in (TEXT["vocab_size"], -7):
        batch["labels"] = torch.full_like(batch["labels"], label)
        with pytest.raises((IndexError, RuntimeError)):
            model(**batch)
    tierflow.close(model)


def test_embeddings_leave_out_padding_and_add_up_what_repeats():
    config = transformers.LlamaConfig(**{**GROUPED, "pad_token_id": 7})
    batch = batches("llama", 1)[0]
    batch["input_ids"][:, ::4] = 7
    batch["input_ids"][:, 1::4] = 9
    grads = []
    for wrapped in (False, True):
        torch.manual_seed(3)
        model = transformers.LlamaForCausalLM(config).bfloat16().train()
        model = fused(model=model) if wrapped else model
        model(**batch).loss.backward()
        grads.append(model.model.embed_tokens.weight.grad + 0)
    assert close_to(*grads) and not grads[1][7].any() and grads[1][9].any()
    tierflow.close(model)


def test_activations_on_a_card_are_kept_in_every_step(monkeypatch):
    """As many as in the second step, the first that knows what everything else takes; torch's allocator is played."""
    allocated, peak = 100, 100

    def allocate(size):
        nonlocal allocated, peak
        allocated += size
        peak = max(peak, allocated)

    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: allocated)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: peak)
    activations, size, kept = tierflow.activations.Activations(torch.device("cuda", 0), 120), 10, []
    allocate(500)  # the model's values, gone before it runs
    allocate(-500)
    for _ in range(4):
        activations.begin()
        held = 0
        for _ in range(32):
            if activations.has_room(size):
                allocate(size)
                activations.kept += size
                held += 1
        kept.append(held)
        for layer in range(32):
            keeps = layer < held
            allocate(size if keeps else 2 * size)
            allocate(-size if keeps else -2 * size)
            activations.look(within=size if keeps else 2 * size)
            if keeps:
                allocate(-size)
                activations.kept -= size
    assert kept == [0, 10, 10, 10]
    assert activations.peak == 110


@pytest.mark.parametrize("trainer", [False, True])
def test_the_layers_of_a_forward_look_at_its_rotary_tables_once(trainer, counted, monkeypatch):
    """And its backward does not: on a card the host waits for each look."""
    model = fused()
    optimizer, given = tierflow.optim.AdamW(model.parameters(), lr=1e-3), batches("llama", 2)
    looked, equal = [], torch.equal
    monkeypatch.setattr(torch, "equal", lambda a, b: looked.append(a.shape) or equal(a, b))
    if trainer:
        tierflow.Trainer(model, optimizer).step(given)
    else:
        for batch in given:
            model(**batch).loss.backward()
    assert len(counted) == LAYERS * len(given) and sum(len(shape) == 3 for shape in looked) == 2 * len(given)
    tierflow.close(model)
