"""PEFT's adapters over a streamed base: the bits of a resident one, with each of its variants; and what to do about those that would write or copy the base."""

import pytest
from streaming import GROUPED, batches, frozen, make, roomy, tierflow, torch, transformers

peft = pytest.importorskip("peft")
optimizers = pytest.importorskip("peft.optimizers")

TARGETS = ["q_proj", "o_proj", "up_proj"]
VARIANTS = {
    "dora": {"use_dora": True},
    "rslora": {"use_rslora": True},
    "patterns": {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"o_proj": 3}},
    "dropout": {"lora_dropout": 0.3},
    "orthogonal": {"init_lora_weights": "orthogonal"},
    "table and head": {"target_modules": [*TARGETS, "embed_tokens", "lm_head"]},
}
WRITING = {"pissa": {"init_lora_weights": "pissa"}, "olora": {"init_lora_weights": "olora"}}  # first values that are taken away from the base


@pytest.fixture
def folder(tmp_path):
    make("llama").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def adapted(model, options):
    torch.manual_seed(5)
    return peft.get_peft_model(model.requires_grad_(False), peft.LoraConfig(r=4, lora_alpha=8, **{"target_modules": TARGETS, "init_lora_weights": False, **options})).train()


def plain_adam(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def trained(model, options, optimizer=plain_adam, steps=3):
    """The loss of each step, and what was trained."""
    model = adapted(model, options)
    stepping, losses = optimizer(model), []
    for batch in batches("llama", steps):
        losses.append(model(**batch).loss)
        losses[-1].backward()
        stepping.step()
        stepping.zero_grad()
    return [loss.item() for loss in losses], {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def same(one, other):
    return one[0] == other[0] and one[1].keys() == other[1].keys() != set() and all(torch.equal(value, other[1][name]) for name, value in one[1].items())


def over_each_base(tmp_path, folder, precision, options, optimizer=plain_adam):
    """Trained over the base on storage; seen to be what it is over a resident one."""
    model = tierflow.load(folder, frozen(tmp_path, precision))
    streamed = trained(model, options, optimizer)
    assert tierflow.stats(model)["lanes"]["disk_read"]["bytes"] > 0
    tierflow.close(model)
    model = tierflow.load(folder, roomy(trainable=False, base_precision=precision))
    # Without the package: the base that the format leaves, as an ordinary model.
    values = {name: value.clone() for name, value in model.state_dict().items()}
    resident = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    resident.load_state_dict(values)
    assert same(trained(model, options, optimizer), streamed)
    tierflow.close(model)
    assert same(trained(resident, options, optimizer), streamed)
    return streamed


@pytest.mark.parametrize("precision", ["bf16", "nf4", "int8"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_variant_has_the_bits_of_a_resident_base(variant, precision, folder, tmp_path):
    _, values = over_each_base(tmp_path, folder, precision, VARIANTS[variant])
    assert any("lora_magnitude_vector" in name for name in values) == (variant == "dora")


@pytest.mark.parametrize("precision", ["bf16", "nf4"])
def test_learning_rates_of_loraplus_are_pefts(precision, folder, tmp_path):
    def optimizer(ratio):
        return lambda model: optimizers.create_loraplus_optimizer(model, torch.optim.AdamW, lr=1e-3, loraplus_lr_ratio=ratio)

    values = [over_each_base(tmp_path, folder, precision, {}, optimizer(ratio))[1] for ratio in (16, 4)]
    assert not any(torch.equal(value, values[1][name]) for name, value in values[0].items() if "lora_B" in name)


@pytest.mark.parametrize("variant", WRITING)
def test_first_values_that_are_taken_away_from_the_base_need_it_in_bf16(variant, folder, tmp_path):
    over_each_base(tmp_path, folder, "bf16", WRITING[variant])
    before = (folder / "model.safetensors").read_bytes()
    for precision in "nf4", "int8":
        model = tierflow.load(folder, frozen(tmp_path, precision))
        line = rf'q_proj.weight is stored as {precision}, which is not written: use base_precision="bf16"'
        with pytest.raises(tierflow.UsageError, match=line):
            adapted(model, WRITING[variant])
        tierflow.close(model)
    assert (folder / "model.safetensors").read_bytes() == before


def test_lora_ga_takes_its_gradients_from_a_model_that_has_some(folder, tmp_path):
    """PEFT's: gradients of a trainable model, kept in a file; from there on over a frozen base."""
    loraga = pytest.importorskip("peft.tuners.lora.loraga")

    def options():
        return {"init_lora_weights": "lora_ga", "lora_ga_config": peft.LoraGAConfig()}

    def gradients(model, file):
        model.train()
        config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=TARGETS, **options())
        loraga.preprocess_loraga(model, config, lambda: model(**batches("llama", 1)[0]).loss.backward(), cache_file=str(file))
        return model

    def resident():
        return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)

    gradients(resident(), tmp_path / "theirs.pt")
    model = tierflow.load(folder, roomy())
    gradients(model, tmp_path / "ours.pt")
    tierflow.close(model)
    theirs, ours = (torch.load(tmp_path / name) for name in ("theirs.pt", "ours.pt"))
    assert theirs.keys() == ours.keys() != set() and all(torch.allclose(value.float(), ours[name].float(), rtol=0.02, atol=1e-5) for name, value in theirs.items())
    model = tierflow.load(folder, frozen(tmp_path, "bf16"))
    with pytest.raises(tierflow.UsageError, match=r"q_proj.weight requires a gradient, but was frozen when the model was loaded.*plan\(trainable=True\)"):
        gradients(model, tmp_path / "none.pt")
    tierflow.close(model)
    model = tierflow.load(folder, frozen(tmp_path, "bf16"))
    streamed = trained(gradients(model, tmp_path / "ours.pt"), options())
    assert same(streamed, trained(gradients(resident(), tmp_path / "ours.pt"), options()))
    tierflow.close(model)


@pytest.mark.parametrize("precision", ["nf4", "int8"])
def test_merging_needs_the_base_in_bf16(precision, folder, tmp_path):
    model = tierflow.load(folder, frozen(tmp_path, precision))
    tuned = adapted(model, {})
    with pytest.raises(tierflow.UsageError, match=rf'q_proj.weight is stored as {precision}, which is not written: use base_precision="bf16"'):
        tuned.merge_and_unload()
    tuned.save_pretrained(tmp_path / "adapter")
    tierflow.close(model)
    # What the line says: over a base in bf16 it is added.
    model = tierflow.load(folder, frozen(tmp_path, "bf16"))
    merged = peft.PeftModel.from_pretrained(model, tmp_path / "adapter").merge_and_unload()
    resident = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    assert_merged(merged, peft.PeftModel.from_pretrained(resident, tmp_path / "adapter").merge_and_unload())
    tierflow.close(model)


def assert_merged(merged, resident, ties=0.01):
    found, expected = merged.state_dict(), resident.state_dict()
    assert found.keys() == expected.keys()
    for name, value in expected.items():  # sums in the middle of two bf16 numbers round up here, and to the even one there
        apart = ((found[name] + 0).view(torch.int16).int() - value.view(torch.int16).int()).abs()
        assert apart.max() <= 1 and (apart > 0).float().mean() < ties, name


def test_adapters_are_merged_over_a_folder(folder, tmp_path):
    """What `tierflow merge` writes, of adapters that were trained over a base in four bits."""
    (folder / "tokenizer.json").write_text("{}")
    model = tierflow.load(folder, frozen(tmp_path, "nf4"))
    adapted(model, {}).save_pretrained(tmp_path / "adapter")
    tierflow.close(model)
    tierflow.merge(folder, tmp_path / "adapter", tmp_path / "merged")
    resident = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    expected = peft.PeftModel.from_pretrained(resident, tmp_path / "adapter").merge_and_unload().to(torch.bfloat16)
    assert_merged(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.bfloat16), expected)
    assert {file.name for file in (tmp_path / "merged").iterdir()} >= {"config.json", "tokenizer.json", "model.safetensors"}
    with pytest.raises(tierflow.UsageError, match="merged"):
        tierflow.merge(folder, tmp_path / "adapter", tmp_path / "merged")
    with pytest.raises(tierflow.InputError, match="adapter_config.json"):
        tierflow.merge(folder, folder, tmp_path / "other")
    assert not (tmp_path / "other").exists()


EXPERTS = {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
MOE = dict(GROUPED, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48, head_dim=16)


@pytest.fixture
def mixture(tmp_path):
    torch.manual_seed(11)
    transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**MOE)).bfloat16().save_pretrained(tmp_path / "mixture")
    return tmp_path / "mixture"


