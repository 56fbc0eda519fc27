"""--as: a model of an unknown architecture is read as one of a family that has everything that it has."""
import json

import pytest
import torch
from program import changed, needs_torch, run, small, the_error
from safetensors.torch import load_file, save_file
from test_models import CONFIGS, randomised

LENGTH = ["--sequence-length", "48"]
STEPS = ["train", "--data", "text.txt", "--steps", "2", "--lr", "1e-3", "--lr-schedule", "constant", *small(*LENGTH)]
EVAL = ["eval", "--data", "text.txt", "--max-sequences", "8", "--json", *small(*LENGTH)]
AS = ["--as", "llama"]


@pytest.fixture
def models(work):
    """`llama`, and `own`: the same with the name of a class of one's own."""
    torch.manual_seed(5)
    config = CONFIGS["llama3"]()
    config.vocab_size = 256
    randomised(config).bfloat16().save_pretrained(work / "llama")
    (work / "own").mkdir()
    (work / "own" / "model.safetensors").write_bytes((work / "llama" / "model.safetensors").read_bytes())
    own(work)
    return work


def own(work, **more):
    given = {**json.loads((work / "llama" / "config.json").read_text()), "architectures": ["SmollamaForCausalLM"], "model_type": "smollama", "auto_map": {"AutoModelForCausalLM": "x.y"}}
    (work / "own" / "config.json").write_text(json.dumps({**given, **more}))


def weights(folder):
    return (folder / "model.safetensors").read_bytes()


@needs_torch
def test_it_is_trained_stored_exported_and_evaluated_as_that_family(models):
    run(models, *STEPS, "--model", "llama", "--out", "expected")
    run(models, *STEPS, "--model", "own", *AS, "--out", "out")
    assert weights(models / "out") == weights(models / "expected")
    assert (models / "out" / "config.json").read_text() == (models / "own" / "config.json").read_text()
    losses = [json.loads(run(models, *EVAL, *words).stdout)["loss"] for words in (["--model", "expected"], ["--model", "out", *AS])]
    assert losses[0] == losses[1]
    run(models, "generate", "--json", "--prompt", "def ", "--max-new-tokens", "4", "--device", "cpu", "--device-memory", "64MiB", "--host-memory", "64MiB", "--model", "out", *AS)
    # A stored run: gone on with under the same family alone, and exported by itself.
    stored = [*STEPS, "--model", "own", "--storage", "state", "--no-export", "--durability", "step"]
    run(models, *changed(stored, {"--steps": "1"}), *AS)
    assert "its family (--as) is not this one's" in the_error(run(models, *stored, "--as", "granite", ok=False).stderr)
    run(models, *stored, *AS)
    run(models, "export", "--storage", "state", "--out", "exported")
    assert weights(models / "exported") == weights(models / "expected")
    assert json.loads((models / "exported" / "config.json").read_text())["architectures"] == ["SmollamaForCausalLM"]


@needs_torch
def test_its_adapters_know_the_family(models):
    lora = [*STEPS, "--method", "lora"]
    run(models, *lora, "--model", "llama", "--out", "expected", "--merge")
    run(models, *lora, "--model", "own", *AS, "--out", "adapter")
    run(models, "merge", "--adapter", "adapter", "--out", "merged")
    assert weights(models / "merged") == weights(models / "expected")
    run(models, *EVAL, "--model", "own", "--adapter", "adapter")
    (models / "adapter" / "tierflow_run.json").unlink()
    assert "--as llama" in the_error(run(models, "merge", "--adapter", "adapter", "--out", "again", ok=False).stderr)
    run(models, "merge", "--adapter", "adapter", "--out", "again", *AS)
    assert weights(models / "again") == weights(models / "expected")


def refused(models, *words):
    return the_error(run(models, "init", "--config", "own/config.json", "--out", "made", *words, ok=False).stderr)


def test_the_error_names_a_family_that_has_every_field(models):
    assert "; if it computes what LlamaForCausalLM does, --as llama reads it so; the Python package" in refused(models)
    own(models, architectures=["Qwen3CoderXForCausalLM"], model_type="coder", pretraining_tp=2, mlp_bias=None)
    assert "--as qwen3 reads it so; the Python package" in refused(models)
    own(models, architectures=["NothingKnownForCausalLM"])
    assert "--as llama reads it so; the Python package" in refused(models)
    own(models, sliding_window=None)
    assert "--as llama reads it so; the Python package" in refused(models)
    own(models, attention_sparsity=0.5)
    assert "supported are" in refused(models) and "--as" not in refused(models)
    assert "--as llama: attention_sparsity is there, which no LlamaForCausalLM has" in refused(models, *AS)
    own(models, rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 2, 3]})
    assert "mrope_section is there" in refused(models, *AS)
    own(models)
    run(models, "init", "--config", "own/config.json", "--out", "made", *AS)
    assert json.loads((models / "made" / "config.json").read_text())["architectures"] == ["SmollamaForCausalLM"]


def test_what_is_no_family_or_known_is_refused(models):
    assert "there is no such family; it must be one of llama, mistral" in refused(models, "--as", "lama")
    own(models, architectures=["Qwen2ForCausalLM"])
    assert "is that of a Qwen2ForCausalLM, which is read as what it is: leave --as llama out" in refused(models, *AS)
    own(models, architectures=["LlamaForCausalLM"], attention_sparsity=0.5)  # as without --as
    run(models, "init", "--config", "own/config.json", "--out", "made", *AS)
    text = {**json.loads((models / "llama" / "config.json").read_text()), "architectures": ["OwnForCausalLM"], "attention_sparsity": 0.5}
    (models / "own" / "config.json").write_text(json.dumps({"architectures": ["OwnForConditionalGeneration"], "text_config": text}))
    assert "attention_sparsity is there, which no LlamaForCausalLM has" in refused(models, *AS)


@needs_torch
def test_other_tensors_are_refused(models):
    tensors = load_file(models / "own" / "model.safetensors")
    save_file({**tensors, "model.layers.0.self_attn.q_norm.weight": torch.ones(16)}, models / "own" / "model.safetensors")
    assert "q_norm.weight is not a parameter" in the_error(run(models, *EVAL, "--model", "own", *AS, ok=False).stderr)


@pytest.mark.parametrize("family", CONFIGS)
def test_every_field_that_transformers_writes_is_known(family, work):
    """A class of one's own with the config.json of a family."""
    CONFIGS[family]().save_pretrained(work / "own")
    config = json.loads((work / "own" / "config.json").read_text())
    (work / "own" / "config.json").write_text(json.dumps({**config, "architectures": ["OwnForCausalLM"], "model_type": "own"}))
    run(work, "init", "--config", "own/config.json", "--out", "made", "--as", config["model_type"])
