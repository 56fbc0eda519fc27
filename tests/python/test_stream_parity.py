"""Streamed models against plain ones: the same losses, gradients and weights, bit for bit, wherever the state is."""

import pytest
from streaming import MODELS, TEXT, VOCAB, PlainLoop, batches, make, masters, roomy, scarce, tierflow, torch, train, transformers

STEPS, PASSES, LR = 3, 2, 1e-3

LATENT = dict(TEXT, num_key_value_heads=4, moe_intermediate_size=32, q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16,
              n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1, first_k_dense_replace=1)  # fmt: skip
DELTA = dict(TEXT, num_key_value_heads=2, head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16,
             num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=32,
             layer_types=["linear_attention", "full_attention", "linear_attention"])  # fmt: skip
STATES = dict(vocab_size=VOCAB, hidden_size=64, num_hidden_layers=3, state_size=16, initializer_range=0.08, pad_token_id=None, bos_token_id=1, eos_token_id=2)
# What the program refuses by name and leaves to this package: latent attention, gated delta rules, state spaces.
LEFT_TO_PYTHON = {
    "deepseek_v2": lambda: transformers.DeepseekV2ForCausalLM(transformers.DeepseekV2Config(**LATENT)),
    "deepseek_v3": lambda: transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**LATENT, n_group=2, topk_group=1)),
    "qwen3_next": lambda: transformers.Qwen3NextForCausalLM(transformers.Qwen3NextConfig(**DELTA)),
    "mamba": lambda: transformers.MambaForCausalLM(transformers.MambaConfig(**STATES)),
    "mamba2": lambda: transformers.Mamba2ForCausalLM(transformers.Mamba2Config(**STATES, num_heads=8, head_dim=16, n_groups=2, chunk_size=8)),
}

# Llama 4's experts and its rotary tables of complex numbers.
LOADED = {
    **LEFT_TO_PYTHON,
    "llama4": lambda: transformers.Llama4ForCausalLM(transformers.Llama4TextConfig(**TEXT, num_key_value_heads=2, head_dim=16, intermediate_size_mlp=48, num_local_experts=4,
                                                                                   attention_chunk_size=10, no_rope_layer_interval=2, moe_layers=[0, 1])),
}  # fmt: skip


@pytest.mark.parametrize("family", list(MODELS))
def test_free_loop_has_the_bits_of_the_plain_loop(family, tmp_path):
    plain = make(family)
    loop = PlainLoop(plain, LR)
    streamed = tierflow.wrap(make(family), scarce(tmp_path / "store"))
    opt = tierflow.optim.AdamW(streamed.parameters(), lr=LR)
    data = batches(family, STEPS * PASSES)
    for step in range(STEPS):
        for batch in data[step * PASSES : (step + 1) * PASSES]:
            expected, loss = plain(**batch).loss, streamed(**batch).loss
            assert loss.item() == expected.item()
            loop.backward(expected / PASSES)
            (loss / PASSES).backward()
        if step == 0:
            for name, p in streamed.named_parameters():
                assert (p.grad is None) == (name not in loop.sums), name
                if p.grad is not None:
                    assert torch.equal(p.grad + 0, loop.sums[name].bfloat16()), name
        loop.step()
        opt.step()
        opt.zero_grad()
    for name, master in masters(streamed).items():
        assert torch.equal(master.flatten(), loop.master(name)), name
    assert tierflow.stats(streamed)["departures"] == 0
    tierflow.close(streamed)


@pytest.mark.parametrize("family", list(LOADED))
def test_a_folder_streams_its_own_modules_whatever_they_compute(family, tmp_path):
    torch.manual_seed(11)
    LOADED[family]().bfloat16().save_pretrained(tmp_path / "model")
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.bfloat16).train()
    (tmp_path / "store").mkdir()
    budget = tierflow.Budget(device="2MiB", host="3MiB", storage=[tmp_path / "store"], activations=0.0)
    extra = {"chaos_seed": 5, "chunk_elements": 65536}
    streamed = tierflow.load(tmp_path / "model", tierflow.Plan(budget, allow_any_filesystem=True, precision="fp32-master+adam32", extra=extra)).train()
    loop, opt = PlainLoop(plain, LR), tierflow.optim.AdamW(streamed.parameters(), lr=LR)
    for batch in batches("llama", STEPS):
        del batch["attention_mask"]
        expected, loss = plain(**batch).loss, streamed(**batch).loss
        assert loss.item() == expected.item()
        loop.backward(expected)
        loss.backward()
        loop.step()
        opt.step()
        opt.zero_grad()
    streams = masters(streamed)
    assert set(streams) == set(loop.state)
    for name, master in streams.items():
        assert torch.equal(master.flatten(), loop.master(name)), name
    tierflow.close(streamed)


@pytest.mark.parametrize("family", ["llama", "gpt2", "vit"])
@pytest.mark.parametrize("precision", ["fp32-master+adam32", "fp32-master+adam8"])
def test_layer_major_has_the_bits_of_the_free_loop(family, precision, tmp_path):
    runs = []
    for trainer in (False, True):
        for plan in (roomy(precision=precision), scarce(tmp_path / "store", precision=precision)):
            model = tierflow.wrap(make(family), plan)
            runs.append((train(model, family, passes=3, trainer=trainer, clip=1.0), masters(model)))
            tierflow.close(model)
    for seen, weights in runs[1:]:
        assert seen == runs[0][0]
        assert all(torch.equal(weights[name], master) for name, master in runs[0][1].items())


