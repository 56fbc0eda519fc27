"""Folders in FP8, of linear layers and of experts, as a base beside adapters: kept as they are, with the bits of their values in bf16."""
import json

import pytest
import torch
import transformers
from program import adapter_bits, needs_torch, run, small, steps_of, the_error
from safetensors.torch import load_file, save_file
from test_models import CONFIGS, randomised
from test_quantised_folders import ADAPTERS, LORA, METHODS, ROWS, loss, saved_by_the_format
from test_quantised_folders import folders as folders  # a fixture

pytestmark = needs_torch


def test_fp8_is_kept_as_the_folder_has_it(work, folders):
    stored = folders("fp8")
    plain = load_file(work / "plain" / "model.safetensors")
    for name in list(stored):
        if name.endswith("_scale_inv"):
            stored[name] = stored[name].bfloat16()  # of as many bits as these, products often lie between two bf16 numbers
        if ".0.self_attn.k_proj" in name:  # a layer that the folder does not have in FP8
            stored.pop(name)
            stored[name.removesuffix("_scale_inv")] = plain[name.removesuffix("_scale_inv")]
    save_file(stored, work / "stored" / "model.safetensors")
    losses, adapters, said = {}, {}, {}
    streamed = ["--storage", "store", "--host-memory", "2MiB"]
    kinds = {"bf16": ["--base-precision", "bf16"], "fp8": ["--base-precision", "fp8"], "fp8-streamed": ["--base-precision", "fp8", *streamed], "auto": []}
    for name, words in kinds.items():
        done = run(work, *LORA, "--model", "stored", "--use-dora", "--out", name, *small(*words, "--log-json", f"{name}.json", "--json"))
        assert ("the base stays in fp8, as the folder has it; --base-precision bf16 makes bf16 of it" in done.stderr) == (name == "auto")
        losses[name] = [record["loss"] for record in steps_of(work / f"{name}.json")]
        adapters[name] = adapter_bits(work / name)
        said[name] = json.loads(done.stdout.splitlines()[-1])["summary"]
    assert losses["bf16"] == losses["fp8"] == losses["fp8-streamed"] == losses["auto"] and len(losses["bf16"]) == 3
    assert adapters["bf16"] == adapters["fp8"] == adapters["fp8-streamed"] == adapters["auto"]
    assert said["auto"]["host_memory"] == said["fp8"]["host_memory"]
    assert loss(work, "stored") == loss(work, "stored", "--base-precision", "fp8")
    weights = sum(value.numel() for name, value in stored.items() if value.dtype == torch.float8_e4m3fn)
    assert weights < said["bf16"]["host_memory"] - said["fp8"]["host_memory"] + 0.2 * weights

    def refused(*words):
        return the_error(run(work, *words, "--base-precision", "fp8", *small(), ok=False).stderr)

    for words in ([*LORA, "--out", "none", "--model", "values"], ["eval", "--data", "text.txt", "--model", "values"]):
        assert "the model's folder has no weights in FP8" in refused(*words)
    # A run that is gone on with, and one whose state is exported, know what is in FP8.
    words = [*LORA, "--model", "stored", "--out", "again", *small(*streamed, "--durability", "step")]
    run(work, *words, "--base-precision", "fp8", "--no-export")
    run(work, "export", "--storage", "store", "--out", "exported")
    run(work, *LORA, "--model", "stored", "--base-precision", "fp8", "--out", "whole", *small())
    exported, expected = (load_file(work / folder / "adapter_model.safetensors") for folder in ("exported", "whole"))
    assert exported.keys() == expected.keys() != set() and all(value.equal(exported[name]) for name, value in expected.items())
    # What the format is left to is what the state has: FP8 there, and bf16 in one of a run that made it so.
    run(work, *words)
    assert (work / "again" / "adapter_model.safetensors").read_bytes() == (work / "whole" / "adapter_model.safetensors").read_bytes()
    assert "the run is finished" in run(work, *words).stderr
    words = [*LORA, "--model", "stored", "--out", "older", *small("--storage", "older-store", "--host-memory", "2MiB", "--durability", "step")]
    run(work, *words, "--base-precision", "bf16", "--no-export")
    assert "its base's precision is not this one's" in the_error(run(work, *words, "--base-precision", "fp8", ok=False).stderr)
    assert "as the folder has it" not in run(work, *words).stderr
    assert (work / "older" / "adapter_model.safetensors").read_bytes() == (work / "whole" / "adapter_model.safetensors").read_bytes()


