"""Families through the program: a folder of transformers is trained with its state on storage, and what comes out is read by transformers."""
import json

import pytest
import torch
import transformers
from program import MIB, needs_torch, run, small, steps_of, the_error
from program import work as work  # a fixture
from safetensors.torch import load_file, save_file
from test_models import CONFIGS, SLIDING, SMALL, randomised

pytestmark = needs_torch

LENGTH = ["--sequence-length", "48"]


def saved(config, folder):
    torch.manual_seed(5)
    config.vocab_size = 256  # bytes
    model = randomised(config).bfloat16()
    model.save_pretrained(folder)
    return model


def loss_in_transformers(folder, ids):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="eager").eval()
    with torch.no_grad():
        return model(input_ids=ids, labels=ids).loss.item()


@pytest.mark.parametrize("family", ["ministral3", "gemma2", "gemma3", "phi4_mini", "glm4", "olmo3", "smollm3", "granite", "cohere2", "starcoder2", "arcee", "mixtral", "qwen2_moe", "qwen3_moe", "granitemoe", "glm4_moe", "gpt_oss"])
def test_a_family_trains_from_storage_and_is_read_back(family, work):
    saved(CONFIGS[family](), work / "model")
    steps = ["train", "--model", "model", "--data", "text.txt", "--steps", "3", "--lr", "1e-3"]
    run(work, *steps, "--out", "resident", *small(*LENGTH, "--log-json", "resident.json"))
    run(work, *steps, "--out", "streamed", "--storage", "state", *small(*LENGTH, "--host-memory", "2MiB", "--log-json", "streamed.json"))
    losses = [[record["loss"] for record in steps_of(work / f"{name}.json")] for name in ("resident", "streamed")]
    assert losses[0] == losses[1] and len(losses[0]) == 3
    weights = [load_file(work / name / "model.safetensors") for name in ("resident", "streamed")]
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
    ids = torch.tensor(list((work / "text.txt").read_bytes()[: 40 * 48])).view(40, 48)
    (work / "tokens.bin").write_bytes(ids.to(torch.uint16).numpy().tobytes())
    result = json.loads(run(work, "eval", "--model", "streamed", "--data", "tokens.bin", "--json", *small(*LENGTH)).stdout)
    assert result["loss"] == pytest.approx(loss_in_transformers(work / "streamed", ids), rel=2e-3)


def test_a_head_that_is_not_the_embedding_is_not_dropped(work):
    """transformers 5 does not tie two tables that differ, whatever config.json says."""
    saved(CONFIGS["qwen2_tied"](), work / "model")
    tensors = load_file(work / "model" / "model.safetensors")
    steps = ["train", "--model", "model", "--data", "text.txt", "--steps", "1", *small(*LENGTH)]
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, work / "model" / "model.safetensors")
    run(work, *steps, "--out", "tied")
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"] * 2}, work / "model" / "model.safetensors")
    assert "lm_head.weight is not model.embed_tokens.weight" in the_error(run(work, *steps, "--out", "untied", ok=False).stderr)


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_the_text_model_of_a_wrapped_one_is_trained(prefix, work):
    """Gemma 3 as its makers publish it: text and vision in one folder, the text's config sparse."""
    text = CONFIGS["gemma3"]()
    plain = saved(text, work / "plain")
    given = {name: value for name, value in json.loads((work / "plain" / "config.json").read_text()).items() if name not in ("architectures", "tie_word_embeddings", "eos_token_id")}
    (work / "wrapped").mkdir()
    (work / "wrapped" / "config.json").write_text(json.dumps({"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "eos_token_id": [1, 106], "text_config": given, "vision_config": {"hidden_size": 8}}))
    tensors = {name.replace("model.", prefix): value for name, value in load_file(work / "plain" / "model.safetensors").items()}
    vision = {"vision_tower.vision_model.embeddings.weight": torch.zeros(3, 3), "multi_modal_projector.mm_input_projection_weight": torch.zeros(2)}
    save_file({**tensors, **vision}, work / "wrapped" / "model.safetensors")
    steps = ["train", "--data", "text.txt", "--steps", "2", "--lr", "1e-3", *small(*LENGTH)]
    said = run(work, *steps, "--model", "wrapped", "--out", "out").stderr
    assert "the text model of Gemma3ForConditionalGeneration is trained" in said
    run(work, *steps, "--model", "plain", "--out", "expected")
    config = json.loads((work / "out" / "config.json").read_text())
    assert config["architectures"] == ["Gemma3ForCausalLM"] and config["eos_token_id"] == [1, 106] and "vision_config" not in config
    model, info = transformers.AutoModelForCausalLM.from_pretrained(work / "out", dtype=torch.bfloat16, output_loading_info=True)
    assert type(model) is type(plain) and not info["missing_keys"] and not info["unexpected_keys"]
    expected = load_file(work / "expected" / "model.safetensors")
    assert all(torch.equal(value, expected[name]) for name, value in load_file(work / "out" / "model.safetensors").items())
    save_file({**tensors, "encoder.weight": torch.zeros(2)}, work / "wrapped" / "model.safetensors")
    assert "encoder.weight is not a parameter" in the_error(run(work, *steps, "--model", "wrapped", "--out", "again", ok=False).stderr)
