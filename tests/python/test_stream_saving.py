"""What a folder holds: the names that transformers gives it, and what the model computes with now."""

import gc
import json

import pytest
from safetensors.torch import load_file, save_file
from streaming import GROUPED, LR, TEXT, UP, batches, make, roomy, scarce, tierflow, torch, train, transformers

MOE = dict(GROUPED, num_hidden_layers=2)
VISION = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, image_size=16, patch_size=8)
SMALL_VISION = dict(depth=2, embed_dim=32, num_heads=2, hidden_size=64, patch_size=8)
ROPE = {"rope_type": "default", "mrope_section": [2, 3, 3]}

# Their weights have other names in files than in the model, or are several tensors there.
CONVERTED = {
    "mixtral": lambda: transformers.MixtralForCausalLM(transformers.MixtralConfig(**MOE, num_local_experts=4)),
    "qwen3_moe": lambda: transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(**MOE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48, head_dim=16)
    ),
    "llava": lambda: transformers.LlavaForConditionalGeneration(
        transformers.LlavaConfig(vision_config=transformers.CLIPVisionConfig(**VISION), text_config=transformers.LlamaConfig(**MOE), image_token_index=150)
    ),
    "qwen2_vl": lambda: transformers.Qwen2VLForConditionalGeneration(
        transformers.Qwen2VLConfig(text_config=dict(MOE, rope_parameters=ROPE), vision_config=SMALL_VISION)
    ),
}


def read(folder):
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.fixture(params=CONVERTED)
def written(request, tmp_path):
    """A folder as transformers writes it, and the model that it wrote."""
    torch.manual_seed(2)
    model = CONVERTED[request.param]().bfloat16().eval()
    model.save_pretrained(tmp_path / "theirs")
    return model, tmp_path / "theirs"


def test_folders_of_transformers_are_loaded_and_written(written, tmp_path):
    plain, folder = written
    model = tierflow.load(folder, roomy())
    assert all(torch.equal(p, model.get_parameter(name) + 0) for name, p in plain.named_parameters())
    batch = batches("llama", 1)[0]
    plain = type(plain).from_pretrained(folder, dtype=torch.bfloat16)
    assert model(**batch).loss.item() == plain(**batch).loss.item()
    model.train()
    opt = tierflow.optim.AdamW(model.parameters(), lr=LR)
    model(**batch).loss.backward()
    opt.step()
    model.save_pretrained(tmp_path / "ours", max_shard_size="100KB")
    ours, theirs = read(tmp_path / "ours"), read(folder)
    assert {name: tensor.shape for name, tensor in ours.items()} == {name: tensor.shape for name, tensor in theirs.items()}
    again, info = type(plain).from_pretrained(tmp_path / "ours", dtype=torch.bfloat16, output_loading_info=True)
    assert not any(info.values())
    changed = 0
    for name, p in again.named_parameters():
        assert torch.equal(p, model.get_parameter(name) + 0), name
        changed += not torch.equal(p, plain.get_parameter(name))
    assert changed > 10


def test_tensors_follow_one_another_in_the_order_of_the_patterns():
    from tierflow.keys import Group
    from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter

    def rows(names, dim=1):
        converter = WeightConverter(["x.*.second", "x.*.first"], "x.both", operations=[MergeModulelist(0), Concatenate(dim)])
        members = [(pattern, name) for name in names for pattern in converter.source_patterns if name.endswith(pattern.split(".")[-1])]
        return Group(converter, "x.both", members).rows()

    names = [f"x.{expert}.{which}" for expert in range(2) for which in ("first", "second")]
    assert rows(names) == ["x.0.second", "x.0.first", "x.1.second", "x.1.first"]
    assert rows(names[:3]) is None and rows(names, dim=2) is None


