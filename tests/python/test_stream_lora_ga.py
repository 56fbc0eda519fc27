"""LoRA-GA over a base that streams frozen: its first values without the user's gradients, the base as it was, and PEFT's folder."""

import json

import pytest
from streaming import GPT2, batches, frozen, make, roomy, tierflow, torch, transformers

peft = pytest.importorskip("peft")
loraga = pytest.importorskip("peft.tuners.lora.loraga")

TARGETS = ["q_proj", "o_proj", "up_proj"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("lora-ga") / "model"
    make("llama").save_pretrained(path)
    return path


def adapted(model, **options):
    torch.manual_seed(5)
    config = peft.LoraConfig(**{"r": 4, "lora_alpha": 6, "target_modules": TARGETS, **options})
    return peft.get_peft_model(model.requires_grad_(False), config).train()


def begun(model, method="lora-ga", **options):
    tuned = adapted(model, **options)
    first = tierflow.LoraGA(tuned, method=method)
    trainer = tierflow.Trainer(tuned, tierflow.optim.AdamW([p for p in tuned.parameters() if p.requires_grad], lr=1e-2))
    first.begin(trainer, batches("llama", 2))
    return tuned, trainer


def factors(tuned, layer="model.layers.1.self_attn.q_proj"):
    module = tuned.get_submodule(f"base_model.model.{layer}")
    return module.lora_A["default"].weight.detach().float(), module.lora_B["default"].weight.detach().float(), module.scaling["default"]


@pytest.mark.parametrize("precision", ["bf16", "nf4"])
@pytest.mark.parametrize("method", ["lora-ga", "lora_ga"])
def test_training_begins_with_the_model_and_goes_on_as_over_a_resident_base(precision, method, folder, tmp_path):
    runs = []
    for plan in (frozen(tmp_path, precision), roomy(trainable=False, base_precision=precision)):
        model = tierflow.load(folder, plan)
        base = {name: value.clone() for name, value in model.state_dict().items()}
        expected = [model(**batch).loss.item() for batch in batches("llama", 2)]
        tuned, trainer = begun(model, method)
        assert [tuned(**batch).loss.item() for batch in batches("llama", 2)] == expected
        assert all(p.grad is None for p in tuned.parameters())
        first = [value.clone() for value in factors(tuned)[:2]]
        losses = [trainer.step(batches("llama", 2)).loss for _ in range(3)]
        assert losses[-1] < losses[0] and not torch.equal(factors(tuned)[0], first[0])
        after = {name.removeprefix("base_model.model.").replace(".base_layer", ""): value + 0 for name, value in tuned.state_dict().items()}
        assert all(torch.equal(after[name], value) for name, value in base.items())
        runs.append((losses, first, factors(tuned)[:2]))
        tierflow.close(model)
    assert runs[0][0] == runs[1][0]
    assert all(torch.equal(one, other) for parts in (1, 2) for one, other in zip(runs[0][parts], runs[1][parts], strict=True))


@pytest.mark.parametrize("method", ["lora-ga", "lora_ga"])
def test_first_values_are_the_programs(method, folder, tmp_path):
    """The same gradient but for rounding, so the same product of factors."""
    tuned, _ = begun(tierflow.load(folder, frozen(tmp_path, "bf16")), method)
    a, b, _ = factors(tuned)
    micro_batches = [{"input_ids": batch["input_ids"], "labels": batch["labels"]} for batch in batches("llama", 2)]
    with tierflow.Session(folder, tierflow.Budget(device="1GiB", host="64MiB"), method="lora", adapters={"rank": 4, "alpha": 6, "targets": TARGETS, "init": method},
                          micro_batch=2, micro_batches=2, sequence_length=24) as session:  # fmt: skip
        session.step(micro_batches, lr=0.0)
        session.save(tmp_path / "theirs")
    from safetensors.torch import load_file

    theirs = load_file(tmp_path / "theirs" / "adapter_model.safetensors")
    name = "base_model.model.model.layers.1.self_attn.q_proj"
    a0, b0 = theirs[f"{name}.lora_A.weight"][4:], -theirs[f"{name}.lora_B.weight"][:, 4:]
    # The spaces of singular vectors: signs and rotations of near-equal ones are nobody's.
    assert a.norm().item() == pytest.approx(a0.norm().item(), rel=1e-2) and b.norm().item() == pytest.approx(b0.norm().item(), rel=5e-2)
    one, other = (torch.linalg.qr(x.T)[0] for x in (a, a0))
    assert (one.T @ other).norm() ** 2 > 0.97 * 4


def test_first_values_are_pefts(folder, tmp_path):
    tuned, _ = begun(tierflow.load(folder, frozen(tmp_path, "bf16")), "lora_ga")
    a, b, _ = factors(tuned)
    resident = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    config = peft.LoraConfig(r=4, lora_alpha=6, target_modules=TARGETS, init_lora_weights="lora_ga", lora_ga_config=peft.LoraGAConfig())
    loraga.preprocess_loraga(resident, config, lambda: [resident(**batch).loss.backward() for batch in batches("llama", 2)])
    theirs = factors(peft.get_peft_model(resident, config))
    assert (b @ a).norm().item() == pytest.approx((theirs[1] @ theirs[0]).norm().item(), rel=5e-2)
    one, other = (torch.linalg.qr(x.T)[0] for x in (a, theirs[0]))
    assert (one.T @ other).norm() ** 2 > 0.97 * 4


@pytest.mark.parametrize("options", [{}, {"use_rslora": True, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"o_proj": 3}}])
def test_the_folder_is_an_ordinary_lora_of_the_unchanged_model(options, folder, tmp_path):
    model = tierflow.load(folder, frozen(tmp_path, "bf16"))
    tuned, trainer = begun(model, **options)
    for _ in range(3):
        trainer.step(batches("llama", 2))
    tuned.save_pretrained(tmp_path / "adapter")
    found = tuned.eval()(**batches("llama", 1)[0]).logits.float()
    delta = tuned.get_submodule("base_model.model.model.layers.0.mlp.up_proj").get_delta_weight("default")
    tierflow.close(model)
    written = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert written["r"] == 8 and written["init_lora_weights"] is True
    plain = peft.PeftModel.from_pretrained(transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16), tmp_path / "adapter")
    assert torch.allclose(plain.eval()(**batches("llama", 1)[0]).logits.float(), found, atol=0.05)
    assert torch.allclose(plain.get_submodule("base_model.model.model.layers.0.mlp.up_proj").get_delta_weight("default"), delta, atol=1e-6)
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    assert (base(**batches("llama", 1)[0]).logits.float() - found).abs().max() > 0.2  # it did learn


