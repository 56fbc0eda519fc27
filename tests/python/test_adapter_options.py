"""Options of adapters beside PEFT's: learning rates of LoRA+, ranks and alphas by pattern, rsLoRA, layers."""
import json

import peft
import pytest
import torch
from peft.optimizers import create_loraplus_optimizer
from program import needs_torch
from safetensors.torch import load_file
from test_adapters import expect_the_logits_of, expect_the_same_course, logits_of, make_base, moved_apart, plain, probe, probe_logits, read_by_each_other, train_with_peft

pytestmark = needs_torch


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_learning_rates_of_loraplus_are_those_of_peft(family, tmp_path):
    make_base(family, tmp_path / "model")
    for ratio in 4, 16:
        probe(tmp_path / "model", tmp_path / "begun", 0)
        losses = probe(tmp_path / "model", tmp_path / "tuned", 20, f"loraplus={ratio}", "lr=2e-3")
        model = peft.PeftModel.from_pretrained(plain(tmp_path / "model"), tmp_path / "begun", is_trainable=True)
        optimizer = create_loraplus_optimizer(model, torch.optim.AdamW, lr=2e-3, loraplus_lr_ratio=ratio)
        assert {group["lr"] for group in optimizer.param_groups if group["params"]} == {2e-3, ratio * 2e-3}
        expect_the_same_course(losses[:-1], train_with_peft(model, 20, optimizer=optimizer))
        model.save_pretrained(tmp_path / "theirs")
        assert moved_apart(tmp_path / "tuned", tmp_path / "theirs", tmp_path / "begun") < 0.15


@pytest.mark.parametrize("stabilised", [False, True], ids=["alpha/rank", "alpha/sqrt(rank)"])
@pytest.mark.parametrize("family, ranks, alphas", [("llama", {r".*\.0\..*q_proj": 2, "down_proj": 6}, {"up_proj": 20, "layers.1.mlp.down_proj": 3}), ("gpt2", {"h.1.attn.c_attn": 3}, {"c_fc": 16})])
def test_ranks_and_alphas_that_differ_give_the_logits_of_peft(family, ranks, alphas, stabilised, tmp_path):
    make_base(family, tmp_path / "model")
    words = [*(f"rank_of={name}:{rank}" for name, rank in ranks.items()), *(f"alpha_of={name}:{alpha}" for name, alpha in alphas.items()), *(["rslora"] if stabilised else [])]
    probe(tmp_path / "model", tmp_path / "begun", 0, *words)
    losses, tuned = probe_logits(tmp_path / "model", tmp_path / "tuned", 20, *words)
    config = json.loads((tmp_path / "tuned" / "adapter_config.json").read_text())
    assert (config["rank_pattern"], config["alpha_pattern"], config["use_rslora"]) == (ranks, alphas, stabilised)

    model = peft.PeftModel.from_pretrained(plain(tmp_path / "model"), tmp_path / "begun", is_trainable=True)
    assert len({module.r["default"] for module in model.modules() if hasattr(module, "lora_A")}) == len(ranks) + 1
    assert len({module.scaling["default"] for module in model.modules() if hasattr(module, "lora_A")}) > len(alphas) + 1
    expect_the_same_course(losses[:-1], train_with_peft(model, 20))
    model, again, theirs = read_by_each_other(model, tuned, tmp_path)
    assert again.keys() == theirs.keys() and all(value.equal(again[name]) for name, value in theirs.items())
    with model.disable_adapter():
        plainly = logits_of(model)
    expected = logits_of(model)
    assert ((expected - plainly).norm(dim=-1) / plainly.norm(dim=-1)).min() > 0.1


@pytest.mark.parametrize("family, target, pattern", [("llama", "down_proj", "layers"), ("gpt2", "c_fc", ["layers", "h"])])
def test_layers_behind_a_pattern_are_those_of_peft(family, target, pattern, tmp_path):
    make_base(family, tmp_path / "model")
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=[target], layers_to_transform=[1], layers_pattern=pattern, init_lora_weights=False, fan_in_fan_out=family == "gpt2")
    theirs = peft.get_peft_model(plain(tmp_path / "model"), config)
    theirs.save_pretrained(tmp_path / "theirs")
    expect_the_logits_of(theirs, probe_logits(tmp_path / "model", tmp_path / "again", 0, f"from={tmp_path / 'theirs'}")[1])
    found, expected = (load_file(tmp_path / folder / "adapter_model.safetensors") for folder in ("again", "theirs"))
    assert len(found) == 2 and found.keys() == expected.keys() and all(value.equal(found[name]) for name, value in expected.items())
    again = peft.PeftModel.from_pretrained(plain(tmp_path / "model"), tmp_path / "again")
    assert logits_of(again.eval()).equal(logits_of(theirs))