def test_a_conversion_that_rearranges_elements(tmp_path, monkeypatch):
    """Not one after the other in the file: made through transformers' own operations, one parameter at a time."""
    from transformers import conversion_mapping
    from transformers.core_model_loading import Concatenate, Transpose, WeightConverter

    mapping = [
        WeightConverter("mlp.turned.weight", "mlp.down_proj.weight", operations=[Transpose(0, 1)]),
        WeightConverter(["mlp.left", "mlp.right"], "mlp.up_proj.weight", operations=[Concatenate(dim=1)]),
    ]
    conversion_mapping.get_checkpoint_conversion_mapping("llama")  # their table is made by the first look
    monkeypatch.setitem(conversion_mapping._checkpoint_conversion_mapping_cache, "llama", mapping)
    plain = make("llama")
    plain.save_pretrained(tmp_path / "theirs")
    assert "model.layers.1.mlp.left" in read(tmp_path / "theirs") and "model.layers.1.mlp.down_proj.weight" not in read(tmp_path / "theirs")
    model = tierflow.load(tmp_path / "theirs", scarce(tmp_path / "store"))
    assert all(torch.equal(p, model.get_parameter(name) + 0) for name, p in plain.named_parameters())
    model.save_pretrained(tmp_path / "ours")
    ours, theirs = read(tmp_path / "ours"), read(tmp_path / "theirs")
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())


def test_a_folder_that_is_quantised_in_another_way_says_so(tmp_path):
    make("llama").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(tierflow.InputError, match='is "gptq"; weights quantised with bitsandbytes, fp8, fbgemm_fp8, mxfp4 or compressed-tensors can be read'):
        tierflow.load(tmp_path, roomy())


def test_buffers_come_from_the_folder(tmp_path):
    class Scaled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(8, 8)
            self.register_buffer("scale", torch.ones(8))

        def forward(self, x):
            return self.linear(x) * self.scale

    made = Scaled().bfloat16()
    made.scale.fill_(3.0)
    (tmp_path / "folder").mkdir()
    save_file(made.state_dict(), tmp_path / "folder" / "model.safetensors")
    with tierflow.init_empty():
        empty = Scaled()
    model = tierflow.wrap(empty, roomy(), checkpoint=tmp_path / "folder")
    assert torch.equal(model.scale, torch.full((8,), 3.0))


def test_weights_that_are_not_finite_are_said_by_name(tmp_path, caplog):
    model = tierflow.wrap(make("llama"), scarce(tmp_path))
    tierflow.save(model, tmp_path / "sound")
    assert "not all finite" not in caplog.text
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.copy_(torch.full((112, 64), float("nan")))
    tierflow.save(model, tmp_path / "broken")
    assert "the values of model.layers.1.mlp.up_proj.weight are not all finite" in caplog.text


def test_a_module_put_in_another_ones_place_is_saved(model, tmp_path):
    model.lm_head = torch.nn.Linear(64, 160, bias=False).bfloat16()
    model.model.layers[0].mlp.up_proj = torch.nn.Linear(64, 112, bias=False).bfloat16()
    opt = tierflow.optim.AdamW(model.parameters(), lr=LR)
    train(model, "llama", opt=opt)
    for save in (lambda to: model.save_pretrained(to), lambda to: tierflow.save(model, to)):
        save(tmp_path / "out")
        saved = read(tmp_path / "out")
        assert torch.equal(saved["lm_head.weight"], model.lm_head.weight) and torch.equal(saved[UP], model.get_parameter(UP))
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    assert all(torch.equal(p, model.get_parameter(name) + 0) for name, p in again.named_parameters())


def test_a_model_within_another_is_saved_under_the_outer_names(model, tmp_path):
    tierflow.save(torch.nn.ModuleDict({"inner": model}), tmp_path / "out")
    assert set(read(tmp_path / "out")) == {f"inner.{name}" for name, _ in model.named_parameters()}


def test_a_model_with_adapters_inside_says_how_to_save_it(model, tmp_path):
    peft = pytest.importorskip("peft")
    before = model.get_parameter(UP) + 0
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["up_proj"], init_lora_weights=False))
    with pytest.raises(tierflow.UsageError, match="merge_and_unload"):
        adapted.base_model.model.save_pretrained(tmp_path / "out")
    merged = adapted.merge_and_unload()
    merged.save_pretrained(tmp_path / "out")
    saved = read(tmp_path / "out")[UP]
    assert torch.equal(saved, merged.get_parameter(UP) + 0) and not torch.equal(saved, before)