def test_a_durable_run_goes_on_with_its_first_values(folder, tmp_path):
    def run(steps, stop):
        plan = frozen(tmp_path, "nf4")
        plan.budget = tierflow.Budget(device="1MiB", host="96KiB", storage=[tmp_path / "store"], activations=0.0, durable=True)
        model = tierflow.load(folder, plan)
        tuned = adapted(model)
        first = tierflow.LoraGA(tuned)
        opt = tierflow.optim.AdamW([p for p in tuned.parameters() if p.requires_grad], lr=1e-2)
        trainer = tierflow.Trainer(tuned, opt)
        done = tierflow.resume(tuned, opt)
        if done == 0:
            first.begin(trainer, batches("llama", 2))
        losses = [trainer.step(batches("llama", 2)).loss for _ in range(done, steps)]
        tierflow.close(tuned, discard=stop)
        return losses

    whole = run(4, True)
    assert run(2, False) + run(4, True) == whole


def test_a_layer_of_gpt2_is_turned(tmp_path):
    torch.manual_seed(1)
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2, tie_word_embeddings=False)).bfloat16().save_pretrained(tmp_path / "gpt2")
    model = tierflow.load(tmp_path / "gpt2", roomy(trainable=False))
    before = model(**batches("gpt2", 1)[0]).loss.item()
    tuned, trainer = begun(model, target_modules=["c_attn"], fan_in_fan_out=True)
    assert tuned(**batches("gpt2", 1)[0]).loss.item() == before
    layer = tuned.get_submodule("base_model.model.transformer.h.0.attn.c_attn")
    assert layer.get_delta_weight("default").shape == (64, 192) and layer.get_delta_weight("default").abs().max() < 1e-6
    assert trainer.step(batches("gpt2", 2)).loss > 0
    tierflow.close(model)


