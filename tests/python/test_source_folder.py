"""What a model folder holds beside the language model goes through training, export and merging as it is."""
import json
import shutil

import peft
import pytest
import torch
import transformers
from program import changed, needs_torch, run, small, the_error
from safetensors.torch import load_file, save_file
from test_models import CONFIGS, SMALL, randomised, yarn
from test_run_end import small_drive as small_drive  # a fixture

pytestmark = needs_torch

VISION = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14)
STEPS = ["train", "--data", "text.txt", "--steps", "2", "--lr", "1e-3", *small("--sequence-length", "48")]


def gemma3():
    return transformers.Gemma3Config(text_config={**CONFIGS["gemma3"]().to_dict(), "vocab_size": 256}, vision_config=dict(VISION), mm_tokens_per_image=4, image_token_index=250)


def mistral3():
    """Untied, so that there is a head."""
    text = transformers.Ministral3Config(**{**SMALL, "vocab_size": 256}, head_dim=16, rope_parameters=yarn(mscale=1.0, mscale_all_dim=0.5, llama_4_scaling_beta=0.1))
    vision = dict(VISION, model_type="pixtral", head_dim=16)
    return transformers.Mistral3Config(text_config=text.to_dict(), vision_config=vision, image_token_index=250, tie_word_embeddings=False)


def llama4():
    text = {**CONFIGS["llama4"]().to_dict(), "vocab_size": 256}
    vision = dict(VISION, vision_output_dim=24, projector_input_dim=32, projector_output_dim=24)
    return transformers.Llama4Config(text_config=text, vision_config=vision, image_token_index=250)


CLASSES = {"gemma3": (gemma3, transformers.Gemma3ForConditionalGeneration), "mistral3": (mistral3, transformers.Mistral3ForConditionalGeneration),
           "llama4": (llama4, transformers.Llama4ForConditionalGeneration)}


def text_name(name):
    return name.replace("language_model.model.", "model.").replace("model.language_model.", "model.").replace("language_model.lm_head", "lm_head")


def split(tensors):
    """(those of the text model under its own names, the others)"""
    text = {text_name(name): value for name, value in tensors.items() if "language_model" in name or name == "lm_head.weight"}
    return text, {name: value for name, value in tensors.items() if "language_model" not in name and name != "lm_head.weight"}


def same(some, others):
    return some.keys() == others.keys() and all(value.dtype == others[name].dtype and torch.equal(value, others[name]) for name, value in some.items())


def wrapped(which, work):
    """The folder of a model of text and images, and one of its text model by itself."""
    torch.manual_seed(5)
    config, model_class = CLASSES[which]
    model = model_class(config()).bfloat16()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.05)
    model.save_pretrained(work / "wrapped")
    (work / "wrapped" / "preprocessor_config.json").write_text('{"image_processor_type": "SiglipImageProcessor"}')
    text = transformers.AutoModelForCausalLM.from_config(model.config.text_config).bfloat16()
    if which == "llama4":
        text.load_state_dict(model.language_model.state_dict())
    else:
        text.model.load_state_dict(model.model.language_model.state_dict())
        text.lm_head.load_state_dict(model.lm_head.state_dict())
    text.config.tie_word_embeddings = model.config.tie_word_embeddings
    text.save_pretrained(work / "plain")
    return model_class


def renamed(folder):
    """The folder with the names that other versions of transformers wrote."""
    tensors = load_file(folder / "model.safetensors")
    new = {name.replace("language_model.model.", "model.language_model.").replace("language_model.lm_head", "lm_head"): value for name, value in tensors.items()}
    new = {name if name.startswith(("model.", "lm_head")) else "model." + name: value for name, value in new.items()}
    assert new.keys() != tensors.keys()
    save_file(new, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("which, others_names", [("gemma3", False), ("gemma3", True), ("mistral3", False), ("llama4", False)])
def test_a_model_of_text_and_images_comes_out_whole(which, others_names, work):
    model_class = wrapped(which, work)
    if others_names:
        renamed(work / "wrapped")
    before = load_file(work / "wrapped" / "model.safetensors")
    said = run(work, *STEPS, "--model", "wrapped", "--out", "out").stderr
    assert f"the text model of {model_class.__name__} is trained: the result has the other parts as they are" in said
    run(work, *STEPS, "--model", "plain", "--out", "expected")
    after = load_file(work / "out" / "model.safetensors")
    assert after.keys() == before.keys()
    (text, others), (text_before, others_before) = split(after), split(before)
    assert same(others, others_before) and len(others) > 10
    assert same(text, load_file(work / "expected" / "model.safetensors")) and not same(text, text_before)
    assert (work / "out" / "config.json").read_text() == (work / "wrapped" / "config.json").read_text()
    assert (work / "out" / "preprocessor_config.json").exists()
    model, info = model_class.from_pretrained(work / "out", dtype=torch.bfloat16, output_loading_info=True)
    assert type(model) is model_class and not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]


