#!/usr/bin/env python3
"""One Llama block on the CPU, and its attention alone, forward and backward: a row of one document, the same row packed with several, and those as rows.

    cmake --build build --target models_speed && .venv/bin/python benchmarks/step/packed.py [--length 4096] [--documents 8] [--program build/models_speed]

Prints medians in ms; the three run in turn. Needs a processor with AVX-512 BF16 (attention in blocks)."""
import argparse
import os
import pathlib
import statistics
import subprocess

ROOT = pathlib.Path(__file__).parents[2]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", default=ROOT / "build" / "models_speed")
    parser.add_argument("--shape", type=int, nargs=4, default=[1024, 2816, 16, 4], help="hidden, intermediate, heads, kv heads")
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--documents", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    options = parser.parse_args()
    if options.length % options.documents:
        parser.error("--documents has to divide --length")
    kinds = {
        "one document": (1, options.length, 1),
        f"packed with {options.documents}": (1, options.length, options.documents),
        f"{options.documents} rows": (options.documents, options.length // options.documents, 1),
    }
    running = {
        name: subprocess.Popen(
            [str(options.program), *map(str, [*options.shape, rows, length, 1000, documents])],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={"OMP_NUM_THREADS": str(options.threads)},
        )
        for name, (rows, length, documents) in kinds.items()
    }  # fmt: skip

    def ask(name, line):
        process = running[name]
        process.stdin.write(line + "\n")
        process.stdin.flush()
        return float(process.stdout.readline().split()[0])

    times = {(name, line): [] for name in running for line in ("attention", "block")}
    for turn in range(options.rounds + 1):  # the first warms up
        for (name, line), seen in times.items():
            elapsed = ask(name, line)
            if turn:
                seen.append(elapsed)
    for name, process in running.items():
        print(f"{name:16s} attention {statistics.median(times[name, 'attention']):8.1f} ms   block {statistics.median(times[name, 'block']):8.1f} ms")
        process.stdin.close()


if __name__ == "__main__":
    main()
