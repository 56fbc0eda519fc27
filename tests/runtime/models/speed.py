"""One Llama block, forward and backward with recomputation, against transformers with gradient checkpointing, and the loss head,
alternating.

    python tests/runtime/models/speed.py build/models_speed [HIDDEN INTERMEDIATE HEADS KV_HEADS BATCH LENGTH VOCAB] [--rounds N]

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
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding


class Theirs:
    def __init__(self, hidden, intermediate, heads, kv_heads, batch, length, vocab):
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
        self.norm = LlamaRMSNorm(hidden).bfloat16()
        self.output = torch.nn.Linear(hidden, vocab, bias=False).bfloat16()
        self.labels = torch.randint(vocab, (batch * length,))

    def step(self):
        start = time.perf_counter()
        out = self.block(self.input, attention_mask=None, position_embeddings=self.tables)
        torch.autograd.backward(out, self.d_out)
        elapsed = time.perf_counter() - start
        self.block.zero_grad()
        self.input.grad = None
        return 1e3 * elapsed

    def head(self):
        start = time.perf_counter()
        logits = self.output(self.norm(self.input)).float().flatten(0, 1)
        torch.nn.functional.cross_entropy(logits, self.labels).backward()
        elapsed = time.perf_counter() - start
        self.output.zero_grad()
        self.input.grad = None
        return 1e3 * elapsed

    def peak(self, what):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
            what()
        live = most = 0
        for event in profiler.profiler.kineto_results.events():
            if event.name() == "[memory]":
                live += event.nbytes()
                most = max(most, live)
        return most


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("program")
    parser.add_argument("shape", type=int, nargs="*", default=[1024, 2816, 16, 4, 4, 512, 32000])
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

    ours_run = ("block", "default", "forward", "head", "embedding")
    theirs_run = {"transformers block": theirs.step, "transformers head": theirs.head}
    peaks = {
name: theirs.peak(run) for name, run in theirs_run.items()}
    times = {
name: [] for name in (*theirs_run, *ours_run)}
    for which in ours_run:
        ask(which)
    for _ in range(options.rounds):
        for which, run in theirs_run.items():
            times[which].append(run())
        for which in ours_run:
            elapsed, peak = ask(which)
            times[which].append(elapsed)
            peaks[which] = peak
    median = {
which: statistics.median(values) for which, values in times.items()}
    for which, values in times.items():
        print(f"{which:18s} median {median[which]:8.1f} ms  least {min(values):8.1f} ms  peak {peaks[which] / 2**20:7.1f} MiB")
    for which in ("block", "head"):
        print(f"transformers / ours, {which}: {median['transformers ' + which] / median[which]:.2f}")
    ours.stdin.close()


if __name__ == "__main__":
    main()
