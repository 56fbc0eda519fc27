"""GLM-130B's architecture, of which transformers has no class, against one written here in PyTorch."""
import json
import math

import pytest
import torch
from safetensors.torch import save_file
from test_models import PROBE, distance, probe, tokens
from torch.nn import functional

CONFIG = dict(architectures=["GLM130BForCausalLM"], model_type="glm130b", vocab_size=160, hidden_size=64, intermediate_size=112, num_hidden_layers=3, num_attention_heads=4, max_position_embeddings=64)
DIM = 16


class Block(torch.nn.Module):
    """x <- alpha LN(x) + f(LN(x)) of both halves, alpha = sqrt(2 layers); q, k and v of each head together; up gelu(gate)."""

    def __init__(self):
        super().__init__()
        width, inner = CONFIG["hidden_size"], CONFIG["intermediate_size"]
        self.input_layernorm = torch.nn.LayerNorm(width, eps=1e-5)
        self.post_attention_layernorm = torch.nn.LayerNorm(width, eps=1e-5)
        self.attention = torch.nn.ModuleDict({"query_key_value": torch.nn.Linear(width, 3 * width), "dense": torch.nn.Linear(width, width)})
        self.mlp = torch.nn.ModuleDict({"dense_h_to_4h": torch.nn.Linear(width, 2 * inner), "dense_4h_to_h": torch.nn.Linear(inner, width)})

    def forward(self, x):
        alpha = math.sqrt(2 * CONFIG["num_hidden_layers"])
        x = self.input_layernorm(x)
        q, k, v = self.attention["query_key_value"](x).view(*x.shape[:2], -1, 3 * DIM).chunk(3, dim=-1)
        q, k = rotated(q), rotated(k)
        attended = functional.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
        x = alpha * x + self.attention["dense"](attended.transpose(1, 2).flatten(2))
        x = self.post_attention_layernorm(x)
        up, gate = self.mlp["dense_h_to_4h"](x).chunk(2, dim=-1)
        return alpha * x + self.mlp["dense_4h_to_h"](up * functional.gelu(gate))


def rotated(x):
    """x: [batch, sequence, heads, dim]; one of each half is a pair."""
    angles = torch.arange(x.shape[1])[:, None] / 10000.0 ** (torch.arange(0, DIM, 2) / DIM)
    cos, sin = angles.cos().to(x.dtype)[:, None], angles.sin().to(x.dtype)[:, None]
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class Reference(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.word_embeddings = torch.nn.Embedding(CONFIG["vocab_size"], CONFIG["hidden_size"])
        self.layers = torch.nn.ModuleList(Block() for _ in range(CONFIG["num_hidden_layers"]))
        self.final_layernorm = torch.nn.LayerNorm(CONFIG["hidden_size"], eps=1e-5)

    def forward(self, ids):
        x = self.word_embeddings(ids)
        for layer in self.layers:
            x = layer(x)
        return functional.linear(self.final_layernorm(x), self.word_embeddings.weight)


@pytest.mark.skipif(not PROBE.exists(), reason="the probe is not built")
@pytest.mark.parametrize("tiles", [[], [48 * 64]])
def test_parity(tiles, tmp_path):
    torch.manual_seed(3)
    model = Reference()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_((torch.randn_like(weight) * 0.1 + (1.0 if "layernorm.weight" in name else 0.0)).bfloat16())
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG))
    save_file({f"transformer.{name}": value.detach().clone() for name, value in model.named_parameters()}, tmp_path / "model" / "model.safetensors")
    ids, labels = tokens()

    def gradients(dtype):
        model.to(dtype).zero_grad()
        logits = model(ids).flatten(0, 1).float()
        loss = functional.cross_entropy(logits, labels.flatten())
        loss.backward()
        return loss.item(), {"logits": logits.detach(), **{f"transformer.{name}": weight.grad.float().clone() for name, weight in model.named_parameters()}}

    loss, exact = gradients(torch.float32)
    theirs = gradients(torch.bfloat16)[1]
    for dtype in ("f32", "bf16"):
        mine, _, ours = probe(tmp_path / "model", ids, labels, dtype, tmp_path / dtype, *tiles)
        assert mine == pytest.approx(loss, rel=1e-5 if dtype == "f32" else 5e-3)
        assert ours.keys() == exact.keys() - ({"logits"} if tiles else set())
        for name, value in ours.items():
            assert distance(value, exact[name]) < (1e-4 if dtype == "f32" else 2 * distance(theirs[name], exact[name]) + 2e-3), name
