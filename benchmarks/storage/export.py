#!/usr/bin/env python3
"""How fast a state is verified and exported, beside what the drive reads and writes (`tierflow bench storage`: blocks of 4 MiB, 32 requests in flight), in turn; and how
much longer a run takes with `--export-every`. Medians.

    .venv/bin/python benchmarks/storage/export.py --storage DIR [--rounds 3] [--training-rounds 3] [--every 5] [--export-bandwidth 200MiB]

"verify_share_of_drive" is the speed of verifying divided by that of the drive's reads; "verify_share_of_fio", with --fio, divides by that
at which fio reads the state's own file, the mean of before and after. `bench storage` reads what it has just written, and a virtual drive may be quicker with that. An export reads the weights from the state, writes them into a new file, and reads
the result once more: "share_of_drive" is the time that the drive takes for these three one after the other, divided by the export's time without what the export of a model
of 0.1 MB takes (start_s: loading LibTorch, ending). The writes that count are those to blocks of a file that were never written before, "first" writes.
"share_of_drive_with_start" divides by the time of the whole command, "share_of_overwriting" counts the drive's writes to blocks that were written before.
--training-rounds 0 leaves out the runs with `--export-every`, --rounds 0 all but these.

One JSON object."""
import argparse
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).parents[2]


def run(*command):
    begun = time.monotonic()
    done = subprocess.run([*map(str, command)], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(done.stderr)
    return time.monotonic() - begun


def train(args, steps, *more):
    return [args.program, "train", *([] if "--config" in more else ["--config", args.config]), "--storage", args.folder / "state", "--device", "cpu", "--device-memory", args.device_memory, "--host-memory", args.host_memory,
            "--sequence-length", args.sequence_length, "--micro-batch", args.micro_batch, "--data", args.data, "--held-out", 0, "--steps", steps, "--lr-schedule", "constant", "--durability", "step",
            "--log-json", args.folder / "log.json", *more]


def log_of(args):
    return [json.loads(line) for line in (args.folder / "log.json").read_text().splitlines()]


def anew(args):
    shutil.rmtree(args.folder, ignore_errors=True)
    args.folder.mkdir(parents=True)


def bandwidths(args):
    """Of the drive, in bytes a second: reading, writing, and writing what was never written before."""
    words = [args.program, "bench", "storage", "--dir", args.folder / "bench", "--size", "4GiB", "--block", "4MiB", "--engine", args.engine, "--json"]
    measured = json.loads(subprocess.run([*map(str, words)], capture_output=True, text=True, check=True).stdout)
    return [1e9 * measured[key] for key in ("read_gb_s", "write_gb_s", "first_write_gb_s")]


def fio_reads(args, seconds=3):
    """Bytes a second at which fio reads the largest of the state's files, past the page cache, from huge pages: the best of two sizes of blocks."""
    state = max((args.folder / "state").iterdir(), key=lambda path: path.stat().st_size)
    found = []
    for block in "1M", "4M":
        words = ["fio", "--name=state", "--readonly", f"--filename={state}", "--rw=read", f"--bs={block}", "--iodepth=32", "--direct=1", "--ioengine=io_uring", "--iomem=mmaphuge",
                 f"--runtime={seconds}", "--time_based", "--output-format=json"]
        done = subprocess.run(words, capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(f"fio: {done.stderr or done.stdout}; it takes 128 MiB of huge pages (sysctl vm.nr_hugepages=64)")
        found.append(json.loads(done.stdout)["jobs"][0]["read"]["bw_bytes"])
    return max(found)


def start_seconds(args):
    """Of an export that has next to nothing to move."""
    anew(args)
    small = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 512, "head_dim": 32}
    config = args.folder / "small.json"
    config.write_text(json.dumps({**json.loads(pathlib.Path(args.config).read_text()), **small}))
    run(*train(args, 1, "--config", config, "--no-export"))
    return statistics.median(run(args.program, "export", "--storage", args.folder / "state", "--out", args.folder / f"out-{turn}") for turn in range(5))


def training_seconds(args, *more):
    """Of 2 N steps after the first N, with what they wait for exports between them; and the exports."""
    anew(args)
    run(*train(args, 3 * args.every + 1, "--out", args.folder / "out", *more))
    log = log_of(args)
    steps = [record["step_s"] for record in log if "loss" in record][args.every :]
    exports = [record["exported"] for record in log if "exported" in record]
    return sum(steps) + sum(each["waited"] for each in exports[1:]), exports


def exports_while_training(args):
    """The same run with and without exports, in turn."""
    rounds = []
    for _ in range(args.training_rounds):
        without, _ = training_seconds(args)
        with_exports, exports = training_seconds(args, "--export-every", args.every, "--export-keep", 1, *(["--export-bandwidth", args.export_bandwidth] if args.export_bandwidth else []))
        rounds.append({"step_s": without / (2 * args.every + 1), "export_s": statistics.median(each["seconds"] for each in exports), "slowed_by": with_exports / without - 1,
                       "beside": all(each["beside"] for each in exports)})
    return {"every": args.every, "export_bandwidth": args.export_bandwidth or None, "rounds": rounds, "slowed_by": statistics.median(each["slowed_by"] for each in rounds)}


def at_rest(args):
    start = start_seconds(args)
    anew(args)
    run(*train(args, 1, "--no-export"))
    out = args.folder / "out"
    rounds = []
    for _ in range(args.rounds):
        by_fio = fio_reads(args) if args.fio else None
        verified = json.loads(subprocess.run([args.program, "verify", args.folder / "state", "--json"], capture_output=True, text=True, check=True).stdout)
        by_fio = (by_fio + fio_reads(args)) / 2 if args.fio else None
        shutil.rmtree(out, ignore_errors=True)
        seconds = run(args.program, "export", "--storage", args.folder / "state", "--out", out)
        size = sum(path.stat().st_size for path in out.iterdir())
        read, write, first = bandwidths(args)
        verify = verified["bytes"] / verified["seconds"]
        drive = 2 * size / read + size / first
        rounds.append({"verify_gb_s": verify / 1e9, "verify_share_of_drive": verify / read, **({"fio_read_gb_s": by_fio / 1e9, "verify_share_of_fio": verify / by_fio} if args.fio else {}), "export_s": seconds, "drive_read_gb_s": read / 1e9, "drive_write_gb_s": write / 1e9,
                       "drive_first_write_gb_s": first / 1e9, "share_of_drive": drive / (seconds - start), "share_of_drive_with_start": drive / seconds,
                       "share_of_overwriting": (2 * size / read + size / write) / (seconds - start)})
    medians = {key: statistics.median(each[key] for each in rounds) for key in rounds[0]}
    return {"exported_bytes": size, "state_bytes": verified["bytes"], "start_s": start, **medians, "rounds": rounds}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--storage", type=pathlib.Path, required=True, help="folder on the drive to measure; a folder `export` is made in it, and removed")
    parser.add_argument("--program", default=ROOT / "build/tierflow")
    parser.add_argument("--config", default=ROOT / "benchmarks/step/llama-1.1b.json")
    parser.add_argument("--data", default=pathlib.Path(os.__file__).parent / "json", help="text; its content does not matter")
    parser.add_argument("--rounds", type=int, default=3, help="of verifying and exporting")
    parser.add_argument("--training-rounds", type=int, default=3, help="of the runs with and without `--export-every`")
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument("--export-bandwidth", default="", help="as the option of `tierflow train`: bytes a second at which a model is written beside training")
    parser.add_argument("--engine", default="io_uring", help="of the drive's speed")
    parser.add_argument("--fio", action="store_true", help="how fast fio reads the state's file, too")
    parser.add_argument("--micro-batch", type=int, default=1)
    parser.add_argument("--host-memory", default="512MiB")
    parser.add_argument("--device-memory", default="2GiB")
    args = parser.parse_args()
    args.sequence_length = min(512, json.loads(pathlib.Path(args.config).read_text()).get("max_position_embeddings", 512))
    if args.fio and not shutil.which("fio"):
        sys.exit("fio is not installed: apt-get install fio")
    args.folder = args.storage / "export"
    beside = exports_while_training(args) if args.training_rounds else None
    result = at_rest(args) if args.rounds else {}
    shutil.rmtree(args.folder)
    print(json.dumps({**result, "while_training": beside}, indent=1))


if __name__ == "__main__":
    main()
