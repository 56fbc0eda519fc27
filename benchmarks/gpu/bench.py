#!/usr/bin/env python3
"""Full fine-tuning on the GPU with state in host memory or storage: tokens a second, model FLOP utilisation and how much of the copying
computation hides, beside the same model resident in plain PyTorch with checkpointing and beside DeepSpeed ZeRO-3 offload where that
installs. One JSON line a run and one a comparison; without a GPU it says what was not measured and succeeds.

    make bench-gpu                                       (or benchmarks/gpu/bench.py --model 1b 7b --storage DIR)

Utilisation is 6 x parameters x tokens over time and the rate of a large bf16 product measured on the same card; recomputation counts
for nothing in it."""
import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).parents[2]
NOT_MEASURED = ["tokens a second and FLOP utilisation of 1B, 7B and the largest model that fits the host", "the ratio to resident PyTorch and to DeepSpeed ZeRO-3 offload",
                "the overlap of copies and computation", "predicted against measured step time"]
BYTES_A_PARAMETER = 8.2  # state, and staged gradients

# hidden, layers, intermediate, heads, key-value heads, vocabulary
SHAPES = {"tiny": (64, 2, 128, 4, 2, 512), "1b": (2048, 18, 7168, 16, 4, 32000), "7b": (4096, 32, 11008, 32, 32, 32000), "13b": (5120, 40, 13824, 40, 40, 32000),
          "32b": (5120, 64, 25600, 40, 8, 151936), "70b": (8192, 80, 28672, 64, 8, 128256)}


def config_of(name):
    hidden, layers, inner, heads, kv, vocabulary = SHAPES[name]
    return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": vocabulary, "hidden_size": hidden, "intermediate_size": inner,
            "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0, "tie_word_embeddings": False, "hidden_act": "silu", "torch_dtype": "bfloat16"}


def parameters_of(name):
    hidden, layers, inner, heads, kv, vocabulary = SHAPES[name]
    attention = hidden * hidden * 2 + 2 * hidden * (hidden // heads) * kv
    return layers * (attention + 3 * hidden * inner + 2 * hidden) + 2 * vocabulary * hidden + hidden


def memory_available():
    for line in pathlib.Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def largest_that_fits(host_bytes):
    """The largest model whose state the host can hold; None where not even 1b fits."""
    fitting = [name for name in SHAPES if name != "tiny" and parameters_of(name) * BYTES_A_PARAMETER < host_bytes]
    return max(fitting, key=parameters_of, default=None)


def merged(intervals):
    out = []
    for begin, end in sorted(intervals):
        if out and begin <= out[-1][1]:
            out[-1][1] = max(out[-1][1], end)
        else:
            out.append([begin, end])
    return out


def hidden_share(events):
    """Of the time in which an upload or download ran, the share in which computation ran too. `events`: a trace of --trace, of which what was
    predicted is left out."""
    processes = {event["pid"]: event["args"]["name"] for event in events if event.get("name") == "process_name"}
    events = [event for event in events if processes.get(event.get("pid"), "measured") == "measured"]
    lanes = {event["tid"]: event["args"]["name"] for event in events if event.get("name") == "thread_name"}
    spans = {"copy": [], "compute": []}
    for event in events:
        if event.get("ph") != "X":
            continue
        lane = lanes.get(event["tid"])
        kind = "copy" if lane in ("upload", "download") else lane
        if kind in spans:
            spans[kind].append((event["ts"], event["ts"] + event["dur"]))
    copies, computing = merged(spans["copy"]), merged(spans["compute"])
    copied = sum(end - begin for begin, end in copies)
    both = sum(max(0, min(a[1], b[1]) - max(a[0], b[0])) for a in copies for b in computing)
    return both / copied if copied else None


def run(command, **more):
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, **more)
    if done.returncode != 0:
        raise RuntimeError((done.stderr or done.stdout).strip().splitlines()[-1] if (done.stderr or done.stdout).strip() else f"exit {done.returncode}")
    return done.stdout


def run_options(args, config, storage):
    """What `train` and `plan` are both told."""
    options = ["--config", config, "--device", args.device, "--sequence-length", args.sequence_length, "--micro-batch", args.micro_batch, "--micro-batches", args.micro_batches]
    if args.device_memory:
        options += ["--device-memory", args.device_memory]
    if storage:
        return [*options, "--storage", storage, "--host-memory", args.streaming_host_memory]
    return [*options, "--host-memory", args.host_memory or str(int(memory_available() * 0.85))]


