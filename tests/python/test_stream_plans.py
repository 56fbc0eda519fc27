"""Sizes, budgets and plans: what they are made of, and what is printed of them."""

import io

import pytest
from streaming import batches, make, tierflow, torch, train
from tierflow.budget import human, memory_available, parse_size

GIB = 1 << 30


@pytest.mark.parametrize("text, size", [("7", 7), ("7B", 7), ("1KB", 1000), ("1k", 1000), ("1KiB", 1024), ("2 MiB", 2 << 20), ("2MB", 2_000_000), ("1.5GiB", 3 << 29),
                                        ("1.5 gb", 1_500_000_000), ("2TiB", 2 << 40), ("1T", 10**12), (" 3 gib ", 3 * GIB)])  # fmt: skip
def test_sizes_are_bytes(text, size):
    assert parse_size(text) == size


def test_bytes_are_printed_in_the_unit_that_fits():
    assert [human(size) for size in (0, 1023, 1536, 5 << 19, 3 * GIB, 5 << 40)] == ["0 B", "1023 B", "1.5 KiB", "2.5 MiB", "3.0 GiB", "5.0 TiB"]


def test_auto_is_a_third_and_a_half_of_the_free_memory(tmp_path, monkeypatch):
    monkeypatch.setattr("tierflow.budget.open", lambda *_, **__: io.StringIO("MemTotal:  9000000 kB\nMemFree: 1 kB\nMemAvailable:   6291456 kB\n"), raising=False)
    assert memory_available() == 6 * GIB
    for budget in tierflow.Budget.auto([tmp_path]), tierflow.plan(make("llama"), storage=[tmp_path], allow_any_filesystem=True).budget:
        assert (budget.device, budget.host, budget.storage) == (2 * GIB, 3 * GIB, [str(tmp_path)])
    assert tierflow.plan(make("llama")).budget.storage == []


@pytest.mark.parametrize(
    "budget, options, text",
    [
        ("fast", {}, "budget is a tierflow.Budget or 'auto', not 'fast'"),
        (tierflow.Budget("1GiB", "1GiB"), {"storage": ["a"]}, "give storage in the Budget"),
        (tierflow.Budget("1GiB", "1GiB"), {"device": "tpu"}, "device is 'cpu' or 'cuda', not 'tpu'"),
        (tierflow.Budget("1GiB", "1GiB"), {"base_precision": "int4"}, "base_precision is 'bf16', .* not 'int4'"),
        (tierflow.Budget("1GiB", "1GiB"), {"base_precision": "nf4"}, "plan with trainable=False"),
    ],
)
def test_a_plan_that_cannot_be_says_why(budget, options, text):
    with pytest.raises(tierflow.UsageError, match=text):
        tierflow.plan(torch.nn.Linear(2, 2), budget, **options)


@pytest.mark.parametrize("precision, each", [("fp32-master+adam8", 6.03), ("fp32-master+adam32", 12), ("bf16-sr+adam8", 4.03)])
def test_the_state_has_as_many_bytes_as_its_precision_says(precision, each):
    with tierflow.init_empty():
        module = torch.nn.ModuleList(torch.nn.Linear(1024, 1024, bias=False) for _ in range(4))
    plan = tierflow.plan(module, tierflow.Budget("1GiB", "1GiB"), precision=precision)
    assert plan.estimate["state_bytes"] == pytest.approx(each * (4 << 20), rel=2e-3) and str(plan).startswith(f"Tierflow plan: {precision}, ")


def test_what_is_printed_is_what_was_planned(tmp_path):
    plan = tierflow.plan(make("llama"), tierflow.Budget("600KiB", "1MiB", [tmp_path], activations=0.25), micro_batches=3, precision="fp32-master+adam32")
    lines, e = str(plan).splitlines(), plan.estimate
    assert lines[0] == "Tierflow plan: fp32-master+adam32, device 600.0 KiB, host 1.0 MiB"
    assert f"{e['parameters']:,} parameters, {e['trainable_parameters']:,} of them trained: {human(e['state_bytes'])} of state, {human(e['gradient_bytes'])} of gradients" in lines[1]
    assert f"device: {human(e['device_bytes'])} of slots; host: {human(e['host_bytes'])}" in lines[2] and f"storage: {human(e['storage_bytes'])}" in lines[2]
    assert f"{e['hi_resident']:.0%} of the weights, {e['state_resident']:.0%} of the optimizer state" in lines[2]
    assert "activations: 150.0 KiB of the device budget" in lines[3] and "a step of 3 micro-batches, storage read + written" in lines[4]
    for line, name in zip(lines[5:7], ("layer_major", "loop"), strict=True):
        assert f"{human(e[name + '_read'])} + {human(e[name + '_write'])}, {human(e[name + '_link'])} on the link" in line
    assert e["loop_read"] != e["loop_write"] and "passes the weights 3 times" in lines[7] and human(4 * e["trainable_parameters"]) in lines[7] and len(lines) == 8
    alone = str(tierflow.plan(make("llama"), tierflow.Budget("1GiB", "1GiB"))).splitlines()
    assert "a step of 1 micro-batch," in alone[4] and len(alone) == 7


def test_the_seed_is_that_of_the_rounding():
    weights = []
    for seed in 1, 1, 2:
        model = tierflow.wrap(make("llama"), tierflow.Plan(tierflow.Budget("64MiB", "128MiB"), precision="bf16-sr+adam8", seed=seed))
        train(model, "llama", steps=2)
        weights.append(model.lm_head.weight + 0)
        assert torch.isfinite(model(**batches("llama", 1)[0]).loss)
        tierflow.close(model)
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])


def test_what_a_message_tells_to_pass_is_an_argument():
    """Storage in memory is refused with the words that let it pass."""
    budget = tierflow.Budget("600KiB", "1MiB", ["/dev/shm"], activations=0.0)
    with pytest.raises(tierflow.Error, match=r"accept this one with allow_any_filesystem=True") as refused:
        tierflow.wrap(make("llama"), budget)
    assert "--" not in str(refused.value) and "Budget(allow" not in str(refused.value)
    tierflow.close(tierflow.wrap(make("llama"), tierflow.Plan(budget, allow_any_filesystem=True)))