def streaming_mixture(tmp_path, precision="bf16"):
    plan = frozen(tmp_path, precision)
    plan.budget = tierflow.Budget(device="330KiB", host="96KiB" if precision == "bf16" else "160KiB", storage=[tmp_path / "store"], activations=0.0)
    return plan


def test_adapters_of_experts_have_the_bits_of_a_resident_base(mixture, tmp_path):
    # PEFT puts a parametrization over the experts in each call, and takes it away: what it leaves there must not be the memory of a visit.
    model = tierflow.load(mixture, streaming_mixture(tmp_path))
    names = set(model.state_dict())
    streamed = trained(model, EXPERTS, steps=4)
    assert tierflow.stats(model)["lanes"]["disk_read"]["bytes"] > 0
    resident = transformers.AutoModelForCausalLM.from_pretrained(mixture, dtype=torch.bfloat16)
    expected = trained(resident, EXPERTS, steps=4)
    assert same(streamed, expected)
    assert sum("experts" in name for name in streamed[1]) == 3 * 2 * 2
    turns = [turn for turn in model._tierflow.turns if turn.harmless]  # whose weights are known not to be written, and no longer copied to see that
    assert turns and not any(turn.touched for turn in turns)
    assert {name.replace("base_layer.", "") for name in model.state_dict() if "lora" not in name} == names
    assert torch.equal(*[each.eval()(**batches("llama", 1)[0]).logits for each in (model, resident)])
    tierflow.close(model)


