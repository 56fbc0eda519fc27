#!/usr/bin/env python3
"""What the stored precision costs in loss: the same small Llama, data and seeds under each --precision.

    benchmarks/optimizer/quality.py --program build/tierflow --data TEXT [--steps 500] [--seeds 3] [--plot docs/quality.svg]

Prints one JSON object a run (precision, seed, held-out loss before and after, mean training loss of the last tenth), then one a precision:
the mean held-out loss over the seeds and its ratio to fp32-master+adam32's.
"""
import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile

PRECISIONS = ["fp32-master+adam32", "fp32-master+adam8", "bf16-sr+adam8"]
COLOURS = {"fp32-master+adam32": "#333333", "fp32-master+adam8": "#1f77b4", "bf16-sr+adam8": "#d62728"}
CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 256, "hidden_size": 192, "intermediate_size": 512,
          "num_hidden_layers": 4, "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
          "tie_word_embeddings": False, "hidden_act": "silu", "torch_dtype": "bfloat16"}


def run(arguments, folder, precision, seed):
    log = folder / f"{precision}-{seed}.jsonl"
    command = [arguments.program, "train", "--config", folder / "config.json", "--data", arguments.data, "--out", folder / f"{precision}-{seed}",
               "--device", "cpu", "--device-memory", "512MiB", "--host-memory", "512MiB", "--sequence-length", "256", "--micro-batch", "4", "--steps",
               arguments.steps, "--lr", "1e-3", "--warmup", arguments.steps // 10, "--precision", precision, "--seed", seed, "--log-json", log]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{precision}, seed {seed}: {done.stderr.strip().splitlines()[-1]}")
    records = [json.loads(line) for line in log.read_text().splitlines()]
    losses = [record["loss"] for record in records if "loss" in record and "step" in record]
    summary = next(record["summary"] for record in records if "summary" in record)
    return losses, summary


def smooth(losses, share=0.95):
    """Exponential mean, without its bias at the start."""
    mean, weight, out = 0.0, 0.0, []
    for loss in losses:
        mean, weight = share * mean + (1 - share) * loss, share * weight + (1 - share)
        out.append(mean / weight)
    return out


def plot(path, curves, steps):
    """curves: precision -> list of losses by step, mean over the seeds."""
    width, height, left, bottom = 720, 400, 60, 50
    top = max(curve[0] for curve in curves.values())
    low = min(min(curve) for curve in curves.values())
    x = lambda step: left + (width - left - 20) * step / max(1, steps - 1)
    y = lambda loss: 20 + (height - bottom - 20) * (top - loss) / (top - low)
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">',
             f'<rect width="{width}" height="{height}" fill="white"/>']
    for i in range(6):
        loss, step = low + (top - low) * i / 5, round((steps - 1) * i / 5)
        parts.append(f'<line x1="{left}" x2="{width - 20}" y1="{y(loss):.1f}" y2="{y(loss):.1f}" stroke="#dddddd"/>'
                     f'<text x="{left - 8}" y="{y(loss) + 4:.1f}" text-anchor="end">{loss:.2f}</text>'
                     f'<text x="{x(step):.1f}" y="{height - bottom + 18}" text-anchor="middle">{step + 1}</text>')
    parts.append(f'<text x="{(left + width) / 2}" y="{height - 12}" text-anchor="middle">step</text>'
                 f'<text x="16" y="{height / 2}" text-anchor="middle" transform="rotate(-90 16 {height / 2})">training loss, smoothed, mean over the seeds</text>')
    for row, (name, curve) in enumerate(curves.items()):
        points = " ".join(f"{x(i):.1f},{y(loss):.1f}" for i, loss in enumerate(curve))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{COLOURS[name]}" stroke-width="1.5"/>'
                     f'<rect x="{width - 210}" y="{34 + 20 * row}" width="14" height="3" fill="{COLOURS[name]}"/>'
                     f'<text x="{width - 190}" y="{40 + 20 * row}">{name}</text>')
    path.write_text("\n".join([*parts, "</svg>", ""]))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", required=True, type=pathlib.Path)
    parser.add_argument("--data", required=True, type=pathlib.Path)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--plot", type=pathlib.Path)
    arguments = parser.parse_args()
    held_out, curves = {name: [] for name in PRECISIONS}, {name: [] for name in PRECISIONS}
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        (folder / "config.json").write_text(json.dumps(CONFIG))
        for seed in range(arguments.seeds):
            for precision in PRECISIONS:
                losses, summary = run(arguments, folder, precision, seed)
                held_out[precision].append(summary["held_out_loss_after"])
                curves[precision].append(smooth(losses))
                print(json.dumps({"precision": precision, "seed": seed, "held_out_before": summary["held_out_loss_before"],
                                  "held_out_after": summary["held_out_loss_after"],
                                  "training_last_tenth": statistics.fmean(losses[-max(1, len(losses) // 10):])}), flush=True)
    reference = statistics.fmean(held_out[PRECISIONS[0]])
    for precision in PRECISIONS:
        mean = statistics.fmean(held_out[precision])
        print(json.dumps({"precision": precision, "held_out_mean": mean, "ratio": mean / reference}))
    if arguments.plot:
        plot(arguments.plot, {p: [statistics.fmean(values) for values in zip(*curves[p])] for p in PRECISIONS}, arguments.steps)


if __name__ == "__main__":
    main()
