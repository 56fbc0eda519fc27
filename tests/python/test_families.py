"""Families through the program: a folder of transformers is trained with its state on storage, and what comes out is read by transformers."""
import json

import pytest
import torch
import transformers
from program import needs_torch, run, small, steps_of, the_error
from safetensors.torch import load_file, save_file
from test_models import CONFIGS, PROBE, probe, randomised, tokens

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


def logits_in_transformers(folder, ids):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        return model(input_ids=ids).logits.flatten(0, 1)


# The first configuration of each class, and others with mechanisms that it lacks.
FIRST = {type(make()): name for name, make in reversed(CONFIGS.items())}
FAMILIES = [name for name, make in CONFIGS.items() if name in {*FIRST.values(), "llama3", "mistral_window", "phi4_mini", "cohere_qk_norm"}]


@pytest.mark.parametrize("family", FAMILIES)
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
    # Each logit, where rounding to bf16 sends no token to another expert.
    if not PROBE.exists():
        pytest.skip(f"{PROBE} is not built")
    ids, labels = tokens()
    ours = probe(work / "streamed", ids, labels, "f32", work / "probed")[2]["logits"]
    torch.testing.assert_close(ours, logits_in_transformers(work / "streamed", ids), rtol=1e-4, atol=1e-4)


def test_a_head_that_is_not_the_embedding_is_not_dropped(work):
    """transformers 5 does not tie two tables that differ, whatever config.json says."""
    saved(CONFIGS["qwen2_tied"](), work / "model")
    tensors = load_file(work / "model" / "model.safetensors")
    steps = ["train", "--model", "model", "--data", "text.txt", "--steps", "1", *small(*LENGTH)]
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, work / "model" / "model.safetensors")
    run(work, *steps, "--out", "tied")
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"] * 2}, work / "model" / "model.safetensors")
    assert "lm_head.weight is not model.embed_tokens.weight" in the_error(run(work, *steps, "--out", "untied", ok=False).stderr)


@pytest.mark.parametrize("config, has", [("DeepseekV2Config", "latent attention"), ("DeepseekV3Config", "latent attention"), ("Qwen3NextConfig", "gated DeltaNet"), ("MambaConfig", "state-space"),
                                         ("Mamba2Config", "state-space"), ("JambaConfig", "state-space"), ("FalconH1Config", "state-space")])
def test_other_kinds_of_layers_are_refused_by_name(config, has, work):
    """As transformers writes them. What is left is the Python package, and the one line says so."""
    made = getattr(transformers, config)()
    for names in [config.replace("Config", "ForCausalLM")], None:
        made.architectures = names
        made.save_pretrained(work / "model")
        line = the_error(run(work, "plan", "--config", "model/config.json", *small(), ok=False).stderr)
        assert (names[0] if names else made.model_type) in line and has in line and "Python package" in line and "docs/python.md" in line, line