def test_a_store_takes_them_from_the_folder_that_the_run_began_with(work):
    wrapped("gemma3", work)
    at_once = [*STEPS, "--model", "wrapped", "--out", "out"]
    run(work, *at_once)
    run(work, *STEPS, "--model", "wrapped", "--storage", "state", "--no-export")
    source, aside = work / "wrapped", work / "aside"
    source.rename(aside)
    export = ["export", "--storage", "state", "--out", "exported"]
    refused = the_error(run(work, *export, ok=False).stderr)
    assert "is not there any more" in refused and str(source) in refused
    shutil.copytree(aside, source)
    tensors = load_file(aside / "model.safetensors")
    tensors["vision_tower.embeddings.position_embedding.weight"][1, 2] += 1
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    assert "is not as it was when the run began" in the_error(run(work, *export, ok=False).stderr)
    assert not (work / "exported").exists()
    shutil.copy(aside / "model.safetensors", source / "model.safetensors")
    run(work, *export)
    for name in ("model.safetensors", "config.json", "preprocessor_config.json"):
        assert (work / "exported" / name).read_bytes() == (work / "out" / name).read_bytes(), name


def test_a_run_is_not_resumed_with_other_parts(work):
    wrapped("gemma3", work)
    words = [*STEPS, "--model", "wrapped", "--storage", "state", "--no-export", "--durability", "step", "--lr-schedule", "constant"]
    run(work, *changed(words, {"--steps": "1"}))
    tensors = load_file(work / "wrapped" / "model.safetensors")
    tensors["multi_modal_projector.mm_soft_emb_norm.weight"][0] += 1
    save_file(tensors, work / "wrapped" / "model.safetensors", metadata={"format": "pt"})
    assert "other parts beside the language model" in the_error(run(work, *words, ok=False).stderr)


def test_adapters_are_merged_into_the_whole_model(work):
    model_class = wrapped("mistral3", work)
    lora = ["--method", "lora", "--lora-rank", "4"]
    run(work, *STEPS, *lora, "--model", "wrapped", "--out", "adapter")
    run(work, *STEPS, *lora, "--model", "wrapped", "--out", "at-once", "--merge")
    run(work, *STEPS, *lora, "--model", "plain", "--out", "expected", "--merge")
    run(work, "merge", "--adapter", "adapter", "--out", "merged")
    expected, others = load_file(work / "expected" / "model.safetensors"), split(load_file(work / "wrapped" / "model.safetensors"))[1]
    for name in ("at-once", "merged"):
        text, kept = split(load_file(work / name / "model.safetensors"))
        assert same(kept, others) and same(text, expected), name
        assert (work / name / "preprocessor_config.json").exists()
        info = model_class.from_pretrained(work / name, dtype=torch.bfloat16, output_loading_info=True)[1]
        assert not info["missing_keys"] and not info["unexpected_keys"]


def with_layers_behind(work):
    """GLM-4.5's, that predict several tokens at once, of any type; and a folder without them. Those layers."""
    torch.manual_seed(5)
    config = CONFIGS["glm4_moe"]()
    config.vocab_size = 256
    randomised(config).bfloat16().save_pretrained(work / "plain")
    shutil.copytree(work / "plain", work / "model")
    behind = {"model.layers.3.eh_proj.weight": torch.randn(64, 128, dtype=torch.float16), "model.layers.3.mlp.experts.1.up_proj.weight": torch.randn(48, 64).bfloat16(),
              "model.layers.3.steps": torch.arange(5), "model.layers.3.empty": torch.zeros(0, 3)}
    save_file({**load_file(work / "plain" / "model.safetensors"), **behind}, work / "model" / "model.safetensors", metadata={"format": "pt"})
    return behind


def test_a_run_is_not_resumed_without_them(work):
    with_layers_behind(work)
    words = [*STEPS, "--model", "model", "--storage", "state", "--no-export", "--durability", "step", "--lr-schedule", "constant"]
    run(work, *changed(words, {"--steps": "1"}))
    shutil.copy(work / "plain" / "model.safetensors", work / "model" / "model.safetensors")
    assert "now there are none" in the_error(run(work, *words, ok=False).stderr)


def test_layers_behind_the_last_one_are_copied(work):
    behind = with_layers_behind(work)
    for name in ("model", "plain"):
        run(work, *STEPS, "--model", name, "--out", f"{name}-out")
    assert same(load_file(work / "model-out" / "model.safetensors"), {**load_file(work / "plain-out" / "model.safetensors"), **behind})


