#!/usr/bin/env python3
"""What generating with a mixture of experts on storage reads in a pass and how many tokens a second it gives, with several programs in turn. One JSON line for each program and
number of sequences; medians of rounds. The bytes are those that the kernel counts for the process, of a long run less those of a short one: loading and the prompts' pass drop out. Tokens are drawn, so that a model of random weights does not repeat itself.

    .venv/bin/python benchmarks/generate/experts.py --storage DIR --programs before=PATH now=build/tierflow [--rounds 3] [--sequences 1 8]

The model is made there from --config with random weights, and removed."""
import argparse
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks/step"))

from layers import checked  # noqa: E402

PROMPTS = ["The quick brown fox", "jumps over", "a lazy dog and goes", "its way", "Once upon a time", "in 1984", "two and two", "are four"]


def generation(args, program, sequences, tokens):
    log, prompts = args.folder / "log.jsonl", args.folder / "prompts.txt"
    for old in args.folder.glob("log.jsonl*"):
        old.unlink()
    prompts.write_text("".join(PROMPTS[i % len(PROMPTS)] + "\n" for i in range(sequences)))
    words = [program, "generate", "--model", args.folder / "model", "--prompts", prompts, "--max-new-tokens", tokens, "--temperature", 1, "--seed", 1, "--device", "cpu", "--device-memory", args.device_memory,
             "--host-memory", args.host_memory, "--storage", args.folder / "store", "--json", "--log-json", log]
    errors = args.folder / "errors.txt"
    with errors.open("w") as to:
        child = subprocess.Popen([str(word) for word in words], stdout=subprocess.PIPE, stderr=to, text=True)
    out = child.stdout.read()
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode != 0:
        raise SystemExit(errors.read_text())
    return json.loads(log.read_text().splitlines()[-1])["generation"], usage.ru_inblock * 512, out


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--storage", type=pathlib.Path, required=True, help="folder on the drive to measure; a folder `experts` is made in it, and removed")
    parser.add_argument("--programs", nargs="+", default=[f"now={ROOT / 'build/tierflow'}"], metavar="NAME=PATH")
    parser.add_argument("--config", default=pathlib.Path(__file__).parent / "mixtral-16-experts.json")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, nargs=2, default=[4, 36], help="of the short run and of the long one")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device-memory", default="192MiB")
    parser.add_argument("--host-memory", default="32MiB")
    args = parser.parse_args()
    args.folder = args.storage / "experts"
    args.folder.mkdir(parents=True)
    programs = dict(word.split("=", 1) for word in args.programs)
    try:
        checked([next(iter(programs.values())), "init", "--config", args.config, "--out", args.folder / "model"])
        for sequences in args.sequences:
            found = {name: [] for name in programs}
            texts = set()
            for _ in range(args.rounds):
                for name, program in programs.items():
                    short, read_short, _ = generation(args, program, sequences, args.tokens[0])
                    long, read_long, text = generation(args, program, sequences, args.tokens[1])
                    texts.add(text)
                    seconds = (long["seconds"] - short["seconds"]) / (args.tokens[1] - args.tokens[0])
                    found[name].append({"mb_a_pass": 1e-6 * (read_long - read_short) / (args.tokens[1] - args.tokens[0]), "tokens_per_s": sequences / seconds, "whole_run": long["tokens_per_s"],
                                        "lane_busy": long["slowest_lane_busy"], "lane": long["slowest_lane"], "experts": long.get("experts")})
            for name, runs in found.items():
                print(json.dumps({"program": name, "sequences": sequences, **{key: statistics.median(run[key] for run in runs) for key in ("mb_a_pass", "tokens_per_s", "whole_run", "lane_busy")},
                                  "lane": runs[-1]["lane"], "experts": runs[-1]["experts"], "all_give_the_same_text": len(texts) == 1}), flush=True)
    finally:
        shutil.rmtree(args.folder, ignore_errors=True)


if __name__ == "__main__":
    main()
