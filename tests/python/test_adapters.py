"""Adapters beside PEFT: its folder is read as ours is meant, and training takes the same course."""
import json
import subprocess

import peft
import pytest
import torch
import transformers
from program import BUILD, needs_torch

pytestmark = needs_torch

PROBE = BUILD / "adapter_probe"
SMALL = {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64}
MODELS = {
    "llama": lambda: transformers.LlamaConfig(**SMALL, intermediate_size=96, num_key_value_heads=2, tie_word_embeddings=False),
    "qwen3": lambda: transformers.Qwen3Config(**SMALL, intermediate_size=96, num_key_value_heads=2, head_dim=16),
    "gpt2": lambda: transformers.GPT2Config(vocab_size=128, n_embd=64, n_layer=2, n_head=4, n_positions=64, embd_pdrop=0, attn_pdrop=0, resid_pdrop=0),
    "opt": lambda: transformers.OPTConfig(vocab_size=128, hidden_size=64, ffn_dim=96, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=64, word_embed_proj_dim=64, dropout=0.0),
}


def tokens(step):
    rows, columns = torch.arange(4).unsqueeze(1), torch.arange(33).unsqueeze(0)
    return (rows * 31 + columns * columns * 7 + step % 5 * 13) % 128


def loss_of(model, step):
    ids = tokens(step)
    logits = model(input_ids=ids[:, :-1]).logits.float()
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def probe(folder, out, steps):
    done = subprocess.run([PROBE, folder, out, str(steps)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return [float(line) for line in done.stdout.split()]


@pytest.mark.parametrize("family", MODELS)
def test_peft_reads_the_folder_and_trains_the_same_way(family, tmp_path):
    torch.manual_seed(1)
    base = transformers.AutoModelForCausalLM.from_config(MODELS[family]()).to(torch.bfloat16)
    with torch.no_grad():
        for parameter in base.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3)  # so that there is something to learn within a few steps
    base.save_pretrained(tmp_path / "model")
    steps = 50
    begun = probe(tmp_path / "model", tmp_path / "begun", 0)
    losses = probe(tmp_path / "model", tmp_path / "tuned", steps)

    def loaded(adapter, **more):
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32, attn_implementation="eager")
        return peft.PeftModel.from_pretrained(model, tmp_path / adapter, **more)

    # An adapter that has not been trained changes nothing; one that has gives PEFT the loss that it gave us.
    model = loaded("tuned").eval()
    with torch.no_grad():
        assert loss_of(model, 0).item() == pytest.approx(losses[-1], rel=1e-2)
        with model.disable_adapter():
            assert loss_of(model, 0).item() == pytest.approx(begun[-1], rel=1e-2)
    config = json.loads((tmp_path / "tuned" / "adapter_config.json").read_text())
    assert config["r"] == 4 and config["lora_alpha"] == 8 and config["fan_in_fan_out"] == (family == "gpt2")

    # PEFT, from the same first values.
    model = loaded("begun", is_trainable=True).train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    layers = 7 if family in ("llama", "qwen3") else 6 if family == "opt" else 4
    assert len(trained) == 2 * 2 * layers
    optimizer = torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.0)
    theirs = []
    for step in range(steps):
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        theirs.append(loss.item())
    ours = losses[:-1]
    assert ours[-1] < 0.9 * ours[0]
    assert ours[:10] == pytest.approx(theirs[:10], rel=2e-2)
    assert sum(ours[-5:]) == pytest.approx(sum(theirs[-5:]), rel=0.1)
