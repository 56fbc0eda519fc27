"""The load-balancing loss of mixtures in a session's step, against transformers' model. Its gradients are in test_models.py."""

import pytest
from streaming import tierflow, torch, transformers
from test_families import saved
from test_models import CONFIGS

BALANCED = ["mixtral_balanced", "qwen2_moe_balanced", "qwen3_moe_balanced", "olmoe_balanced", "granitemoe_balanced", "gpt_oss_balanced"]


@pytest.mark.parametrize("family", BALANCED)
def test_load_balancing_loss_of_a_step(family, tmp_path):
    """Of micro-batches with padding and other numbers of labels: each has transformers' loss times its share of them. In bf16, where a few tokens go to other experts."""
    saved(CONFIGS[family](), tmp_path / "model")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.bfloat16).train()
    generator = torch.Generator().manual_seed(4)
    batches = [{"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)} for ids in torch.randint(2, 160, (3, 2, 40), generator=generator)]
    batches[1]["attention_mask"][1, 9:] = 0
    batches[1]["labels"][1, 9:] = -100
    batches[2]["labels"][:, :30] = -100
    counts = [(batch["labels"][:, 1:] >= 0).sum().item() for batch in batches]
    loss = aux = 0.0
    for batch, count in zip(batches, counts, strict=True):
        out = model(**batch)
        (out.loss * count / sum(counts)).backward()
        loss += out.loss.item() * count / sum(counts)
        aux += out.aux_loss.item() * count / sum(counts)
    norm = torch.stack([weight.grad.float().norm() for weight in model.parameters()]).norm().item()
    found = []
    for masked in (True, False):
        given = [{name: value for name, value in batch.items() if masked or name != "attention_mask"} for batch in batches]
        with tierflow.Session(tmp_path / "model", tierflow.Budget(device="64MiB", host="64MiB"), micro_batch=2, micro_batches=3, sequence_length=40) as session:
            found.append(session.step(given, 1e-3))
    ours, unmasked = found
    assert ours["aux_loss"] == pytest.approx(aux, rel=5e-3)
    assert ours["loss"] == pytest.approx(loss, rel=3e-3)
    assert ours["grad_norm"] == pytest.approx(norm, rel=3e-2)
    assert abs(unmasked["aux_loss"] - ours["aux_loss"]) > 1e-4