def test_they_count_in_the_space_that_is_wanted_before_the_first_step(work, small_drive):
    wrapped("gemma3", work)
    tensors = load_file(work / "wrapped" / "model.safetensors")
    save_file({**tensors, "vision_tower.large": torch.zeros(8 << 20, dtype=torch.uint8)}, work / "wrapped" / "model.safetensors", metadata={"format": "pt"})
    full = small_drive("full", "6m")
    refused = run(work, *STEPS, "--model", "wrapped", "--out", full / "out", ok=False).stderr
    assert "free some space or give another --out" in the_error(refused) and "step 1" not in refused
    # The files of its tokenizer come along too.
    (work / "made").mkdir()
    shutil.copy(work / "config.json", work / "made" / "config.json")
    (work / "made" / "vocab.json").write_bytes(bytes(8 << 20))
    refused = run(work, *STEPS, "--config", "made/config.json", "--tokenizer", "bytes", "--out", full / "out", ok=False).stderr
    assert "free some space or give another --out" in the_error(refused) and "step 1" not in refused


@pytest.mark.parametrize("beginning", ["language_model.model.", "model."])
def test_what_belongs_to_no_part_is_refused(beginning, work):
    wrapped("gemma3", work)
    tensors = {name.replace("language_model.model.", beginning): value for name, value in load_file(work / "wrapped" / "model.safetensors").items()}
    strange = "language_model.model.encoder.weight" if beginning == "language_model.model." else "encoder.weight"
    save_file({**tensors, strange: torch.zeros(2)}, work / "wrapped" / "model.safetensors", metadata={"format": "pt"})
    error = the_error(run(work, *STEPS, "--model", "wrapped", "--out", "out", ok=False).stderr)
    assert f"{strange} is not a parameter" in error and "vision_tower" not in error


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(2, 34)[None]).logits


@pytest.mark.parametrize("which", CLASSES)
def test_adapters_are_for_the_whole_model_as_peft_names_it(which, work, recwarn):
    model_class = wrapped(which, work)
    up = "layers.1.feed_forward.shared_expert.up_proj" if which == "llama4" else "layers.1.mlp.up_proj"
    text = "language_model.model." if which == "llama4" else "model.language_model."
    lora = [*changed(STEPS, {"--lr": "5e-2"}), "--method", "lora", "--lora-rank", "4", "--lora-alpha", "8", "--lora-rank-pattern", f"{up}=2", "--modules-to-save", "norm"]
    run(work, *lora, "--model", "wrapped", "--out", "tuned")
    names = load_file(work / "tuned" / "adapter_model.safetensors").keys()
    assert all(name.startswith(f"base_model.model.{text}") for name in names), names
    model = peft.PeftModel.from_pretrained(model_class.from_pretrained(work / "wrapped", dtype=torch.float32), work / "tuned")
    assert not [each for each in recwarn if "adapter keys" in str(each.message)]
    inside = [name for name, module in model.named_modules() if hasattr(module, "lora_A") and hasattr(module, "base_layer")]
    assert len(inside) == 3 * 7 and all("language_model" in name for name in inside), inside
    run(work, "merge", "--model", "wrapped", "--adapter", "tuned", "--out", "merged")
    base, tuned, merged = logits(model_class.from_pretrained(work / "wrapped", dtype=torch.float32)), logits(model), logits(model_class.from_pretrained(work / "merged", dtype=torch.float32))
    assert (tuned - merged).norm() < 0.02 * (tuned - base).norm()
    # The names that its text model has by itself are read as well.
    other = work / "other"
    shutil.copytree(work / "tuned", other)
    tensors = load_file(other / "adapter_model.safetensors")
    save_file({name.replace("language_model.", ""): value for name, value in tensors.items()}, other / "adapter_model.safetensors", metadata={"format": "pt"})
    config = json.loads((other / "adapter_config.json").read_text())
    config.update(target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"], rank_pattern={up: 2})
    (other / "adapter_config.json").write_text(json.dumps(config))
    run(work, "merge", "--model", "wrapped", "--adapter", "other", "--out", "again")
    assert (work / "again" / "model.safetensors").read_bytes() == (work / "merged" / "model.safetensors").read_bytes()


@pytest.mark.parametrize("target", [r".*language_model.*\.(q_proj|down_proj)", ["model.language_model.layers.0.self_attn.q_proj", "model.language_model.layers.1.mlp.down_proj"]])
def test_what_peft_adapts_in_the_whole_model_is_merged(target, work):
    model_class = wrapped("gemma3", work)
    torch.manual_seed(8)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=target, init_lora_weights=False)
    model = peft.get_peft_model(model_class.from_pretrained(work / "wrapped", dtype=torch.float32), config)
    model.save_pretrained(work / "theirs")
    run(work, "merge", "--model", "wrapped", "--adapter", "theirs", "--out", "merged")
    base, tuned, merged = logits(model_class.from_pretrained(work / "wrapped", dtype=torch.float32)), logits(model), logits(model_class.from_pretrained(work / "merged", dtype=torch.float32))
    assert (tuned - merged).norm() < 0.02 * (tuned - base).norm() and len([name for name, module in model.named_modules() if hasattr(module, "lora_A") and hasattr(module, "base_layer")]) >= 2
