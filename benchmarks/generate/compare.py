#!/usr/bin/env python3
"""Generated tokens a second: weights resident, weights on storage, and transformers with everything resident, in turn. One JSON line for each number of sequences;
medians of rounds. `lane` is the share of the time for which the slowest lane was busy: 1 means that nothing but that link or the compute limits it. `busy_after_prompts` leaves out the
prompts' pass, which computes for all their tokens while the drive waits: it is taken from a long run less a short one.

    .venv/bin/python benchmarks/generate/compare.py --storage DIR [--rounds 3] [--sequences 1 8 32]

The model is made there from --config with random weights, and removed."""
import argparse
import json
import pathlib
import shutil
import statistics
import sys
import time

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks/step"))

from layers import checked  # noqa: E402

FEW_TOKENS = 12
PROMPT = "The quick brown fox jumps over the lazy dog and goes its way"


def ours(args, sequences, storage, tokens):
    log = args.folder / "log.jsonl"
    for old in args.folder.glob("log.jsonl*"):
        old.unlink()
    prompts = args.folder / "prompts.txt"
    prompts.write_text((PROMPT + "\n") * sequences)
    budgets = ["--device-memory", args.device_memory, "--host-memory", args.host_memory, "--storage", args.folder / "store"] if storage else ["--device-memory", "4GiB", "--host-memory", "4GiB"]
    checked([args.program, "generate", "--model", args.folder / "model", "--prompts", prompts, "--max-new-tokens", tokens, "--temperature", 0, "--device", "cpu", *budgets, "--json", "--log-json", log])
    return json.loads(log.read_text().splitlines()[-1])["generation"]


def busy_after_prompts(args, sequences, long):
    short = ours(args, sequences, True, FEW_TOKENS)
    if short["slowest_lane"] != long["slowest_lane"]:
        return None
    return (long["slowest_lane_busy"] * long["seconds"] - short["slowest_lane_busy"] * short["seconds"]) / (long["seconds"] - short["seconds"])


def peer(args, model, sequences):
    import torch

    ids = torch.tensor([list(PROMPT.encode())] * sequences)
    began = time.perf_counter()
    with torch.no_grad():
        model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=args.tokens, min_new_tokens=args.tokens, pad_token_id=0)
    return sequences * args.tokens / (time.perf_counter() - began)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--storage", type=pathlib.Path, required=True, help="folder on the drive to measure; a folder `generate` is made in it, and removed")
    parser.add_argument("--program", default=ROOT / "build/tierflow")
    parser.add_argument("--config", default=ROOT / "benchmarks/step/llama-152m.json")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device-memory", default="192MiB")
    parser.add_argument("--host-memory", default="32MiB")
    args = parser.parse_args()
    args.folder = args.storage / "generate"
    args.folder.mkdir(parents=True)
    try:
        checked([args.program, "init", "--config", args.config, "--out", args.folder / "model"])
        import torch
        import transformers

        model = transformers.AutoModelForCausalLM.from_pretrained(args.folder / "model", dtype=torch.bfloat16).eval()
        for sequences in args.sequences:
            resident, streamed, theirs, later = [], [], [], []
            for _ in range(args.rounds):
                resident.append(ours(args, sequences, False, args.tokens))
                streamed.append(ours(args, sequences, True, args.tokens))
                later.append(busy_after_prompts(args, sequences, streamed[-1]))
                theirs.append(peer(args, model, sequences))
            rate = {name: statistics.median(each["tokens_per_s"] for each in runs) for name, runs in (("resident", resident), ("streamed", streamed))}
            transformers_rate = statistics.median(theirs)
            print(json.dumps({
                "sequences": sequences, "tokens_per_s": {**rate, "transformers": transformers_rate},
                "resident_beside_transformers": rate["resident"] / transformers_rate,
                "lane": {name: {"busy": statistics.median(each["slowest_lane_busy"] for each in runs), "name": runs[-1]["slowest_lane"]}
                         for name, runs in (("resident", resident), ("streamed", streamed))},
                "busy_after_prompts": None if None in later else statistics.median(later),
            }), flush=True)
    finally:
        shutil.rmtree(args.folder, ignore_errors=True)


if __name__ == "__main__":
    main()
