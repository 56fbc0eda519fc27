"""Streamed models against plain ones: the same losses, gradients and weights, bit for bit, wherever the state is."""

import pytest
from streaming import MODELS, PlainLoop, batches, make, masters, roomy, scarce, tierflow, torch, train

STEPS, PASSES, LR = 3, 2, 1e-3


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
