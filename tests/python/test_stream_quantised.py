"""Folders that are quantised already, as a frozen base in Python: their values, and with base_precision="fp8" or "mxfp4" as the folder has them."""

import json

import bitsandbytes.functional as bnb
import pytest
from safetensors.torch import load_file, save_file
from streaming import batches, make, roomy, scarce, tierflow, torch, transformers
from test_models import CONFIGS, randomised
from test_quantised_folders import METHODS, compressed, four_bits, fp8, mxfp4

peft = pytest.importorskip("peft")


def folders(tmp_path, config, parts_of, described):
    """A quantised folder, and one in bf16 with its values. parts_of(name, weight): the stored parts and values of a weight, or None where it stays."""
    torch.manual_seed(7)
    randomised(config).bfloat16().save_pretrained(tmp_path / "values")
    stored, values = {}, {}
    for name, weight in load_file(tmp_path / "values" / "model.safetensors").items():
        parts, values[name] = parts_of(name, weight) or ({name: weight}, weight)
        stored |= parts
    config = json.loads((tmp_path / "values" / "config.json").read_text())
    (tmp_path / "stored").mkdir()
    for folder, tensors, extra in ("stored", stored, {"quantization_config": described}), ("values", values, {}):
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / folder / "model.safetensors", metadata={"format": "pt"})
        (tmp_path / folder / "config.json").write_text(json.dumps({**config, **extra}))
    return tmp_path / "stored", tmp_path / "values"


def fp8_folders(tmp_path, config, stays=lambda name: False):
    return folders(tmp_path, config, lambda name, weight: fp8(name, weight) if name.endswith("_proj.weight") and not stays(name) else None, METHODS["fp8"][1])


def row_folders(tmp_path, config):
    quantise, described = compressed("channel")
    return folders(tmp_path, config, lambda name, weight: quantise(name, weight) if name.endswith("_proj.weight") else None, described)


