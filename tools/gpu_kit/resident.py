"""A Llama training step with everything on the device, in plain PyTorch: random bf16 weights, activation checkpointing, fused AdamW,
clipping. What a streamed run is compared with. One JSON line a step and one for the run."""

import argparse
import json
import os
import statistics
import time

if __name__ == "__main__":
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # as the program has it; read when torch is loaded
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


class Norm(nn.Module):
    def __init__(self, width, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x):
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


def turned(x, cos, sin):
    low, high = x.chunk(2, -1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        hidden, self.heads, self.kv = c["hidden_size"], c["num_attention_heads"], c["num_key_value_heads"]
        self.dim = hidden // self.heads
        self.norm1, self.norm2 = Norm(hidden, c["rms_norm_eps"]), Norm(hidden, c["rms_norm_eps"])
        for name, wide, to in (("q", hidden, hidden), ("k", hidden, self.kv * self.dim), ("v", hidden, self.kv * self.dim), ("o", hidden, hidden), ("gate", hidden, c["intermediate_size"]),
                               ("up", hidden, c["intermediate_size"]), ("down", c["intermediate_size"], hidden)):
            setattr(self, name, nn.Linear(wide, to, bias=False))

    def forward(self, x, cos, sin):
        normed = self.norm1(x)

        def split(y, heads):
            return y.unflatten(-1, (heads, self.dim)).transpose(1, 2)

        q, k, v = turned(split(self.q(normed), self.heads), cos, sin), turned(split(self.k(normed), self.kv), cos, sin), split(self.v(normed), self.kv)
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(-2))
        normed = self.norm2(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


class Llama(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embedding = nn.Embedding(c["vocab_size"], c["hidden_size"])
        self.blocks = nn.ModuleList(Block(c) for _ in range(c["num_hidden_layers"]))
        self.norm, self.head = Norm(c["hidden_size"], c["rms_norm_eps"]), nn.Linear(c["hidden_size"], c["vocab_size"], bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=c["initializer_range"])
        if c["tie_word_embeddings"]:
            self.head.weight = self.embedding.weight
        self.dim, self.theta = c["hidden_size"] // c["num_attention_heads"], c["rope_theta"]

    def forward(self, ids):
        """The mean loss of each token's successor."""
        x = self.embedding(ids)
        rates = self.theta ** (-torch.arange(0, self.dim, 2, device=ids.device, dtype=torch.float32) / self.dim)
        angles = torch.arange(ids.shape[1], device=ids.device, dtype=torch.float32)[:, None] * rates
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for block in self.blocks:
            x = checkpoint(block, x, cos, sin, use_reentrant=False)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten())


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--sequence-length", type=int, required=True)
    parser.add_argument("--micro-batch", type=int, required=True)
    parser.add_argument("--micro-batches", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--clip", type=float, default=1.0)
    args = parser.parse_args()
    with open(args.config) as file:
        config = json.load(file)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(args.device):
        model = Llama(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    wait = torch.cuda.synchronize if args.device == "cuda" else lambda: None
    tokens, times = args.micro_batches * args.micro_batch * args.sequence_length, []
    for number in range(1, args.steps + 1):
        batches = [torch.randint(config["vocab_size"], (args.micro_batch, args.sequence_length), device=args.device) for _ in range(args.micro_batches)]
        wait()
        begin, loss = time.perf_counter(), 0.0
        for ids in batches:
            part = model(ids) / args.micro_batches
            part.backward()
            loss = loss + part.detach()
        nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        optimizer.zero_grad()
        wait()
        times.append(time.perf_counter() - begin)
        print(json.dumps({"step": number, "loss": float(loss), "step_s": round(times[-1], 4)}), flush=True)
    seconds = statistics.median(times[1:] or times)
    peak = {"device_memory_peak": torch.cuda.max_memory_allocated()} if args.device == "cuda" else {}
    print(json.dumps({"tokens_per_s": round(tokens / seconds, 1), "step_s": round(seconds, 4), "parameters": sum(p.numel() for p in model.parameters()), "tokens_per_step": tokens, **peak}))


if __name__ == "__main__":
    main()
