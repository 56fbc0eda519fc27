"""What transformers records inside of streamed modules: the load-balancing loss of mixtures trains them as plain ones."""

import gc
import weakref

import pytest
from streaming import GROUPED, LR, PlainLoop, batches, masters, roomy, scarce, tierflow, torch, transformers

BALANCED = dict(GROUPED, output_router_logits=True, router_aux_loss_coef=3.0)
MIXTURES = {
    "mixtral": lambda: transformers.MixtralForCausalLM(transformers.MixtralConfig(**BALANCED, num_local_experts=4, num_experts_per_tok=2)),
    "qwen3_moe": lambda: transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(**BALANCED, head_dim=16, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=48, mlp_only_layers=[1])
    ),
    "granitemoe": lambda: transformers.GraniteMoeForCausalLM(transformers.GraniteMoeConfig(**BALANCED, num_local_experts=4, num_experts_per_tok=2)),
}


def made(family):
    torch.manual_seed(11)
    return MIXTURES[family]().bfloat16().train()


@pytest.mark.parametrize("family", MIXTURES)
@pytest.mark.parametrize("trainer", [False, True], ids=["loop", "trainer"])
def test_load_balancing_loss_has_the_bits_of_the_plain_loop(family, trainer, tmp_path):
    plan = scarce(tmp_path / "store")
    plan.budget = tierflow.Budget(device="2MiB", host="3MiB", storage=[tmp_path / "store"], activations=0.0)
    plain, streamed = made(family), tierflow.wrap(made(family), plan)
    loop, opt = PlainLoop(plain, LR), tierflow.optim.AdamW(streamed.parameters(), lr=LR)
    layer_major = tierflow.Trainer(streamed, opt, clip=None)
    data = batches("llama", 4)
    for batch in data:
        batch["attention_mask"][1, 17:] = 0
        batch["labels"] = batch["labels"].masked_fill(batch["attention_mask"] == 0, -100)
    for first, second in (data[:2], data[2:]):
        expected = 0.0
        for batch in (first, second):
            out = plain(**batch)
            assert out.aux_loss.requires_grad
            expected += out.loss.item() / 2
            loop.backward(out.loss / 2)
            if not trainer:
                found = streamed(**batch)
                assert found.loss.item() == out.loss.item() and found.aux_loss.item() == out.aux_loss.item()
                (found.loss / 2).backward()
        if trainer:
            assert layer_major.step([first, second]).loss == expected
        else:
            opt.step()
            opt.zero_grad()
        loop.step()
    for name, master in masters(streamed).items():
        assert torch.equal(master.flatten(), loop.master(name)), name
    tierflow.close(streamed)


def test_recorded_tensors_have_the_plain_ones_bits_and_go_with_their_graph():
    plain, streamed = made("mixtral"), tierflow.wrap(made("mixtral"), roomy())
    (batch,) = batches("llama", 1)
    expected, found = plain(**batch, output_hidden_states=True), streamed(**batch, output_hidden_states=True)
    for name in ("router_logits", "hidden_states"):
        assert len(found[name]) == len(expected[name]) > 0
        assert all(torch.equal(one, other) for one, other in zip(found[name], expected[name], strict=True))
    gone = weakref.ref(found.router_logits[0])
    found.loss.backward()
    del found
    gc.collect()
    assert gone() is None
    with torch.no_grad():
        assert len(streamed(**batch).router_logits) == 3
    tierflow.close(streamed)