def test_what_it_is_not_for_is_refused(folder, tmp_path):
    model = tierflow.load(folder, roomy(trainable=False))
    with pytest.raises(tierflow.UsageError, match="no linear layer with an adapter"):
        tierflow.LoraGA(model)
    with pytest.raises(tierflow.UsageError, match="not for its variants"):
        tierflow.LoraGA(adapted(model, use_dora=True))
    tierflow.close(model)
    model = tierflow.load(folder, roomy(trainable=False))
    tuned = adapted(model, r=40)
    with pytest.raises(tierflow.UsageError, match=r"q_proj: LoRA-GA takes a gradient's first 80 singular vectors.*at most 32"):
        tierflow.LoraGA(tuned)
    assert tuned.peft_config["default"].r == 40
    with pytest.raises(tierflow.UsageError, match="is \"lora-ga\""):
        tierflow.LoraGA(tuned, method="pissa")
    tierflow.close(model)


def small_llama(folder):
    return tierflow.load(folder, roomy(trainable=False))


def test_first_values_have_the_seed_that_is_given(folder):
    """Of a gradient whose singular values are known only in a random sketch: the same seed, the same bits."""
    found = []
    for seed in 0, 0, 3:
        tuned = adapted(small_llama(folder))
        first = tierflow.LoraGA(tuned, seed=seed)
        first.begin(tierflow.Trainer(tuned, tierflow.optim.AdamW([p for p in tuned.parameters() if p.requires_grad])), batches("llama", 1))
        found.append(factors(tuned)[0].clone())
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])


def test_begin_leaves_no_hook_and_is_for_its_own_model(folder):
    tuned, other = (adapted(small_llama(folder)) for _ in range(2))
    first = tierflow.LoraGA(tuned)
    hooks = lambda: sum(len(module._forward_hooks) for module in tuned.modules())  # noqa: E731
    before = hooks()
    trainers = [tierflow.Trainer(model, tierflow.optim.AdamW([p for p in model.parameters() if p.requires_grad])) for model in (tuned, other)]
    with pytest.raises(tierflow.UsageError, match="the trainer is another model's"):
        first.begin(trainers[1], batches("llama", 1))
    with pytest.raises(tierflow.UsageError, match="q_proj has first values of LoRA-GA already"):
        tierflow.LoraGA(tuned)
    first.begin(trainers[0], batches("llama", 1))
    assert hooks() == before
    with pytest.raises(ValueError, match="exactly one of input_ids"):
        first.begin(trainers[0], [{"labels": torch.ones(1, 4)}])
    assert hooks() == before


def test_layers_that_a_gradient_reaches_not_once_are_named(folder):
    for change, words in (
        (lambda model: setattr(model.get_submodule("base_model.model.model.layers.1.mlp"), "forward", lambda x: x), "no gradient came to model.layers.1.mlp.up_proj"),
        (run_the_first_layer_again, r"model.layers.0\..*_proj runs more than once in a pass"),
    ):
        tuned = adapted(small_llama(folder))
        change(tuned)
        first = tierflow.LoraGA(tuned)
        with pytest.raises(tierflow.UsageError, match=words):
            first.begin(tierflow.Trainer(tuned, tierflow.optim.AdamW([p for p in tuned.parameters() if p.requires_grad])), batches("llama", 2))


def run_the_first_layer_again(tuned):
    inner = tuned.get_submodule("base_model.model.model")
    inner.layers = torch.nn.ModuleList([inner.layers[0], inner.layers[1], inner.layers[0]])


def test_of_several_adapters_one_begins_so(folder):
    tuned = adapted(small_llama(folder))
    tuned.add_adapter("other", peft.LoraConfig(r=3, lora_alpha=6, target_modules=["q_proj"], init_lora_weights=False))
    tuned.set_adapter("other")
    layer = tuned.get_submodule("base_model.model.model.layers.0.self_attn.q_proj")
    plain = layer.get_delta_weight("default").clone()
    first = tierflow.LoraGA(tuned, adapter="other")
    first.begin(tierflow.Trainer(tuned, tierflow.optim.AdamW([p for p in tuned.parameters() if p.requires_grad])), batches("llama", 1))
    assert tuned.peft_config["other"].r == 6 and tuned.peft_config["default"].r == 4
    assert layer.get_delta_weight("other").abs().max() < 1e-6 and torch.equal(layer.get_delta_weight("default"), plain)
    assert not any("tierflow_first" in name for name in tuned.state_dict())