def test_tied_weights(tmp_path):
    import transformers
    from streaming import GROUPED

    torch.manual_seed(2)
    config = transformers.LlamaConfig(**GROUPED, tie_word_embeddings=True)
    transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(tmp_path / "model")
    runs = []
    for trainer in (False, True):
        model = tierflow.load(tmp_path / "model", scarce(tmp_path / "store")).train()
        assert model.lm_head.weight is model.model.embed_tokens.weight
        runs.append((train(model, "llama", trainer=trainer, clip=1.0), masters(model)))
        tierflow.close(model)
    plain = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.bfloat16).train()
    expected = train(plain, "llama", opt=torch.optim.AdamW(plain.parameters(), lr=LR, weight_decay=0.0), clip=1.0)
    for seen, _ in runs:  # contributions of the two uses add up in another order each time
        torch.testing.assert_close(torch.tensor(seen), torch.tensor(expected), rtol=2e-2, atol=2e-2)
    assert runs[0][0][0][0] == runs[1][0][0][0] == expected[0][0]


def test_tied_weights_and_dropout_have_the_same_bits_in_both_orders_with_one_micro_batch():
    """With more, contributions of tied weights add up, and random numbers are drawn, in another order."""
    import transformers
    from streaming import GPT2

    runs = []
    for trainer in (False, True):
        torch.manual_seed(4)
        config = transformers.GPT2Config(**{**GPT2, "resid_pdrop": 0.1, "attn_pdrop": 0.1, "embd_pdrop": 0.1})
        model = tierflow.wrap(transformers.GPT2LMHeadModel(config).bfloat16().train(), roomy())
        runs.append((train(model, "gpt2", steps=4, passes=1, trainer=trainer, clip=1.0), masters(model)))
        tierflow.close(model)
    assert runs[0][0] == runs[1][0]
    assert all(torch.equal(master, runs[1][1][name]) for name, master in runs[0][1].items())


def with_penalty(model, batch):
    return model(**batch).loss + 1e-2 * sum(p.float().square().sum() for p in model.parameters())


def with_another_pass(model, batch):
    """Before the first micro-batch's own: it comes to each module after the others."""
    with torch.no_grad():
        wanted = model(**batch).logits.float().roll(1, 0) if batch["labels"].float().mean() > 90 else 0.0
    return (model(**batch).logits.float() - wanted).square().mean()


@pytest.mark.parametrize("loss", [with_penalty, with_another_pass])
def test_gradients_that_come_at_several_times_are_rounded_once(loss):
    data = batches("llama", 3)
    data[0] = {**data[0], "labels": torch.full_like(data[0]["labels"], 100)}
    loop, model = (tierflow.wrap(make("llama"), roomy()) for _ in range(2))
    trainer = tierflow.Trainer(model, tierflow.optim.AdamW(model.parameters()), loss=loss)
    for _ in range(2):  # the second knows which module comes last
        for batch in data:
            (loss(loop, batch) / len(data)).backward()
        trainer.backward(data)
        assert all(torch.equal(p.grad + 0, loop.get_parameter(name).grad + 0) for name, p in model.named_parameters())
        loop.zero_grad(), trainer.opt.zero_grad()


def test_layer_major_fetches_weights_once_a_direction():
    """Bytes that go up in a step do not grow with the micro-batches; in the free loop they do."""
    uploads = {}
    for trainer in (True, False):
        for passes in (1, 4):
            plan = roomy()
            plan.budget = tierflow.Budget(device="250KiB", host="128MiB", activations=0.0)  # too small to keep layers
            model = tierflow.wrap(make("llama"), plan)
            opt = tierflow.optim.AdamW(model.parameters(), lr=LR)
            layer_major = tierflow.Trainer(model, opt)
            counts = []
            for _ in range(5):
                data = batches("llama", passes)
                if trainer:
                    layer_major.step(data)
                else:
                    for batch in data:
                        model(**batch).loss.backward()
                    opt.step()
                    opt.zero_grad()
                counts.append(tierflow.stats(model)["lanes"]["upload"]["bytes"])
            # Over several steps: what is fetched ahead belongs to the step before or after it as the lanes happen to run.
            uploads[trainer, passes] = (counts[-1] - counts[0]) / (len(counts) - 1)
    print(uploads)
    assert uploads[True, 4] <= 1.2 * uploads[True, 1]
    assert uploads[False, 4] >= 2 * uploads[False, 1]


def test_follows_torch_adamw():
    """To rounding: torch's own AdamW on a plain fp32 master."""
    family = "llama"
    master = make(family).float()
    opt = torch.optim.AdamW(master.parameters(), lr=LR, weight_decay=0.1)
    streamed = tierflow.wrap(make(family), roomy())
    ours = tierflow.optim.AdamW(streamed.parameters(), lr=LR, weight_decay=0.1)
    for batch in batches(family, 6):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            master(**batch).loss.backward()
        streamed(**batch).loss.backward()
        for o in (opt, ours):
            o.step()
            o.zero_grad()
    for name, p in master.named_parameters():
        moved = masters(streamed)[name] - make(family).get_parameter(name).float()
        expected = p.detach() - make(family).get_parameter(name).float()
        assert torch.nn.functional.cosine_similarity(moved.flatten(), expected.flatten(), dim=0) > 0.9, name
        assert 0.9 < moved.norm() / expected.norm() < 1.1, name