def tuned(model):
    """Loss and gradients of adapters over a base, in two micro-batches."""
    torch.manual_seed(5)
    model = peft.get_peft_model(model.requires_grad_(False), peft.LoraConfig(r=4, target_modules=["q_proj", "o_proj"], init_lora_weights=False)).train()
    losses = []
    for batch in batches("llama", 2):
        losses.append(model(**batch).loss)
        losses[-1].backward()
    return [loss.item() for loss in losses], {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def same(one, other):
    return one[0] == other[0] and one[1].keys() == other[1].keys() != set() and all(torch.equal(value, other[1][name]) for name, value in one[1].items())


def formats(model):
    return tierflow.model.engine_of(model).formats


def compared(stored, values, store, precision, host="600KiB"):
    """What is kept in the format, after all runs were seen to agree to the bit."""
    resident = tuned(transformers.AutoModelForCausalLM.from_pretrained(values, dtype=torch.bfloat16))
    kept = None
    plan = scarce(store, trainable=False, base_precision=precision)
    plan.budget = tierflow.Budget(device="1MiB", host=host, storage=[store], activations=0.0)
    for plan, moves in (plan, True), (roomy(trainable=False, base_precision=precision), False), (roomy(trainable=False), False):
        model = tierflow.load(stored, plan)
        assert not hasattr(model.config, "quantization_config")
        assert (model.model.layers[0].self_attn.q_proj.weight + 0).dtype == torch.bfloat16
        kept = formats(model) if kept is None else kept
        assert formats(model) == (kept if plan.base_precision == precision else {})
        assert same(tuned(model), resident)
        assert (tierflow.stats(model)["lanes"]["disk_read"]["bytes"] > 0) == moves
        tierflow.close(model)
    assert set(kept.values()) == {precision}
    return set(kept)


def test_fp8_streams_as_the_folder_has_it(tmp_path):
    config = CONFIGS["llama2"]()
    config.hidden_size, config.intermediate_size = 192, 320  # tiles that are not full
    stored, values = fp8_folders(tmp_path, config, stays=lambda name: "layers.1.self_attn.k_proj" in name)
    kept = compared(stored, values, tmp_path / "store", "fp8")
    assert len(kept) == 3 * 7 - 1 and all(name.endswith("_proj.weight") for name in kept)
    assert "model.layers.1.self_attn.k_proj.weight" not in kept
    sizes = [tierflow.plan(stored, roomy().budget, trainable=False, base_precision=each).estimate["state_bytes"] for each in ("bf16", "fp8")]
    codes = sum(value.numel() for value in load_file(stored / "model.safetensors").values() if value.dtype == torch.float8_e4m3fn)
    assert 0.98 * codes < sizes[0] - sizes[1] < codes


def test_mxfp4_experts_stream_as_the_folder_has_them(tmp_path):
    config = CONFIGS["gpt_oss"]()
    config.intermediate_size = 96
    described = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    stored, values = folders(tmp_path, config, lambda name, weight: mxfp4(name, weight) if name.endswith("experts.gate_up_proj") or name.endswith("experts.down_proj") else None, described)
    kept = compared(stored, values, tmp_path / "store", "mxfp4", host="250KiB")
    assert kept == {f"model.layers.{layer}.mlp.experts.{part}" for layer in range(3) for part in ("gate_up_proj", "down_proj")}


@pytest.mark.parametrize("width", [128, 48])
def test_experts_in_fp8_are_kept_where_their_matrices_end_with_tiles(width, tmp_path):
    config = CONFIGS["qwen3_moe"]()
    config.hidden_size, config.moe_intermediate_size, config.num_hidden_layers = 128, width, 2
    stored, values = fp8_folders(tmp_path, config)
    kept = compared(stored, values, tmp_path / "store", "fp8", host="600KiB" if width == 128 else "250KiB")
    assert ("model.layers.0.mlp.experts.gate_up_proj" in kept) == (width == 128)
    assert "model.layers.0.mlp.experts.down_proj" in kept and "model.layers.1.mlp.up_proj.weight" in kept


def test_fp8_with_a_scale_for_each_row_streams_as_the_folder_has_it(tmp_path):
    config = CONFIGS["qwen3_moe"]()
    config.hidden_size, config.moe_intermediate_size = 128, 48  # matrices that end anywhere make one parameter
    stored, values = row_folders(tmp_path, config)
    kept = compared(stored, values, tmp_path / "store", "fp8-rows", host="250KiB")
    assert {"model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.down_proj", "model.layers.1.mlp.up_proj.weight"} <= kept


@pytest.mark.parametrize("precision", ["nf4", "nf4-double"])
def test_four_bits_of_bitsandbytes_have_its_own_values(precision, tmp_path):
    config = CONFIGS["llama2"]()
    config.hidden_size, config.intermediate_size = 192, 320

    def parts(name, weight):
        if not name.endswith("_proj.weight"):
            return None
        double = precision == "nf4-double"
        return four_bits(name, weight, "nf4", double)[0], bnb.dequantize_4bit(*bnb.quantize_4bit(weight, quant_type="nf4", compress_statistics=double))

    stored, values = folders(tmp_path, config, parts, METHODS[precision][1])
    resident = tuned(transformers.AutoModelForCausalLM.from_pretrained(values, dtype=torch.bfloat16))
    plan = scarce(tmp_path / "store", trainable=False, base_precision=precision)
    plan.budget = tierflow.Budget(device="1MiB", host="410KiB", storage=[tmp_path / "store"], activations=0.0)
    for plan, moves in (plan, True), (roomy(trainable=False, base_precision=precision), False):
        model = tierflow.load(stored, plan)
        assert set(formats(model).values()) == {precision} and len(formats(model)) == 3 * 7
        assert same(tuned(model), resident)
        assert (tierflow.stats(model)["lanes"]["disk_read"]["bytes"] > 0) == moves
        tierflow.close(model)


def test_what_no_folder_has_is_not_kept(tmp_path):
    make("llama").save_pretrained(tmp_path)
    for precision, words in ("fp8", r"in FP8 \(tiles of 128 x 128\)"), ("fp8-rows", "in FP8 with a scale for each row, matrix or tensor"), ("mxfp4", "in MXFP4"):
        plan = roomy(trainable=False, base_precision=precision)
        for opened in (lambda: tierflow.load(tmp_path, plan), lambda: tierflow.plan(tmp_path, plan.budget, trainable=False, base_precision=precision)):  # noqa: B023
            with pytest.raises(tierflow.UsageError, match=f"the model's folder has no weights {words}: nothing could be kept as it is"):
                opened()
        with pytest.raises(tierflow.UsageError, match=f"base_precision='{precision}' keeps what a folder has"):
            tierflow.wrap(make("llama"), plan)
        with pytest.raises(tierflow.UsageError, match="plan with trainable=False"):
            tierflow.load(tmp_path, roomy(base_precision=precision))
