"""What torch's matrix products of bf16 and fp32 reach on this processor: .venv/bin/python benchmarks/step/products.py
One JSON line each: square size, type, which operand is transposed, GFLOP/s of the best of ten."""

import json
import time

import torch

WAYS = {"none": lambda a, b: a @ b, "right": lambda a, b: a @ b.t(), "left": lambda a, b: a.t() @ b}


def best(work, turns=10):
    seconds = []
    for _ in range(turns):
        begin = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


if __name__ == "__main__":
    print(json.dumps({"processor": torch.backends.cpu.get_cpu_capability(), "threads": torch.get_num_threads()}))
    for size in (512, 1024):
        for kind in (torch.bfloat16, torch.float32):
            a, b = (torch.randn(size, size).to(kind) for _ in range(2))
            for transposed, product in WAYS.items():
                print(json.dumps({"size": size, "type": str(kind), "transposed": transposed, "gflops": round(2 * size**3 / best(lambda: product(a, b)) / 1e9, 2)}))