@pytest.mark.parametrize("method", ["compressed-channel", "fp8-one-scale"])
def test_fp8_with_a_scale_for_each_row_is_kept_as_the_folder_has_it(work, folders, method):
    stored = folders(method)
    weights = sum(value.numel() for value in stored.values() if value.dtype == torch.float8_e4m3fn)
    losses, adapters, said = {}, {}, {}
    streamed = ["--storage", "store", "--host-memory", "2MiB"]
    kinds = {"bf16": [], "rows": ["--base-precision", "fp8-rows"], "streamed": ["--base-precision", "fp8-rows", *streamed], "auto": []}
    for name, words in kinds.items():
        done = run(work, *LORA, "--model", "values" if name == "bf16" else "stored", "--out", name, *small(*words, "--log-json", f"{name}.json", "--json"))
        assert ("the base stays in fp8-rows, as the folder has it; --base-precision bf16 makes bf16 of it" in done.stderr) == (name == "auto")
        losses[name] = [record["loss"] for record in steps_of(work / f"{name}.json")]
        adapters[name] = adapter_bits(work / name)
        said[name] = json.loads(done.stdout.splitlines()[-1])["summary"]
    assert len(losses["bf16"]) == 3 and all(each == losses["bf16"] for each in losses.values())
    assert all(each == adapters["bf16"] for each in adapters.values())
    assert said["auto"]["host_memory"] == said["rows"]["host_memory"]
    assert weights < said["bf16"]["host_memory"] - said["rows"]["host_memory"] + 0.2 * weights
    # Full fine-tuning begins with the values.
    full = ["train", "--data", "text.txt", "--steps", "1", "--lr", "1e-3"]
    for model in "stored", "values":
        run(work, *full, "--model", model, "--out", f"full-{model}", *small("--log-json", f"full-{model}.json"))
    assert steps_of(work / "full-stored.json")[0]["loss"] == steps_of(work / "full-values.json")[0]["loss"]


@pytest.mark.parametrize("method", ROWS)
def test_one_scale_or_one_for_each_row_can_be_kept(work, folders, method):
    folders(method)
    assert loss(work, "stored", "--base-precision", "fp8-rows") == loss(work, "values")


def test_an_evaluation_may_keep_what_the_folder_has(work, folders):
    folders("fp8-one-scale")
    assert loss(work, "stored", "--base-precision", "auto") == loss(work, "values") == loss(work, "values", "--base-precision", "auto")

    def refused(model, precision):  # says how much memory it takes
        return the_error(run(work, "eval", "--model", model, "--data", "text.txt", "--base-precision", precision, *small("--host-memory", "1KiB"), ok=False).stderr)

    assert refused("stored", "auto") == refused("stored", "fp8-rows") != refused("stored", "bf16")
    assert refused("values", "auto") == refused("values", "bf16")


def test_one_scale_for_a_weight_has_transformers_values(work, folders):
    folders("fp8-one-scale")
    values = load_file(work / "values" / "model.safetensors")
    described = transformers.FineGrainedFP8Config(weight_block_size=None, activation_scheme="static", dequantize=True, modules_to_not_convert=["lm_head"])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(work / "stored", dtype=torch.bfloat16, quantization_config=described).state_dict()
    for name in (name for name in values if name.endswith("_proj.weight")):
        apart = (values[name].view(torch.int16).int() - theirs[name].view(torch.int16).int()).abs()
        assert apart.max() <= 1, name  # where a product lies in the middle of two bf16 numbers


def mixture(work, config, quantised, described):
    """A folder of a small mixture in FP8, and one in bf16 with its values. quantised(name, weight): parts and values, or None where the weight stays."""
    torch.manual_seed(5)
    randomised(config).bfloat16().save_pretrained(work / "plain")
    stored, values = {}, {}
    for name, weight in load_file(work / "plain" / "model.safetensors").items():
        parts, values[name] = quantised(name, weight) or ({name: weight}, weight)
        stored |= parts
    config = json.loads((work / "plain" / "config.json").read_text())
    for folder, tensors, extra in ("stored", stored, {"quantization_config": described}), ("values", values, {}):
        (work / folder).mkdir()
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, work / folder / "model.safetensors")
        (work / folder / "config.json").write_text(json.dumps({**config, **extra}))
    return stored


def compare(work, precision, more):
    """Bytes of host memory that the format saves; the folder has the bits of its values, also without adapters."""
    assert loss(work, "stored") == loss(work, "values") != loss(work, "plain")
    return saved_by_the_format(work, precision, more)


PRECISIONS = pytest.mark.parametrize("precision", ["fp8", "fp8-rows"])


@ADAPTERS
@PRECISIONS
@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe"])
def test_experts_in_fp8_one_by_one_are_kept_as_the_folder_has_them(work, family, precision, more):
    """As the official FP8 folders have them: every linear layer in tiles of 128 x 128 or with a scale for each row, each expert's by itself, and routers, norms, embedding and head in bf16."""
    config = CONFIGS[family]()
    config.vocab_size, config.hidden_size, config.moe_intermediate_size, config.max_position_embeddings = 256, 192, 160, 128  # tiles that are not full
    quantise, described = METHODS["fp8" if precision == "fp8" else "compressed-channel"]
    stored = mixture(work, config, lambda name, weight: quantise(name, weight) if name.endswith("_proj.weight") else None, described)
    scales = "weight_scale_inv" if precision == "fp8" else "weight_scale"
    assert all(f"model.layers.2.mlp.experts.1.{part}_proj.{scales}" in stored for part in ("gate", "up", "down"))
    saved = compare(work, precision, more)
    codes = sum(value.numel() for value in stored.values() if value.dtype == torch.float8_e4m3fn)
    assert saved > 0.8 * codes


