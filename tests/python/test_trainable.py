"""A part of a model is trained: which tensors change, and what is refused."""
import pytest
from program import needs_torch, run, small, the_error
from safetensors.torch import load_file

pytestmark = needs_torch

TRAIN = ["train", "--model", "base", "--data", "text.txt", "--lr", "1e-2", "--steps", "4"]


@pytest.fixture
def base(work):
    run(work, "init", "--config", "config.json", "--out", "base")
    return load_file(work / "base" / "model.safetensors")


def changed(work, base, *words):
    run(work, *TRAIN, *words, "--out", "out", *small("--storage", "store", "--host-memory", "1MiB"))
    return {name for name, value in load_file(work / "out" / "model.safetensors").items() if not value.equal(base[name])}


@pytest.mark.parametrize("words, expected", [
    (["--trainable", "embed_tokens,lm_head"], lambda name: name in ("model.embed_tokens.weight", "lm_head.weight")),
    (["--trainable-layers", "1"], lambda name: ".layers.1." in name),
    (["--freeze", "_proj", "embed"], lambda name: "_proj" not in name and "embed" not in name),
    (["--lr-scale", "mlp=0", "--weight-decay", "0"], lambda name: "mlp." not in name),
])
def test_those_tensors_change(work, base, words, expected):
    assert changed(work, base, *words) == {name for name in base if expected(name)}


def test_a_run_goes_on_with_the_same_choice_alone(work, base):
    words = ["--out", "out", *small("--storage", "store", "--host-memory", "1MiB", "--durability", "step", "--max-tb-written", "1e-6")]
    assert run(work, *TRAIN, "--trainable-layers", "1", *words, ok=False).returncode == 10
    assert "its choice of what is trained is not this one's" in the_error(run(work, *TRAIN, *words, ok=False).stderr)
    run(work, "export", "--storage", "store", "--out", "exported")
    assert load_file(work / "exported" / "model.safetensors")["lm_head.weight"].equal(base["lm_head.weight"])


def test_what_cannot_be_is_one_line(work, base):
    for words, why in ((["--trainable", "wte"], 'no tensor has "wte" in its name'), (["--freeze", "."], "no tensor is left to train"), (["--trainable-layers", "3"], "the model has 2"),
                       (["--lr-scale", "lora_B=2"], 'no tensor that is trained has "lora_B"'),
                       (["--method", "lora", "--lr-scale", "embed_tokens=2"], 'there are, for instance, base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight'), (["--method", "lora", "--trainable", "q_proj"], "are for --method full")):
        assert why in the_error(run(work, *TRAIN, *words, "--out", "out", *small(), ok=False).stderr)
