#!/usr/bin/env python3
"""How long `tierflow plan` takes for published models, from their config.json alone, once the machine and the model's stages are measured: seconds of the clock and
of the processor, medians, with the parameters that it counts.

    .venv/bin/python benchmarks/plan/published.py [--rounds 3] [--micro-batches 1]

The plans need more storage than most drives have free; that is no error here. One JSON object."""
import argparse
import json
import os
import pathlib
import resource
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).parents[2]
OPT = ROOT / "benchmarks/step/opt-175b-2-layers.json"

MODELS = {
    "gpt-oss-120b": {
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "attention_bias": True, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880, "intermediate_size": 2880,
        "layer_types": ["sliding_attention", "full_attention"] * 18, "max_position_embeddings": 131072, "num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": 36,
        "num_key_value_heads": 8, "num_local_experts": 128, "quantization_config": {"modules_to_not_convert": ["model.layers.*.self_attn"], "quant_method": "mxfp4"}, "rms_norm_eps": 1e-05,
        "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096, "rope_type": "yarn", "truncate": False}, "rope_theta": 150000,
        "sliding_window": 128, "swiglu_limit": 7.0, "tie_word_embeddings": False, "vocab_size": 201088},
    "GLM-4.5-Air": {
        "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "attention_bias": True, "first_k_dense_replace": 1, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096,
        "intermediate_size": 10944, "max_position_embeddings": 131072, "moe_intermediate_size": 1408, "n_group": 1, "n_routed_experts": 128, "n_shared_experts": 1, "norm_topk_prob": True,
        "num_attention_heads": 96, "num_experts_per_tok": 8, "num_hidden_layers": 46, "num_key_value_heads": 8, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-05, "rope_theta": 1000000,
        "routed_scaling_factor": 1.0, "tie_word_embeddings": False, "topk_group": 1, "use_qk_norm": False, "vocab_size": 151552},
    "Qwen3-235B-A22B": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "attention_bias": False, "decoder_sparse_step": 1, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096,
        "intermediate_size": 12288, "max_position_embeddings": 40960, "mlp_only_layers": [], "moe_intermediate_size": 1536, "norm_topk_prob": True, "num_attention_heads": 64, "num_experts": 128,
        "num_experts_per_tok": 8, "num_hidden_layers": 94, "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_theta": 1000000, "tie_word_embeddings": False, "vocab_size": 151936},
    "OPT-175B": {**json.loads(OPT.read_text()), "num_hidden_layers": 96},
}


def plan(args, folder, name):
    """The plan, with the seconds that it took."""
    begun, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    words = [args.program, "plan", "--json", "--config", folder / f"{name}.json", "--storage", folder / "storage", "--device", "cpu", "--device-memory", args.device_memory,
             "--host-memory", args.host_memory, "--sequence-length", 128 if name == "OPT-175B" else args.sequence_length, "--micro-batch", 1, "--micro-batches", args.micro_batches]
    done = subprocess.run([*map(str, words)], capture_output=True, text=True, env={**os.environ, "XDG_CACHE_HOME": str(folder / "cache")})
    if not done.stdout:
        sys.exit(done.stderr)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {**json.loads(done.stdout), "wall_s": time.monotonic() - begun, "cpu_s": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", default=ROOT / "build/tierflow")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--micro-batches", type=int, default=1)
    parser.add_argument("--sequence-length", type=int, default=1024)
    parser.add_argument("--host-memory", default="4GiB")
    parser.add_argument("--device-memory", default="11GiB")
    args = parser.parse_args()
    results = {}
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        for model, config in MODELS.items():
            (folder / f"{model}.json").write_text(json.dumps(config))
            plan(args, folder, model)  # measures
            rounds = [plan(args, folder, model) for _ in range(args.rounds)]
            results[model] = {"parameters": rounds[0]["model"]["parameters"], **{key: round(statistics.median(each[key] for each in rounds), 2) for key in ("wall_s", "cpu_s")}}
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