def tierflow(args, config, folder, storage):
    log, trace = folder / "log.jsonl", folder / "trace.json"
    command = [args.program, "train", *run_options(args, config, storage), "--data", args.data, "--out", folder / "out", "--steps", args.steps, "--eval-sequences", 1,
               "--log-json", log, "--trace", trace]
    run(command)
    subprocess.run(["rm", "-rf", folder / "out"], check=True)
    records = [json.loads(line) for line in log.read_text().splitlines()]
    steps = [r for r in records if "loss" in r and "step" in r][1:]
    energy = [r["gpu"]["energy_per_token_j"] for r in steps if "energy_per_token_j" in r.get("gpu", {})]
    return {"tokens_per_s": statistics.median(r["tokens_per_s"] for r in steps), "step_s": statistics.median(r["step_s"] for r in steps),
            "hidden_share": hidden_share(json.loads(trace.read_text())["traceEvents"]), "limit": records[-1]["summary"]["limit"],
            "device_memory_peak": records[-1]["summary"]["device_memory_peak"], "energy_per_token_j": statistics.median(energy) if energy else None}


def peer(args, script, config):
    out = run([sys.executable, ROOT / script, "--config", config, "--device", args.device, "--sequence-length", args.sequence_length, "--micro-batch", args.micro_batch,
               "--micro-batches", args.micro_batches, "--steps", args.steps, "--clip", 1.0])
    return json.loads(out.splitlines()[-1])


def predicted(args, config, measured):
    """What `tierflow plan` says of the run with its state in host memory, where this version has it."""
    try:
        step = json.loads(run([args.program, "plan", "--json", *run_options(args, config, None)]).splitlines()[-1])["step"]["step_s"]
    except (RuntimeError, ValueError, IndexError, KeyError) as error:
        return f"not verified: {error}"
    return {"step_s": step, "measured_to_predicted": measured["step_s"] / step if measured else None}


def product_rate(device, size):
    """FLOP a second of a large bf16 product."""
    import time

    import torch

    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    best = float("inf")
    for _ in range(5):
        wait()
        begin = time.perf_counter()
        for _ in range(4):
            a @ b
        wait()
        best = min(best, (time.perf_counter() - begin) / 4)
    return 2 * size**3 / best


def gpu_is_here():
    try:
        return subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False).stdout.startswith("GPU")
    except OSError:
        return False


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", default=ROOT / "build/tierflow")
    parser.add_argument("--model", nargs="+", default=["1b", "7b", "largest"], choices=[*SHAPES, "largest"])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="cpu: to try this script out")
    parser.add_argument("--storage", help="folder on a drive: measure with the state there too")
    parser.add_argument("--data", default=pathlib.Path(os.__file__).parent / "json", help="text; its content does not matter")
    parser.add_argument("--sequence-length", type=int, default=4096)
    parser.add_argument("--micro-batch", type=int, default=1)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--device-memory")
    parser.add_argument("--host-memory")
    parser.add_argument("--streaming-host-memory", default="16GiB")
    args = parser.parse_args()
    if args.device == "cuda" and not gpu_is_here():
        print("bench-gpu: SKIPPED: no NVIDIA GPU here (nvidia-smi finds none)")
        for what in NOT_MEASURED:
            print(f"bench-gpu: not verified: {what}")
        return 0
    rate = product_rate(args.device, 8192 if args.device == "cuda" else 256)
    names = []
    for name in args.model:
        name = largest_that_fits(memory_available() * 0.85) if name == "largest" else name
        if name and name not in names:
            names.append(name)
    failed = False
    for name in names:
        with tempfile.TemporaryDirectory() as temporary:
            folder = pathlib.Path(temporary)
            config = folder / "config.json"
            config.write_text(json.dumps(config_of(name)))
            parameters, results = parameters_of(name), {}
            runs = [("tierflow, state in host memory", lambda: tierflow(args, config, folder, None))]
            if args.storage:
                runs.append(("tierflow, state in storage", lambda: tierflow(args, config, folder, args.storage)))
            runs += [("resident PyTorch", lambda: peer(args, "benchmarks/step/resident.py", config)),
                     ("DeepSpeed ZeRO-3 offload", lambda: peer(args, "benchmarks/gpu/zero3.py", config))]
            for label, measure in runs:
                try:
                    results[label] = measure()
                    line = {**results[label], "flop_utilisation": 6 * parameters * results[label]["tokens_per_s"] / rate}
                except RuntimeError as error:  # a peer that does not fit or is not installed is a finding
                    line = {"not_verified": str(error)}
                    failed = failed or label.startswith("tierflow")
                print(json.dumps({"model": name, "parameters": parameters, "run": label, **line}), flush=True)
            ours = results.get("tierflow, state in host memory")
            ratios = {label: ours["tokens_per_s"] / other["tokens_per_s"] for label, other in results.items() if ours and other is not ours}
            print(json.dumps({"model": name, "ratio_to": ratios, "measured_product_tflops": rate / 1e12, "predicted": predicted(args, config, ours)}), flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
