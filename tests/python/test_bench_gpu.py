"""benchmarks/gpu and `make test-gpu`: what can be tried without a GPU, and that both say what they did not verify."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from conftest import ROOT

SCRIPT = ROOT / "benchmarks/gpu/bench.py"


@pytest.fixture(scope="module")
def bench():
    spec = importlib.util.spec_from_file_location("gpu_bench", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def without_gpu(tmp_path):
    """A search path whose nvidia-smi finds nothing."""
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 'No devices were found' >&2\nexit 6\n")
    smi.chmod(0o755)
    return {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}


@pytest.mark.parametrize("command, name", [([sys.executable, SCRIPT], "bench-gpu"), ([ROOT / "tools/test_gpu.sh"], "test-gpu")])
def test_without_a_gpu_it_says_what_was_not_verified(command, name, tmp_path):
    done = subprocess.run(command, capture_output=True, text=True, env=without_gpu(tmp_path))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith(f"{name}: SKIPPED: no NVIDIA GPU here")
    assert len(lines) >= 4 and all(line.startswith(f"{name}: not verified: ") for line in lines[1:])


def test_parameters_are_counted_as_the_model_has_them(bench):
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**bench.config_of("tiny")))
    assert bench.parameters_of("tiny") == sum(p.numel() for p in model.parameters())
    assert 0.9e9 < bench.parameters_of("1b") < 1.4e9
    assert 6.5e9 < bench.parameters_of("7b") < 7.0e9


def test_the_largest_model_is_chosen_by_memory(bench):
    assert bench.largest_that_fits(1 << 30) is None
    assert bench.largest_that_fits(64 << 30) == "7b"
    assert bench.largest_that_fits(10**13) == "70b"


def test_hidden_share_of_a_trace(bench):
    def lane(tid, name):
        return {"name": "thread_name", "ph": "M", "tid": tid, "args": {"name": name}}

    def slice_(tid, begin, end):
        return {"name": "x", "ph": "X", "tid": tid, "ts": begin, "dur": end - begin}

    lanes = [lane(0, "upload"), lane(1, "download"), lane(2, "compute"), lane(3, "update")]
    events = [*lanes, slice_(0, 0, 10), slice_(1, 5, 20), slice_(2, 10, 30), slice_(3, 0, 100)]
    assert bench.hidden_share(events) == 0.5  # copies from 0 to 20, half of that beside computation
    assert bench.hidden_share(lanes) is None
    # What `train --trace` draws beside it as predicted is another process with the same lanes.
    processes = [{"name": "process_name", "ph": "M", "pid": pid, "args": {"name": name}} for pid, name in ((1, "measured"), (2, "predicted"))]
    both = [*processes, *({**event, "pid": 1} for event in events), *({**event, "pid": 2} for event in [*lanes, slice_(2, 0, 20)])]
    assert bench.hidden_share(both) == 0.5


def test_runs_and_compares_on_the_cpu(tierflow):
    done = subprocess.run([sys.executable, SCRIPT, "--program", tierflow, "--device", "cpu", "--model", "tiny", "--sequence-length", "64", "--micro-batches", "2", "--steps", "3",
                           "--device-memory", "64MiB", "--host-memory", "64MiB"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    *runs, comparison = [json.loads(line) for line in done.stdout.splitlines()]
    ours, resident, deepspeed = runs
    assert ours["tokens_per_s"] > 0 and ours["flop_utilisation"] > 0 and 0 <= ours["hidden_share"] <= 1
    assert resident["tokens_per_s"] > 0
    assert "GPU alone" in deepspeed["not_verified"]
    assert comparison["ratio_to"]["resident PyTorch"] == pytest.approx(ours["tokens_per_s"] / resident["tokens_per_s"])
