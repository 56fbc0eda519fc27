"""All tokens of a mixture of experts on one expert. And, of a mixture and a dense model, steps that are cut into other micro-batches."""
import pytest
import torch
from program import changed, needs_torch, run, small, steps_of
from safetensors.torch import load_file, save_file
from test_families import saved
from test_models import CONFIGS, SMALL, gpt_oss, llama4

transformers = pytest.importorskip("transformers")
pytestmark = needs_torch

LENGTH = ["--sequence-length", "48"]
STREAMED = ["--storage", "state", "--host-memory", "2MiB"]


def change(folder, edit):
    """The folder's weights as edit(name, tensor) gives them; nothing: as they are."""
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        edited = edit(name, tensor)
        tensors[name] = tensor if edited is None else edited.to(tensor.dtype)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return tensors


def train(work, out, *more):
    run(work, "train", "--model", "model", "--data", "text.txt", "--out", out, "--held-out", "0", "--log-json", f"{out}.json", *small(*LENGTH, *more))
    return load_file(work / out / "model.safetensors")


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def is_router(name):
    return name.endswith(("mlp.gate.weight", "block_sparse_moe.gate.weight", "mlp.router.weight", "router.layer.weight", "feed_forward.router.weight"))


# Of equal scores those of the first experts are taken, so a router of zeros sends every token to the first; gpt-oss has a bias to say it with.
ON_ONE = {
    "mixtral": (lambda: transformers.MixtralConfig(**SMALL, num_local_experts=4, num_experts_per_tok=1), 0),
    "qwen3_moe": (lambda: transformers.Qwen3MoeConfig(**SMALL, head_dim=16, num_experts=5, num_experts_per_tok=1, moe_intermediate_size=48, norm_topk_prob=True), 0),
    "gpt_oss": (lambda: gpt_oss(num_local_experts=4, num_experts_per_tok=1), 2),
    "llama4": (lambda: llama4(num_local_experts=4), 0),
}


@pytest.mark.parametrize("family", ON_ONE)
def test_all_tokens_on_one_expert(family, work):
    """Streamed as resident; the experts that get none do not move, where nothing decays."""
    config, taken = ON_ONE[family]
    saved(config(), work / "model")

    def on_one(name, tensor):
        if is_router(name):
            return torch.zeros_like(tensor)
        if name.endswith("mlp.router.bias"):
            return torch.tensor([100.0 if expert == taken else 0.0 for expert in range(len(tensor))])
        return None

    before = change(work / "model", on_one)
    steps = ["--steps", "3", "--lr", "1e-2", "--weight-decay", "0", "--micro-batches", "2"]
    resident, streamed = train(work, "resident", *steps), train(work, "streamed", *steps, *STREAMED)
    assert same(resident, streamed)
    losses = [[record["loss"] for record in steps_of(work / f"{name}.json")] for name in ("resident", "streamed")]
    assert losses[0] == losses[1] and len(losses[0]) == 3
    # Of each expert, whether the first step moved it.
    after = train(work, "first", *changed(steps, {"--steps": "1"}))
    moved = {}
    for name, tensor in before.items():
        if ".experts." not in name:
            continue
        stacked = tensor.dim() == 3 or name.endswith("_bias")
        numbered = enumerate(tensor) if stacked else [(int(name.partition(".experts.")[2].partition(".")[0]), tensor)]
        for expert, part in numbered:
            moved.setdefault(expert, set()).add(not torch.equal(part, after[name][expert] if stacked else after[name]))
    assert moved.pop(taken) == {True} and set().union(*moved.values()) == {False}


SPLITS = [(8, 1), (4, 2), (2, 4), (1, 8)]  # sequences in a micro-batch, micro-batches


@pytest.mark.parametrize("family", ["llama3", "qwen3_moe"])
def test_a_step_in_other_micro_batches_is_the_same_step_but_for_rounding(family, work):
    """Losses are those of the same tokens. Gradients are products of a micro-batch, added up in fp32: another sum of the same numbers, so after a step a few weights round otherwise."""
    saved(CONFIGS[family](), work / "model")
    results = {}
    for sequences, count in SPLITS:
        name = f"{sequences}x{count}"
        weights = train(work, name, "--steps", "1", "--lr", "1e-3", "--micro-batch", sequences, "--micro-batches", count)
        (record,) = steps_of(work / f"{name}.json")
        results[sequences, count] = record["loss"], record["grad_norm"], weights
    loss, norm, weights = results[SPLITS[0]]
    for other_loss, other_norm, other in results.values():
        assert other_loss == pytest.approx(loss, rel=1e-6)
        assert other_norm == pytest.approx(norm, rel=1e-2)
        assert sum((tensor != other[name]).sum().item() for name, tensor in weights.items()) < 0.01 * sum(tensor.numel() for tensor in weights.values())
