"""Options whose effect is in numbers reach what they are for: draws of tokens, stochastic rounding, what ends a run."""
import json

import numpy
import pytest
from program import needs_torch, run, small, steps_of
from program import work as work  # a fixture
from safetensors.torch import load_file, save_file

pytestmark = needs_torch

SMALL = ["--device", "cpu", "--device-memory", "64MiB", "--host-memory", "64MiB"]


@pytest.fixture
def answers(work):
    """What an untrained model writes with these options, which all draw from its flat logits."""
    run(work, "init", "--config", "config.json", "--out", "model", "--seed", "3")

    def tokens(*options):
        words = ["generate", "--model", "model", "--prompt", "Once upon a time", "--max-new-tokens", "16", "--json", *SMALL]
        return json.loads(run(work, *words, *options).stdout)["tokens"]

    return tokens


def test_each_option_of_draws_changes_them(answers):
    most_likely = answers()
    drawn = answers("--temperature", "1", "--seed", "1")
    assert drawn == answers("--temperature", "1", "--seed", "1") != most_likely
    assert answers("--temperature", "1", "--seed", "2") != drawn
    # Of such bounds each leaves the most likely token alone.
    for bound in ["--top-k", "1"], ["--top-p", "1e-6"], ["--min-p", "1"], ["--temperature", "0"], ["--temperature", "1e-6"]:
        assert answers(*(["--temperature", "1"] if bound[0] != "--temperature" else []), *bound, "--seed", "1") == most_likely, bound
    assert answers("--repetition-penalty", "1e6") != most_likely
    assert len(set(answers("--repetition-penalty", "1e6"))) == 16


def test_the_seed_decides_how_weights_are_rounded(work):
    """All sequences are the same, so that their order is nothing."""
    run(work, "init", "--config", "config.json", "--out", "model")
    numpy.tile(numpy.arange(128, dtype="<u2"), 8).tofile(work / "tokens.bin")

    def trained(out, seed, precision):
        run(work, "train", "--model", "model", "--data", "tokens.bin", "--held-out", "0", "--steps", "2", "--lr", "1e-3", "--out", out, "--seed", seed, "--precision", precision, *small())
        return (work / out / "model.safetensors").read_bytes()

    assert trained("one", "1", "bf16-sr+adam8") == trained("same", "1", "bf16-sr+adam8") != trained("two", "2", "bf16-sr+adam8")
    assert trained("exact", "1", "fp32-master+adam8") == trained("other", "2", "fp32-master+adam8")


def test_skipped_steps_end_a_run_only_in_a_row(work):
    """One byte's row of the embedding is infinite: steps whose sequence has it are skipped."""
    run(work, "init", "--config", "config.json", "--out", "model")
    path = work / "model" / "model.safetensors"
    words = load_file(path)
    words["model.embed_tokens.weight"][7] = float("inf")
    save_file(words, path, {"format": "pt"})
    sequences = numpy.tile(numpy.arange(64, 64 + 128, dtype="<u2"), (40, 1))
    sequences[::4, 5] = 7
    sequences.tofile(work / "tokens.bin")
    train = ["train", "--model", "model", "--data", "tokens.bin", "--held-out", "0", "--steps", "39", "--log-json", "log.json", *small("--micro-batch", "1")]
    run(work, *train, "--out", "out", "--max-skipped", "8")
    skipped = [record["skipped"] for record in steps_of(work / "log.json")]
    rows = "".join("x" if each else " " for each in skipped).split()
    longest = max(map(len, rows))
    assert skipped.count(True) >= 8 > longest and not skipped[-1], "the order of the sequences"
    assert run(work, *train, "--out", "ended", "--max-skipped", longest, ok=False).returncode == 7