@pytest.mark.parametrize("precision", ["int8", "nf4", "nf4-double"])
def test_adapters_of_experts_over_experts_in_fewer_bits(precision, mixture, tmp_path):
    model = tierflow.load(mixture, streaming_mixture(tmp_path, precision))
    formats = tierflow.model.engine_of(model).formats
    experts = {f"model.layers.{layer}.mlp.experts.{part}_proj" for layer in range(3) for part in ("gate_up", "down")}
    assert set(formats.values()) == {precision} and {name for name in formats if not name.endswith(".weight")} == experts
    values = {name: value.clone() for name, value in model.state_dict().items()}
    streamed = trained(model, EXPERTS)
    assert tierflow.stats(model)["lanes"]["disk_read"]["bytes"] > 0
    tierflow.close(model)
    resident = transformers.AutoModelForCausalLM.from_pretrained(mixture, dtype=torch.bfloat16)
    before = {name: value.clone() for name, value in resident.state_dict().items()}
    resident.load_state_dict(values)
    assert {name for name, value in values.items() if not torch.equal(value, before[name])} == set(formats)
    assert same(streamed, trained(resident, EXPERTS))


def test_adapters_of_experts_are_merged(mixture, tmp_path):
    model = tierflow.load(mixture, streaming_mixture(tmp_path))
    resident = transformers.AutoModelForCausalLM.from_pretrained(mixture, dtype=torch.bfloat16)
    merged, expected = [adapted(each, EXPERTS).merge_and_unload() for each in (model, resident)]
    assert_merged(merged, expected, ties=0.2)  # what is added has 8 bits, too
    tierflow.close(model)


class Forgets(torch.nn.Linear):
    """Leaves another parameter than it found."""

    def forward(self, x):
        out = super().forward(x)
        self.weight = torch.nn.Parameter(self.weight.detach() + 0, requires_grad=False)
        return out


def test_a_module_that_replaces_a_weight_while_it_runs_is_refused(tmp_path):
    model = tierflow.wrap(torch.nn.Sequential(Forgets(8, 8), torch.nn.Linear(8, 8)), roomy(trainable=False))
    for _ in range(2):  # and goes on being refused: nobody knows what the place holds
        with pytest.raises(tierflow.UsageError, match=r"0\.weight was replaced while its module ran"):
            model(torch.ones(1, 8, dtype=torch.bfloat16))
    assert not tierflow.model.engine_of(model).native.inside
    tierflow.close(model)
