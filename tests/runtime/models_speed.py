"""One Llama block, forward and backward with recomputation, against transformers with gradient checkpointing, alternating.

    python tests/runtime/models_speed.py build/models_speed [HIDDEN INTERMEDIATE HEADS KV_HEADS BATCH LENGTH] [--rounds N]

Both in bf16 on the same threads. Prints medians, and the peak of live bytes beside weights and input (transformers: torch's profiler).
"""

import argparse
import functools
import statistics
import subprocess
import time

import torch
import torch.utils.checkpoint
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding


class Theirs:
    def __init__(self, hidden, intermediate, heads, kv_heads, batch, length):
        config = LlamaConfig(
            hidden_size=hidden, intermediate_size=intermediate, num_attention_heads=heads, num_key_value_heads=kv_heads
        )
        config._attn_implementation = "sdpa"
        self.block = LlamaDecoderLayer(config, 0).bfloat16().train()
        self.block.gradient_checkpointing = True
        self.block._gradient_checkpointing_func = functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)
        self.input = torch.randn(batch, length, hidden).bfloat16().requires_grad_()
        self.tables = LlamaRotaryEmbedding(config)(self.input, torch.arange(length)[None])
        self.d_out = torch.randn_like(self.input) * 0.01

    def step(self):
        start = time.perf_counter()
        out = self.block(self.input, attention_mask=None, position_embeddings=self.tables)
        torch.autograd.backward(out, self.d_out)
        elapsed = time.perf_counter() - start
        self.block.zero_grad()
        self.input.grad = None
        return 1e3 * elapsed

    def peak(self):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
            self.step()
        live = most = 0
        for event in profiler.profiler.kineto_results.events():
            if event.name() == "[memory]":
                live += event.nbytes()
                most = max(most, live)
        return most


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("program")
    parser.add_argument("shape", type=int, nargs="*", default=[1024, 2816, 16, 4, 4, 512])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    theirs = Theirs(*options.shape)
    ours = subprocess.Popen(
        [options.program, *map(str, options.shape)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={"OMP_NUM_THREADS": str(options.threads)},
    )

    def ask(line):
        ours.stdin.write(line + "\n")
        ours.stdin.flush()
        return [float(word) for word in ours.stdout.readline().split()]

    times = {"transformers": [], "block": [], "default": [], "forward": []}
    peaks = {"transformers": theirs.peak()}
    for which in ("block", "default", "forward"):
        ask(which)
    for _ in range(options.rounds):
        times["transformers"].append(theirs.step())
        for which in ("block", "default", "forward"):
            elapsed, peak = ask(which)
            times[which].append(elapsed)
            peaks[which] = peak
    for which, values in times.items():
        print(f"{which:13s} median {statistics.median(values):8.1f} ms  least {min(values):8.1f} ms  peak {peaks[which] / 2**20:7.1f} MiB")
    ratio = statistics.median(times["transformers"]) / statistics.median(times["block"])
    print(f"transformers / block: {ratio:.2f}")
    ours.stdin.close()


if __name__ == "__main__":
    main()
