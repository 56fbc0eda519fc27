#!/usr/bin/env python3
"""Storage bandwidth against fio: the same file, size, block and depth, the two sides alternating, medians.

    benchmarks/storage/compare_fio.py --program build/tierflow --dir /mnt/nvme [--size 2G] [--blocks 256K,1M,4M,16M]

Our buffers lie in transparent huge pages where the system has them, and a virtual drive may be twice as fast with them. A comparison of
equals therefore takes them from us (--pages small) or gives fio the same (--pages huge, with enough of them in vm.nr_hugepages).

Prints one JSON object a line: block, phase, ours and fio in GB/s (10^9 bytes), ratio of the medians, fio's engine."""
import argparse
import ctypes
import json
import pathlib
import shutil
import statistics
import subprocess
import sys

DATA_START = 1 << 20  # the header of the data file is left alone


def size(text):
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    return int(text[:-1]) * units[text[-1]] if text[-1] in units else int(text)


def small_pages():
    if ctypes.CDLL(None).prctl(41, 1, 0, 0, 0) != 0:  # PR_SET_THP_DISABLE, inherited by what is run
        raise OSError("transparent huge pages cannot be turned off for this process")


def ours(args, phase, block):
    out = subprocess.run(
        [args.program, "bench", "storage", "--json", "--dir", args.dir, "--size", str(size(args.size)), "--block", str(block),
         "--depth", str(args.depth), "--engine", args.engine, "--measure", phase, "--keep", "--seconds", str(args.seconds)],
        check=True, capture_output=True, text=True).stdout
    line = json.loads(out.splitlines()[0])
    return line[{"write": "write_gb_s", "read": "read_gb_s", "mixed": "mixed_gb_s"}[phase]]


def fio(args, phase, block, engine):
    job = ["fio", "--name=peer", f"--filename={args.dir}/tierflow-bench.tfv", f"--ioengine={engine}", "--direct=1",
           f"--bs={block}", f"--iodepth={args.depth}", f"--offset={DATA_START}", f"--size={size(args.size)}",
           "--output-format=json", "--allow_file_create=0", "--overwrite=1", "--fallocate=none", "--thread"]
    job.append("--rw=" + {"write": "write", "read": "read", "mixed": "rw"}[phase])
    job.append("--iomem=" + ("shmhuge" if args.pages == "huge" else "malloc"))
    if args.seconds > 0:
        job += ["--time_based", f"--runtime={args.seconds}"]
    if engine == "io_uring":
        job += ["--fixedbufs", "--registerfiles"]
    data = json.loads(subprocess.run(job, check=True, capture_output=True, text=True).stdout)["jobs"][0]
    return (data["read"]["bw_bytes"] + data["write"]["bw_bytes"]) / 1e9


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", required=True)
    parser.add_argument("--engine", default="io_uring", help="ours")
    parser.add_argument("--dir", required=True)
    parser.add_argument("--size", default="2G")
    parser.add_argument("--blocks", default="256K,1M,4M,16M")
    parser.add_argument("--phases", default="write,read,mixed")
    parser.add_argument("--depth", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0)
    parser.add_argument("--fio-engines", default="io_uring,libaio")
    parser.add_argument("--pages", choices=("small", "huge", "each"), default="small", help="each: ours huge where possible, fio's small")
    args = parser.parse_args()
    if not shutil.which("fio"):
        sys.exit("fio is not installed: apt-get install fio")
    if args.pages == "small":
        small_pages()
    pathlib.Path(args.dir).mkdir(parents=True, exist_ok=True)
    data = pathlib.Path(args.dir) / "tierflow-bench.tfv"
    if data.exists():
        sys.exit(f"{data} is in the way")
    try:
        for block in map(size, args.blocks.split(",")):
            ours(args, "write", block)  # creates and fills the file
            for phase in args.phases.split(","):
                sides = {"ours": lambda: ours(args, phase, block)}
                for engine in args.fio_engines.split(","):
                    sides[engine] = lambda engine=engine: fio(args, phase, block, engine)
                seen = {name: [] for name in sides}
                names = list(sides)
                for round_number in range(args.rounds):
                    for name in names if round_number % 2 == 0 else reversed(names):
                        seen[name].append(sides[name]())
                medians = {name: statistics.median(values) for name, values in seen.items()}
                best = max((name for name in medians if name != "ours"), key=medians.get)
                print(json.dumps({
                    "block": block, "phase": phase, "depth": args.depth, "pages": args.pages, "ours_gb_s": round(medians["ours"], 3),
                    "fio_gb_s": round(medians[best], 3), "fio_engine": best, "ratio": round(medians["ours"] / medians[best], 3),
                    "ours_all": [round(v, 2) for v in seen["ours"]], "fio_all": [round(v, 2) for v in seen[best]]}), flush=True)
            data.unlink(missing_ok=True)
    finally:
        data.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
