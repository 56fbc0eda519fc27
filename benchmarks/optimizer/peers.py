#!/usr/bin/env python3
"""The optimizer beside its peers, alternating in one process, medians: a table, or JSON lines {"name", "mparam_s", "ratio_to_ours"}.

peers.py [--build DIR] [--elements N] [--threads T] [--repeats R] [--json]. Needs torch; DeepSpeed, bitsandbytes and torchao where installed.
`ratio_to_ours` is the median over the repeats of our speed divided by the peer's in the same repeat."""
import argparse
import concurrent.futures
import ctypes
import json
import os
import pathlib
import statistics
import time

os.environ.setdefault("DS_ACCELERATOR", "cpu")
import numpy as np
import torch

ROOT = pathlib.Path(__file__).resolve().parents[2]
BLOCK = 256


def zeros(n, dtype):
    size = n * np.dtype(dtype).itemsize
    raw = np.zeros(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size].view(dtype)


def ours(path, n, threads, eight_bit):
    library = ctypes.CDLL(str(path))
    hi, lo = zeros(n, np.uint16), zeros(n, np.uint16)
    gradient = zeros(n, np.uint16)
    hi[:] = (torch.randn(n) * 0.02).bfloat16().view(torch.int16).numpy().view(np.uint16)
    gradient[:] = (torch.randn(n) * 1e-3).bfloat16().view(torch.int16).numpy().view(np.uint16)
    m, v = (zeros(n, np.uint8 if eight_bit else np.float32) for _ in range(2))
    absmax = [zeros(n // BLOCK, np.float32) for _ in range(2)] if eight_bit else None
    if eight_bit:
        m[:] = 127
    pool = concurrent.futures.ThreadPoolExecutor(threads)
    share = n // threads // BLOCK * BLOCK
    count = [0]

    def part(first):
        at = lambda array, unit=1: None if array is None else ctypes.c_void_p(array.ctypes.data + first // unit * array.itemsize)
        scales = (None, None) if not eight_bit else (at(absmax[0], BLOCK), at(absmax[1], BLOCK))
        size = share if first + 2 * share <= n else n - first
        floats = [ctypes.c_float(x) for x in (1e-4, 0.9, 0.999, 1e-8, 0.01, 0)]
        assert library.optim_adamw(at(gradient), at(hi), at(lo), at(m), scales[0], at(v), scales[1], ctypes.c_size_t(size),
                                   ctypes.c_int64(count[0]), *floats) == 0

    def step():
        count[0] += 1
        list(pool.map(part, range(0, share * threads, share)))

    return step


def peer(make, n, dtype=torch.float32):
    p = torch.randn(n).to(dtype).requires_grad_()
    p.grad = (torch.randn(n) * 1e-3).to(dtype)
    return make([p]).step


def contenders(args):
    n = args.elements
    library = pathlib.Path(args.build) / "libtierflow_optim_c.so"
    yield "tierflow block8 hi/lo", n, lambda: ours(library, n, args.threads, True)
    yield "tierflow f32 hi/lo", n, lambda: ours(library, n, args.threads, False)
    yield "torch fused AdamW fp32", n, lambda: peer(lambda p: torch.optim.AdamW(p, lr=1e-4, fused=True), n)

    def deepspeed(dtype, **more):
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return lambda: peer(lambda p: DeepSpeedCPUAdam(p, lr=1e-4, **more), n, dtype)

    def bitsandbytes():
        import bitsandbytes

        return peer(lambda p: bitsandbytes.optim.AdamW8bit(p, lr=1e-4), n // 8)

    def torchao():
        from torchao.optim import AdamW8bit

        return peer(lambda p: AdamW8bit(p, lr=1e-4), n // 8)

    yield "DeepSpeed CPUAdam fp32", n, lambda: deepspeed(torch.float32)()
    yield "DeepSpeed CPUAdam bf16 weights and states", n, lambda: deepspeed(torch.bfloat16, fp32_optimizer_states=False)()
    yield "bitsandbytes AdamW8bit", n // 8, bitsandbytes
    yield "torchao AdamW8bit", n // 8, torchao


def report(line, as_json):
    if as_json:
        print(json.dumps(line), flush=True)
    elif "error" in line:
        print(f"{line['name']:44} {line['error']}", flush=True)
    else:
        print(f"{line['name']:44} {line['mparam_s']:9.0f} Mparam/s   ours / this {line['ratio_to_ours']:.2f}", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--build", default=str(ROOT / "build"))
    parser.add_argument("--elements", type=int, default=64 * 2**20)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    args.elements = args.elements // (args.threads * BLOCK * 8) * args.threads * BLOCK * 8
    torch.set_num_threads(args.threads)
    runs = []
    for name, elements, make in contenders(args):
        try:
            step = make()
            step()
            runs.append((name, elements, step, []))
        except Exception as error:  # a peer that does not build is reported, not hidden
            report({"name": name, "error": repr(error)[:300]}, args.json)
    for repeat in range(args.repeats):
        for name, elements, step, speeds in runs:
            start = time.perf_counter()
            step()
            speeds.append(elements / (time.perf_counter() - start) / 1e6)
    for name, _, _, speeds in runs:
        ratio = statistics.median(a / b for a, b in zip(runs[0][3], speeds))
        report({"name": name, "mparam_s": round(statistics.median(speeds), 1), "ratio_to_ours": round(ratio, 2)}, args.json)


if __name__ == "__main__":
    main()