def test_ties_and_sizes_are_those_it_was_loaded_with(model, batch):
    expected = model(**batch).loss.item()
    model.tie_weights()  # nothing is tied
    assert model.resize_token_embeddings(160) is model.get_input_embeddings()
    model.config.tie_word_embeddings = True
    with pytest.raises(tierflow.UsageError, match="before it streams"):
        model.tie_weights()
    with pytest.raises(tierflow.UsageError, match="resize the model that from_pretrained"):
        model.resize_token_embeddings(200)
    assert model(**batch).loss.item() == expected
    torch.manual_seed(11)
    tied = tierflow.wrap(transformers.LlamaForCausalLM(transformers.LlamaConfig(**TEXT, tie_word_embeddings=True)).bfloat16(), roomy())
    tied.tie_weights()
    assert tied.lm_head.weight is tied.model.embed_tokens.weight


def settings(folder):
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in ("config", "generation_config")}


def settings_of_no_cache(folder):
    """What is saved of a model that had no cache before it streamed."""
    plain = make("llama")
    plain.config.use_cache = False
    tierflow.wrap(plain, roomy()).save_pretrained(folder / "no-cache")
    return settings(folder / "no-cache")


def test_what_a_folder_says_goes_with_the_model_and_is_saved(tmp_path):
    plain = make("llama")
    plain.generation_config.update(do_sample=True, temperature=0.25, max_new_tokens=7)
    plain.save_pretrained(tmp_path / "theirs")
    model = tierflow.load(tmp_path / "theirs", roomy())
    assert not any(module.training for module in model.modules())
    assert model.generation_config.temperature == 0.25 and model.config._name_or_path == str(tmp_path / "theirs")
    assert model.generate(torch.tensor([[5, 6]]), pad_token_id=0).shape[1] <= 2 + 7
    model.save_pretrained(tmp_path / "ours")
    ours, theirs = settings(tmp_path / "ours"), settings(tmp_path / "theirs")
    assert ours["generation_config"] == theirs["generation_config"]
    assert not model.config.use_cache and theirs["config"]["use_cache"]
    assert ours["config"] == theirs["config"] and ours["config"]["dtype"] == "bfloat16"
    assert not settings_of_no_cache(tmp_path)["config"]["use_cache"]
    # Made of a class, in fp32: it is written in bf16, and says so.
    model = tierflow.wrap(transformers.LlamaForCausalLM(transformers.LlamaConfig(**GROUPED, dtype="float32")), roomy())
    model.save_pretrained(tmp_path / "made")
    assert settings(tmp_path / "made")["config"]["dtype"] == "bfloat16" and settings(tmp_path / "made")["config"]["architectures"] == ["LlamaForCausalLM"]


def test_a_model_that_does_not_generate_has_no_such_settings(tmp_path):
    model = tierflow.wrap(make("bert"), roomy())
    model.save_pretrained(tmp_path / "out")
    assert not (tmp_path / "out" / "generation_config.json").exists()
    tierflow.load(tmp_path / "out", roomy())


