"""Folders that transformers saves with a BitsAndBytesConfig: their values, and with the base precision that they have their codes and scales as they lie."""
import json

import bitsandbytes.functional as bnb
import pytest
import torch
import transformers
from program import adapter_bits, config, needs_torch, run, small, steps_of
from safetensors.torch import load_file, save_file
from test_quantised_folders import LORA, loss, rounded

pytestmark = needs_torch

KINDS = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "nf4-double": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "fp4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
    "int8": {"load_in_8bit": True},
}


def dequantised(module):
    """In fp32, by bitsandbytes."""
    weight = module.weight
    if weight.dtype == torch.int8:
        return bnb.int8_vectorwise_dequant(weight.data, weight.SCB)
    weight.quant_state.dtype = torch.float32
    return bnb.dequantize_4bit(weight.data, weight.quant_state)


@pytest.fixture
def saved(work):
    """Makes a folder with transformers, and two in bf16 with its values: of numbers in the middle of two bf16 ones one takes the larger, as a store does, one the even."""
    (work / "config.json").write_text(json.dumps(config(hidden_size=192, intermediate_size=320)))  # scales of scales that are not of a whole block
    run(work, "init", "--config", "config.json", "--out", "plain")

    def make(kind):
        quantised = transformers.BitsAndBytesConfig(**KINDS[kind])
        model = transformers.AutoModelForCausalLM.from_pretrained(work / "plain", dtype=torch.bfloat16, quantization_config=quantised, device_map="cpu")
        model.save_pretrained(work / "stored")
        assert json.loads((work / "stored" / "config.json").read_text())["quantization_config"]["quant_method"] == "bitsandbytes"
        exact = {f"{name}.weight": dequantised(module) for name, module in model.named_modules() if type(module).__name__ in ("Linear4bit", "Linear8bitLt")}
        assert len(exact) == 2 * 7
        for folder, rounding in ("away", rounded), ("even", torch.Tensor.bfloat16):
            (work / folder).mkdir(exist_ok=True)
            save_file({name: rounding(exact[name]) if name in exact else value for name, value in load_file(work / "plain" / "model.safetensors").items()}, work / folder / "model.safetensors")
            (work / folder / "config.json").write_text((work / "config.json").read_text())

    return make


@pytest.mark.parametrize("kind", KINDS)
def test_its_values_are_those_of_bitsandbytes(work, saved, kind):
    saved(kind)
    assert loss(work, "stored") == loss(work, "away") != loss(work, "plain")


@pytest.mark.parametrize("kind", ["nf4", "nf4-double"])
def test_in_its_own_format_it_stays_as_it_is(work, saved, kind):
    saved(kind)
    losses, adapters = {}, {}
    kept = ["--base-precision", kind]
    for name, model, words in ("values", "even", []), ("kept", "stored", kept), ("streamed", "stored", [*kept, "--storage", "store", "--host-memory", "1536KiB"]):
        run(work, *LORA, "--use-dora", "--model", model, "--out", name, *small(*words, "--log-json", f"{name}.json"))
        losses[name] = [record["loss"] for record in steps_of(work / f"{name}.json")]
        adapters[name] = adapter_bits(work / name)
    assert losses["values"] == losses["kept"] == losses["streamed"] and len(losses["kept"]) == 3
    assert adapters["values"] == adapters["kept"] == adapters["streamed"]
    assert loss(work, "stored", *kept) == loss(work, "even")


@pytest.mark.parametrize("kind, precision", [("nf4-double", "nf4"), ("fp4", "nf4-double"), ("int8", "nf4")])
def test_in_another_format_it_is_quantised_anew(work, saved, kind, precision):
    saved(kind)
    found, values = loss(work, "stored", "--base-precision", precision), loss(work, "even")
    if (kind, precision) == ("nf4-double", "nf4"):  # the scales that come of scales are numbers that nf4 can hold
        assert found == values
    else:
        assert found != values and found == pytest.approx(values, rel=0.02)