@ADAPTERS
@PRECISIONS
def test_experts_in_fp8_in_one_tensor_are_kept_as_the_folder_has_them(work, precision, more):
    config = CONFIGS["granitemoe"]()
    config.vocab_size, config.hidden_size, config.intermediate_size, config.max_position_embeddings = 256, 128, 64, 128  # matrices that end with their tiles
    quantise, described = METHODS["fp8" if precision == "fp8" else "compressed-channel"]

    def quantised(name, weight):
        if weight.dim() != 3:
            return None
        each = [quantise(name, expert) for expert in weight]
        return {part: torch.stack([parts[part] for parts, _ in each]) for part in each[0][0]}, torch.stack([values for _, values in each])

    stored = mixture(work, config, quantised, described)
    assert stored["model.layers.1.block_sparse_moe.input_linear.weight"].dtype == torch.float8_e4m3fn
    saved = compare(work, precision, more)
    assert saved > 0.5 * sum(value.numel() for value in stored.values() if value.dtype == torch.float8_e4m3fn)


# What `quantization_config` has in published folders, beside what says how weights are stored: Qwen3, Qwen3.6, GLM-4.5 and others. What is not in FP8 there is found by its own type, not by these lists.
SAYS = {
    "qwen3": {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head", "model.layers.0.input_layernorm", "model.layers.0.self_attn.k_proj"]},
    "qwen3.6": {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128], "weight_per_tensor": False, "act_per_tensor": False, "modules_to_not_convert": ["lm_head"]},
    "ignored layers": {"activation_scheme": "dynamic", "quant_method": "fp8", "weight_block_size": [128, 128], "ignored_layers": ["lm_head", "model.layers.0.self_attn.k_proj"]},
    "nothing": {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"},
}  # fmt: skip


@pytest.mark.parametrize("says", SAYS)
def test_what_published_folders_say_beside_is_understood(work, folders, says):
    stored, plain, values = folders("fp8"), load_file(work / "plain" / "model.safetensors"), load_file(work / "values" / "model.safetensors")
    kept = "model.layers.0.self_attn.k_proj.weight"
    stored.pop(f"{kept}_scale_inv")
    stored[kept] = values[kept] = plain[kept]
    save_file(stored, work / "stored" / "model.safetensors")
    save_file(values, work / "values" / "model.safetensors")
    config = json.loads((work / "stored" / "config.json").read_text())
    (work / "stored" / "config.json").write_text(json.dumps({**config, "quantization_config": SAYS[says]}))
    assert loss(work, "stored") == loss(work, "stored", "--base-precision", "fp8") == loss(work, "values") != loss(work, "plain")


def test_glms_folder_with_its_layer_for_the_token_after_the_next(work):
    """As GLM-4.5-FP8 is published: compressed-tensors with a scale for each row, and behind the last layer another one, for speculative decoding, in FP8 too."""
    config = CONFIGS["glm4_moe"]()
    config.vocab_size, config.hidden_size, config.moe_intermediate_size, config.max_position_embeddings, config.num_nextn_predict_layers = 256, 192, 160, 128, 1
    quantise, described = METHODS["compressed-channel"]
    described = {**described, "global_compression_ratio": None, "version": "0.10.2", "ignore": ["lm_head", "re:.*mlp.gate$", "model.layers.0.mlp.gate", f"model.layers.{config.num_hidden_layers}.eh_proj"]}
    stored = mixture(work, config, lambda name, weight: quantise(name, weight) if name.endswith("_proj.weight") else None, described)
    last, more = f"model.layers.{config.num_hidden_layers - 1}.", f"model.layers.{config.num_hidden_layers}."
    stored |= {name.replace(last, more): value.clone() for name, value in stored.items() if name.startswith(last)}
    wide, narrow = torch.zeros(192, 384), torch.zeros(192)
    stored |= {f"{more}eh_proj.weight": wide.bfloat16(), f"{more}enorm.weight": narrow.bfloat16(), f"{more}hnorm.weight": narrow.bfloat16(), f"{more}shared_head.norm.weight": narrow.bfloat16()}
    stored |= {f"{more}embed_tokens.weight": stored["model.embed_tokens.weight"].clone(), f"{more}shared_head.head.weight": stored["lm_head.weight"].clone()}
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, work / "stored" / "model.safetensors")
    assert loss(work, "stored") == loss(work, "stored", "--base-precision", "fp8-rows") == loss(work, "values") != loss(work, "plain")


def test_deepseeks_class_is_refused_by_name_before_any_weight_is_read(work):
    (work / "deepseek").mkdir()
    config = json.loads((work / "config.json").read_text())
    described = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
    (work / "deepseek" / "config.json").write_text(json.dumps({**config, "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "quantization_config": described}))
    assert "DeepseekV3ForCausalLM" in the_error(run(work, "eval", "--data", "text.txt", "--model", "deepseek", *small(), ok=False).stderr)