def test_another_class_than_the_folder_names(tmp_path):
    make("llama").save_pretrained(tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    del config["architectures"]
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    with pytest.raises(tierflow.InputError, match="transformers has no class for it; pass model_class="):
        tierflow.load(tmp_path / "out", roomy())
    for model_class in transformers.LlamaForCausalLM, transformers.AutoModelForCausalLM:
        assert type(tierflow.load(tmp_path / "out", roomy(), model_class=model_class)) is transformers.LlamaForCausalLM
    assert type(tierflow.load(tmp_path / "out", roomy(), model_class=transformers.LlamaModel)) is transformers.LlamaModel


def test_shards_have_the_size_that_is_asked_for(model, tmp_path):
    for save in (lambda to: model.save_pretrained(to, max_shard_size="100KB"), lambda to: tierflow.save(model, to, "100KB"), lambda to: tierflow.save(model, to, 100_000)):
        save(tmp_path / "out")
        assert len(list((tmp_path / "out").glob("*.safetensors"))) > 2


@pytest.mark.parametrize("asked", [{"push_to_hub": True}, {"variant": "fp16"}, {"safe_serialization": False}, {"save_original_format": False}, {"distributed_checkpoint": True}])
def test_what_transformers_would_write_otherwise_is_refused(asked, model, tmp_path):
    with pytest.raises(tierflow.UsageError, match=f"has no {next(iter(asked))}=.*upload the folder that it writes"):
        model.save_pretrained(tmp_path / "out", **asked)
    model.save_pretrained(tmp_path / "out", is_main_process=False)
    assert not (tmp_path / "out").exists()
    model.save_pretrained(tmp_path / "out", True, None, push_to_hub=False, variant=None, safe_serialization=True, token=None, save_function=torch.save)
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_values_that_are_not_the_models_own_are_written_into_it_and_saved_then(model, tmp_path):
    averaged = {name: p.detach() * 0.5 for name, p in model.named_parameters()}
    for other in (averaged, {**model.state_dict(), UP: averaged[UP]}, {UP: model.state_dict()[UP]}, {**model.state_dict(), UP: model.state_dict()["lm_head.weight"]}, make("llama").state_dict()):
        with pytest.raises(tierflow.UsageError, match=r"write them into the model first, model.load_state_dict\(values\)"):
            model.save_pretrained(tmp_path / "out", state_dict=other)
    assert not (tmp_path / "out").exists()
    model.save_pretrained(tmp_path / "own", state_dict=model.state_dict())
    assert torch.equal(read(tmp_path / "own")[UP], model.get_parameter(UP) + 0)
    model.load_state_dict(averaged)
    model.save_pretrained(tmp_path / "out", state_dict=model.state_dict(keep_vars=True))
    assert torch.equal(read(tmp_path / "out")[UP], averaged[UP])


def test_a_merge_says_what_is_not_finite(tmp_path, caplog):
    peft = pytest.importorskip("peft")
    make("llama").save_pretrained(tmp_path / "base")
    tuned = peft.get_peft_model(make("llama"), peft.LoraConfig(r=2, target_modules=["up_proj"], task_type="CAUSAL_LM"))
    for name, value in (("sound", 1.0), ("broken", float("inf"))):
        with torch.no_grad():
            tuned.base_model.model.model.layers[0].mlp.up_proj.lora_B["default"].weight.fill_(value)
        tuned.save_pretrained(tmp_path / f"{name}-adapter")
        tierflow.merge(tmp_path / "base", tmp_path / f"{name}-adapter", tmp_path / name)
        assert ("the values of model.layers.0.mlp.up_proj.weight are not all finite: what was merged in" in caplog.text) == (name == "broken")


def test_the_caches_of_a_text_model_within_another_are_off_until_it_is_saved(tmp_path):
    torch.manual_seed(2)
    model = tierflow.wrap(CONVERTED["llava"]().bfloat16(), roomy())
    assert model.config.text_config.use_cache is False and not getattr(model.config, "use_cache", False)
    model.save_pretrained(tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["text_config"]["use_cache"] is True


def test_embeddings_that_keep_their_number_are_those_that_are_there(model):
    assert model.resize_token_embeddings() is model.resize_token_embeddings(160) is model.get_input_embeddings()


def test_a_model_that_nobody_refers_to_gives_its_state_up(tmp_path):
    budget = tierflow.Budget("64MiB", "64MiB", [tmp_path / "store"], durable=True)
    plan = tierflow.Plan(budget, allow_any_filesystem=True)
    gc.disable()  # which may come at any time
    try:
        model = tierflow.wrap(make("llama"), plan)
        del model
        model = tierflow.wrap(make("llama"), plan)  # no LockedError
        tierflow.close(model, discard=True)
    finally:
        gc.enable()


def test_buffers_that_transformers_keeps_in_fp32_stay_so(tmp_path):
    config = transformers.DeepseekV3Config(
        **{**TEXT, "num_key_value_heads": 4}, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16, n_routed_experts=16, n_group=2,
        topk_group=1, num_experts_per_tok=2, moe_intermediate_size=32, first_k_dense_replace=1,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.DeepseekV3ForCausalLM(config).bfloat16()
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    model.model.layers[1].mlp.gate.e_score_correction_bias = 5 + 0.02 * torch.randn(16)
    model.save_pretrained(tmp_path / "in")
    resident = transformers.DeepseekV3ForCausalLM.from_pretrained(tmp_path / "in", dtype=torch.bfloat16)
    streamed = tierflow.load(tmp_path / "in", roomy())
    (batch,) = batches("llama", 1)
    with torch.no_grad():
        assert torch.equal(streamed(**batch).logits, resident(**batch).logits)
    streamed.save_pretrained(tmp_path / "out")
    saved = load_file(tmp_path / "out" / "model.safetensors")[bias]
    assert saved.dtype == torch.float32 and torch.equal(saved, resident.get_buffer(bias))
