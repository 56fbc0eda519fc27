"""Folders whose weights are quantised already: read as the values that their own library gives, refused where parts do not fit."""
import json

import bitsandbytes.functional as bnb
import pytest
import torch
import transformers
from program import adapter_bits, needs_torch, run, small, steps_of, the_error
from safetensors.torch import load_file, save_file
from test_models import CONFIGS, randomised
from test_source_folder import wrapped
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

pytestmark = needs_torch

LORA = ["train", "--method", "lora", "--data", "text.txt", "--steps", "3", "--lr", "1e-2"]


def rounded(values):
    """The nearest bf16 numbers; a value in the middle of two goes to the larger one, as it does in a store, not to the even one."""
    return ((values.contiguous().view(torch.int32) + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)


def four_bits(name, weight, kind, double):
    codes, state = bnb.quantize_4bit(weight, quant_type=kind, compress_statistics=double)
    state.dtype = torch.float32
    values = rounded(bnb.dequantize_4bit(codes, state))
    described = {"quant_type": kind, "blocksize": state.blocksize, "dtype": "bfloat16", "shape": list(weight.shape)}
    parts = {name: codes, f"{name}.quant_map": state.code, f"{name}.absmax": state.absmax}
    if double:
        described |= {"nested_blocksize": state.state2.blocksize, "nested_dtype": "float32", "nested_offset": state.offset.item()}
        parts |= {f"{name}.nested_absmax": state.state2.absmax, f"{name}.nested_quant_map": state.state2.code}
    parts[f"{name}.quant_state.bitsandbytes__{kind}"] = torch.frombuffer(bytearray(json.dumps(described).encode()), dtype=torch.uint8)
    return parts, values


def eight_bits(name, weight):
    scale = weight.float().abs().amax(1).clamp(min=1e-8)
    codes = (weight.float() / scale[:, None] * 127).round().to(torch.int8)
    return {name: codes, name.removesuffix("weight") + "SCB": scale, name.removesuffix("weight") + "weight_format": torch.tensor(0, dtype=torch.uint8)}, rounded(codes.float() * scale[:, None] / 127)


def fp8(name, weight, scales="_scale_inv"):
    rows, columns = weight.shape
    padded = torch.zeros((rows + 127) // 128 * 128, (columns + 127) // 128 * 128)
    padded[:rows, :columns] = weight.float()
    tiles = padded.unflatten(0, (-1, 128)).unflatten(2, (-1, 128))
    scale = tiles.abs().amax((1, 3)).clamp(min=1e-8) / 448
    codes = (tiles / scale[:, None, :, None]).to(torch.float8_e4m3fn)
    values = (codes.float() * scale[:, None, :, None]).flatten(2).flatten(0, 1)[:rows, :columns]
    return {name: codes.flatten(2).flatten(0, 1)[:rows, :columns].contiguous(), f"{name}{scales}": scale}, rounded(values)


def compressed(strategy, kind="float"):
    """What quantises a weight as compressed-tensors has it, and its configuration."""
    most, dtype = (448, torch.float8_e4m3fn) if kind == "float" else (127, torch.int8)

    def quantise(name, weight):
        if strategy == "block":
            return fp8(name, weight, "_scale")
        scale = (weight.float().abs().amax(*([1] if strategy == "channel" else []), keepdim=strategy == "channel") / most).bfloat16()
        codes = (weight.float() / scale.float()).clamp(-most, most)
        codes = (codes.round() if kind == "int" else codes).to(dtype)
        parts = {name: codes, f"{name}_scale": scale.reshape(-1, 1) if strategy == "channel" else scale.reshape(1)}
        if strategy == "tensor":
            parts[name.removesuffix("weight") + "input_scale"] = torch.ones(1)
        return parts, rounded(codes.float() * scale.float())

    weights = {"num_bits": 8, "type": kind, "symmetric": True, "strategy": strategy, "dynamic": False, **({"block_structure": [128, 128]} if strategy == "block" else {})}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return quantise, {"quant_method": "compressed-tensors", "format": f"{kind}-quantized", "quantization_status": "compressed", "ignore": ["lm_head"], "kv_cache_scheme": None, "config_groups": {"group_0": group}}


def fp8_rows(name, weight, scales="_scale"):
    """One scale for each row of a matrix, in bf16, as llm-compressor saves it and as GLM-4.5-FP8 has it; FBGEMM's (Llama-3.1-405B-Instruct-FP8) are of the same shape."""
    scale = (weight.float().abs().amax(1, keepdim=True).clamp(min=1e-8) / 448).bfloat16()
    codes = (weight.float() / scale.float()).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {name: codes, f"{name}{scales}": scale}, rounded(codes.float() * scale.float())


def fp8_of_one_scale(name, weight):
    """As transformers saves FineGrainedFP8Config(weight_block_size=None): Ministral 3, Devstral 2."""
    scale = weight.float().abs().amax().clamp(min=1e-8) / 448
    codes = (weight.float() / scale).to(torch.float8_e4m3fn)
    return {name: codes, f"{name}_scale_inv": scale, name.removesuffix("weight") + "activation_scale": torch.tensor(2.0)}, rounded(codes.float() * scale)


COMPRESSED = {"compressed-channel": compressed("channel"), "compressed-tensor": compressed("tensor"), "compressed-block": compressed("block"), "compressed-int8": compressed("channel", "int")}
METHODS = {
    "nf4": (lambda name, weight: four_bits(name, weight, "nf4", False), {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}),
    "nf4-double": (lambda name, weight: four_bits(name, weight, "nf4", True), {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_use_double_quant": True}),
    "fp4": (lambda name, weight: four_bits(name, weight, "fp4", False), {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "fp4"}),
    "int8": (eight_bits, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
    "fp8": (fp8, {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}),
    "fp8-one-scale": (fp8_of_one_scale, {"quant_method": "fp8", "weight_block_size": None, "activation_scheme": "static", "modules_to_not_convert": ["lm_head"]}),
    "fbgemm": (lambda name, weight: fp8_rows(name, weight), {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]}),
    **COMPRESSED,
}
ROWS = ("compressed-channel", "compressed-tensor", "fp8-one-scale", "fbgemm")  # what --base-precision fp8-rows keeps


@pytest.fixture
def folders(work):
    """Makes a quantised folder, and one in bf16 with its values."""
    config = json.loads((work / "config.json").read_text())
    config |= {"hidden_size": 192, "intermediate_size": 320}  # tiles of 128 that are not full
    (work / "config.json").write_text(json.dumps(config))
    run(work, "init", "--config", "config.json", "--out", "plain")
    weights = load_file(work / "plain" / "model.safetensors")

    def make(method):
        quantise, described = METHODS[method]
        stored, values = {}, {}
        for name, weight in weights.items():
            parts, values[name] = quantise(name, weight) if name.endswith("_proj.weight") else ({name: weight}, weight)
            stored |= parts
        for folder, tensors, extra in (("stored", stored, {"quantization_config": described}), ("values", values, {})):
            (work / folder).mkdir(exist_ok=True)
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, work / folder / "model.safetensors")
            (work / folder / "config.json").write_text(json.dumps({**config, **extra}))
        return stored

    return make


def loss(work, model, *words):
    return json.loads(run(work, "eval", "--model", model, "--data", "text.txt", "--max-sequences", "4", "--json", *words, *small()).stdout)["loss"]


def mxfp4(name, weight):
    """Random codes and scales for a weight of this shape, every code and some scales far from 1 among them, and what transformers makes of them."""
    experts, rows, columns = weight.shape
    generator = torch.Generator().manual_seed(len(name))
    blocks = torch.randint(0, 256, (experts, columns, rows // 32, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(119, 124, (experts, columns, rows // 32), dtype=torch.uint8, generator=generator)
    scales[0, 0, 0], scales[-1, -1, -1] = 0, 129
    return {f"{name}_blocks": blocks, f"{name}_scales": scales}, convert_moe_packed_tensors(blocks, scales)


@pytest.fixture
def gpt_oss(work):
    """A folder as gpt-oss is published, and one in bf16 with its values."""
    config = CONFIGS["gpt_oss"]()
    config.vocab_size, config.intermediate_size, config.max_position_embeddings = 256, 96, 128
    torch.manual_seed(3)
    randomised(config).bfloat16().save_pretrained(work / "values")
    weights, stored = load_file(work / "values" / "model.safetensors"), {}
    for name, weight in weights.items():
        parts, weights[name] = mxfp4(name, weight) if name.endswith("_proj") else ({name: weight}, weight)
        stored |= parts
    save_file(weights, work / "values" / "model.safetensors")
    (work / "stored").mkdir()
    save_file(stored, work / "stored" / "model.safetensors")
    described = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]}
    (work / "stored" / "config.json").write_text(json.dumps({**json.loads((work / "values" / "config.json").read_text()), "quantization_config": described}))
    return stored


def test_mxfp4_experts_are_what_transformers_makes_of_them(work, gpt_oss):
    run(work, "train", "--model", "stored", "--data", "text.txt", "--steps", "1", "--freeze", "experts", "--out", "out", *small())
    expected = load_file(work / "values" / "model.safetensors")
    found = load_file(work / "out" / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert "experts" not in name or torch.equal(found[name].view(torch.int16), value.view(torch.int16)), name
    assert "quantization_config" not in json.loads((work / "out" / "config.json").read_text())
    lora = ["--base-precision", "nf4"]
    for words in [], lora:
        losses = []
        for model in "stored", "values":
            method = LORA if words else [word for word in LORA if word not in ("--method", "lora")]
            run(work, *method, *words, "--model", model, "--out", f"{model}-{len(words)}", *small("--log-json", "log.json"))
            losses.append([record["loss"] for record in steps_of(work / "log.json")])
        assert losses[0] == losses[1]


ADAPTERS = pytest.mark.parametrize("more", [[], ["--lora-target-parameters", "gate_up_proj,down_proj"]], ids=["linear", "experts"])


def saved_by_the_format(work, precision, more):
    """Runs over the values, over the format, and over the format from storage have the same bits. Bytes of host memory that the format saves."""
    losses, adapters, said = {}, {}, {}
    kept = ["--base-precision", precision]
    for name, model, words in ("bf16", "values", []), ("kept", "stored", kept), ("streamed", "stored", [*kept, "--storage", "store", "--host-memory", "2MiB"]):
        done = run(work, *LORA, *more, "--model", model, "--out", name, *small(*words, "--log-json", f"{name}.json", "--json"))
        losses[name] = [record["loss"] for record in steps_of(work / f"{name}.json")]
        adapters[name] = adapter_bits(work / name)
        said[name] = json.loads(done.stdout.splitlines()[-1])["summary"]
    assert losses["bf16"] == losses["kept"] == losses["streamed"] and len(losses["bf16"]) == 3
    assert adapters["bf16"] == adapters["kept"] == adapters["streamed"]
    return said["bf16"]["host_memory"] - said["kept"]["host_memory"]


@ADAPTERS
def test_mxfp4_is_kept_as_the_folder_has_it(work, gpt_oss, more):
    saved = saved_by_the_format(work, "mxfp4", more)
    for model in "stored", "values":
        run(work, "merge", "--adapter", "kept", "--model", model, "--out", f"merged-{model}")
    merged, plain = (load_file(work / folder / "model.safetensors") for folder in ("merged-stored", "values"))
    assert (work / "merged-stored" / "model.safetensors").read_bytes() == (work / "merged-values" / "model.safetensors").read_bytes()
    assert all(merged[name].equal(value) == (not more) for name, value in plain.items() if name.endswith(("experts.gate_up_proj", "experts.down_proj")))
    codes = sum(value.numel() for name, value in gpt_oss.items() if name.endswith("_blocks"))
    assert saved > 0.8 * (4 - 17 / 16) * codes  # a byte holds two codes, of 16 bits each in bf16
    assert "the model's folder has no weights in MXFP4" in the_error(run(work, *LORA, "--model", "values", "--out", "none", *small("--base-precision", "mxfp4"), ok=False).stderr)


def test_mxfp4_parts_that_do_not_fit_are_refused(work, gpt_oss):
    weight = "model.layers.1.mlp.experts.down_proj"

    def refused(changes):
        tensors = {name: value for name, value in {**gpt_oss, **changes}.items() if value is not None}
        save_file(tensors, work / "stored" / "model.safetensors")
        return the_error(run(work, "eval", "--model", "stored", "--data", "text.txt", *small(), ok=False).stderr)

    blocks, scales = gpt_oss[f"{weight}_blocks"], gpt_oss[f"{weight}_scales"]
    assert f"the quantised weight {weight} lacks its part {weight}_scales" in refused({f"{weight}_scales": None})
    assert "has a part" in refused({f"{weight}_scales": scales[:, :-1].contiguous()})
    assert "has scales of type F32" in refused({f"{weight}_scales": scales.float()})
    assert "has blocks that are not [experts, out, in / 32, 16]" in refused({f"{weight}_blocks": blocks.flatten(2)})
    assert f"{weight} is missing" in refused({f"{weight}_blocks": None, f"{weight}_scales": None})


@pytest.mark.parametrize("method", METHODS)
def test_a_quantised_folder_has_the_values_of_its_library(work, folders, method):
    folders(method)
    expected = loss(work, "values")
    assert loss(work, "stored") == expected
    assert loss(work, "plain") != expected
    # What is trained over it and added to it is a model in bf16.
    for model in "stored", "values":
        run(work, *LORA, "--model", model, "--merge", "--out", f"{model}-merged", *small())
    merged = load_file(work / "stored-merged" / "model.safetensors")
    assert all(value.dtype == torch.bfloat16 for value in merged.values())
    assert "quantization_config" not in json.loads((work / "stored-merged" / "config.json").read_text())
    if method in ("nf4", "fp4", "fp8"):  # of the others the values have more bits than bf16, of which the sum makes use
        assert all((merged[name] - value).abs().max() < 1e-2 for name, value in load_file(work / "values-merged" / "model.safetensors").items())


@pytest.mark.parametrize("method", COMPRESSED)
def test_compressed_tensors_reads_the_same_values(work, folders, method):
    folders(method)
    values = load_file(work / "values" / "model.safetensors")
    described = transformers.CompressedTensorsConfig(run_compressed=False)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(work / "stored", dtype=torch.bfloat16, quantization_config=described).state_dict()
    for name in (name for name in values if name.endswith("_proj.weight")):
        apart = (values[name].view(torch.int16).int() - theirs[name].view(torch.int16).int()).abs()
        assert apart.max() <= 1, name  # where a product lies in the middle of two bf16 numbers


def test_what_is_known_of_compressed_tensors(work, folders):
    stored = folders("compressed-block")
    assert loss(work, "stored") == loss(work, "stored", "--base-precision", "fp8")
    config = json.loads((work / "stored" / "config.json").read_text())
    module = "model.layers.1.mlp.up_proj.weight"

    def refused(tensors=stored, words=(), **changes):
        described = {**METHODS["compressed-channel"][1], **{key: value for key, value in changes.items() if key != "weights"}}
        if "weights" in changes:
            weights = {**described["config_groups"]["group_0"]["weights"], **changes["weights"]}
            described = {**described, "config_groups": {"group_0": {"weights": weights}}}
        (work / "stored" / "config.json").write_text(json.dumps({**config, "quantization_config": described}))
        save_file(tensors, work / "stored" / "model.safetensors")
        return the_error(run(work, "eval", "--model", "stored", "--data", "text.txt", *words, *small(), ok=False).stderr)

    assert 'format is "pack-quantized"; of compressed-tensors, weights in 8 bits can be read' in refused(format="pack-quantized")
    assert "transform_config must be null" in refused(transform_config={"config_groups": {"R1": {}}})
    assert "kv_cache_scheme must be null" in refused(kv_cache_scheme={"num_bits": 8})
    assert "config_groups must be an object" in refused(config_groups=[])
    assert "config_groups must hold objects" in refused(config_groups={"group_0": 1})
    assert "weights must be an object" in refused(config_groups={"group_0": {"weights": 8}})
    assert "num_bits must be 8" in refused(weights={"num_bits": 4})
    assert "symmetric must be true" in refused(weights={"symmetric": False})
    assert 'strategy is "group"; tensor, channel and block can be read' in refused(weights={"strategy": "group"})
    assert "block_structure must be [128, 128]" in refused(weights={"strategy": "block", "block_structure": [64, 64]})
    assert f"{module} has a part {module}_scale of 3 elements" in refused({**stored, f"{module}_scale": torch.ones(3)})
    # Other formats are made of the values.
    folders("compressed-channel")
    assert "no weights in FP8 (tiles of 128 x 128): nothing could be kept as it is; what it has is fp8-rows" in the_error(run(work, "eval", "--model", "stored", "--data", "text.txt", "--base-precision", "fp8", *small(), ok=False).stderr)
    assert abs(loss(work, "stored", "--base-precision", "nf4") - loss(work, "values", "--base-precision", "nf4")) < 0.01  # made of values that are not rounded to bf16 before


def test_nf4_streams_as_the_same_nf4(work, folders):
    folders("nf4")
    losses = {}
    for precision in "bf16", "nf4":
        run(work, *LORA, "--model", "stored", "--base-precision", precision, "--out", f"out-{precision}", *small("--log-json", f"{precision}.json"))
        losses[precision] = [record["loss"] for record in steps_of(work / f"{precision}.json")]
    assert losses["bf16"] == losses["nf4"]


def test_parts_that_do_not_fit_are_refused(work, folders):
    stored = folders("nf4-double")
    module = "model.layers.1.mlp.up_proj.weight"

    def refused(tensors):
        save_file(tensors, work / "stored" / "model.safetensors")
        return the_error(run(work, "eval", "--model", "stored", "--data", "text.txt", *small(), ok=False).stderr)

    for part in "absmax", "quant_map", "nested_quant_map":
        line = refused({name: value for name, value in stored.items() if name != f"{module}.{part}"})
        assert f"the quantised weight {module} lacks its part {module}.{part}" in line
    assert "has a part" in refused({**stored, f"{module}.absmax": stored[f"{module}.absmax"][:-1].contiguous()})
    assert "bytes of codes" in refused({**stored, module: stored[module][:-1].contiguous()})
    state = f"{module}.quant_state.bitsandbytes__nf4"
    assert "does not give its shape" in refused({**stored, state: torch.frombuffer(bytearray(b'{"shape": [-1, 3]}'), dtype=torch.uint8)})
    assert "not valid JSON" in refused({**stored, state: torch.frombuffer(bytearray(b"{"), dtype=torch.uint8)})
    assert "is stored as U8" in refused({name: value for name, value in stored.items() if name != state})
    stored = folders("fp8")
    assert f"{module} has a part" in refused({**stored, f"{module}_scale_inv": torch.ones(1, 1)})
    assert "is stored as F8_E4M3; F32, BF16 and F16 are read, and this type beside its scales" in refused({name: value for name, value in stored.items() if name != f"{module}_scale_inv"})
    config = json.loads((work / "stored" / "config.json").read_text())
    for described, why in (({"quant_method": "gptq"}, 'is "gptq"; weights quantised with bitsandbytes, fp8, fbgemm_fp8, mxfp4 or compressed-tensors can be read'), ({"quant_method": "fp8", "weight_block_size": [64, 64]}, "must be [128, 128]"), ("x", "must be an object")):
        (work / "stored" / "config.json").write_text(json.dumps({**config, "quantization_config": described}))
        assert why in refused(stored)


def test_eight_bits_beside_the_language_model_come_out_as_their_values(work):
    wrapped("gemma3", work)
    plain = load_file(work / "wrapped" / "model.safetensors")
    stored, values = {}, {}
    for name, weight in plain.items():
        parts, values[name] = eight_bits(name, weight) if name.endswith(("_proj.weight", "fc1.weight", "fc2.weight")) else ({name: weight}, weight)
        stored |= parts
    assert "vision_tower.encoder.layers.0.mlp.fc1.weight_format" in {name.replace("vision_model.", "") for name in stored}
    save_file(stored, work / "wrapped" / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((work / "wrapped" / "config.json").read_text())
    (work / "wrapped" / "config.json").write_text(json.dumps({**config, "quantization_config": METHODS["int8"][1]}))
    run(work, "train", "--data", "text.txt", "--steps", "1", "--model", "wrapped", "--out", "out", *small("--sequence-length", "48"))
    out = load_file(work / "out" / "model.safetensors")
    assert out.keys() == plain.keys()
    assert all(torch.equal(out[name], value) for name, value in values.items() if "language_model" not in name and name != "lm_head.weight")
