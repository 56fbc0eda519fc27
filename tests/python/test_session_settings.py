"""Each setting of a tierflow.Session has the effect that the program's option has; and what a durable one commits, and when."""

import json

import pytest
from program import needs_torch, run, small
from rows import base  # noqa: F401
from streaming import tierflow, torch
from test_sessions import ADAPTED, BUDGET, LENGTH, LORA, LR, by_program, by_session, expect_same, pairs_of, rows_of, stepped, work  # noqa: F401

pytestmark = needs_torch
SETTINGS = {"clip": 0.05, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.3, "seed": 7, "precision": "bf16-sr+adam8"}


def made(work, **more):  # noqa: F811
    return tierflow.Session(work / "model", **{"budget": tierflow.Budget(**BUDGET), "sequence_length": LENGTH, "lr": LR, "micro_batch": 2, **more})


def test_settings_of_the_optimizer_are_the_programs(work, tmp_path):  # noqa: F811
    words = ["--clip", "0.05", "--betas", "0.8", "0.95", "--eps", "1e-3", "--weight-decay", "0.3", "--seed", "7", "--precision", "bf16-sr+adam8"]
    expected = by_program(work, tmp_path, "rows.tfd", "--packing", "none", "--micro-batch", "2", "--micro-batches", "2", *words)
    steps = stepped(rows_of(work, seed=7), 2, 2)
    found = by_session(work, tmp_path, steps, micro_batch=2, micro_batches=2, **SETTINGS)
    expect_same(found, expected, ["loss", "grad_norm", "tokens"], tmp_path)
    assert min(step["grad_norm"] for step in found) > SETTINGS["clip"]
    bits = (tmp_path / "session" / "model.safetensors").read_bytes()
    for name in SETTINGS:
        by_session(work, tmp_path, steps, micro_batch=2, micro_batches=2, **{key: value for key, value in SETTINGS.items() if key != name})
        assert (tmp_path / "session" / "model.safetensors").read_bytes() != bits, f"{name} changes nothing"


def test_no_clipping_is_not_clipping_to_1(work, tmp_path):  # noqa: F811
    expected = by_program(work, tmp_path, "rows.tfd", "--packing", "none", "--micro-batch", "2", "--eps", "1e-3", "--clip", "none")
    found = by_session(work, tmp_path, stepped(rows_of(work), 2, 1), micro_batch=2, clip=None, eps=1e-3)
    expect_same(found, expected, ["loss", "grad_norm"], tmp_path)
    assert max(step["grad_norm"] for step in found) > 1


@pytest.mark.parametrize("loss", ["dpo", "simpo"])
def test_rewards_and_settings_of_pairs_are_the_programs(work, tmp_path, loss):  # noqa: F811
    words = ["--beta", "0.7", *(["--simpo-gamma", "0.3"] if loss == "simpo" else [])]
    expected = by_program(work, tmp_path, "pairs.tfd", "--loss", loss, *words, "--micro-batch", "2", "--micro-batches", "2", *ADAPTED)
    rule = {"kind": loss, "beta": 0.7, **({"gamma": 0.3} if loss == "simpo" else {})}
    found = by_session(work, tmp_path, stepped(pairs_of(work), 2, 2), loss=rule, micro_batch=2, micro_batches=2, **LORA)
    expect_same(found, expected, ["loss", *(f"rewards/{which}" for which in ("chosen", "rejected", "accuracies", "margins"))], tmp_path)


def test_an_evaluation_is_the_programs(work, tmp_path):  # noqa: F811
    parts = list(torch.utils.data.DataLoader(rows_of(work), 2))
    with made(work, micro_batches=len(parts)) as session:
        for _ in range(12):
            session.step(parts)
        found = session.evaluate(parts)
        assert "device" in session.describe() and session.steps == 12
        session.save(tmp_path / "out")
    done = run(work, "eval", "--model", tmp_path / "out", "--data", "rows.tfd", "--packing", "none", "--json", *small("--sequence-length", str(LENGTH), "--micro-batch", "2"))
    said = json.loads(done.stdout)
    assert {name: found[name] for name in ("loss", "perplexity", "accuracy")} == pytest.approx({name: said[name] for name in ("loss", "perplexity", "accuracy")}, rel=1e-6)
    assert 0 < found["accuracy"] <= 1 and found["accuracy"] != found["loss"] and found["tokens"] == said["tokens"]


def test_adapters_of_a_folder_are_gone_on_with_over_a_base_in_fewer_bits(work, tmp_path):  # noqa: F811
    steps = stepped(rows_of(work), 2, 1)
    losses = {}
    for base_precision in "bf16", "nf4":
        with made(work, base_precision=base_precision, **LORA) as session:
            losses["new", base_precision] = session.evaluate(steps[0])["loss"]
            for batches in steps:
                session.step(batches)
            losses["tuned", base_precision] = session.evaluate(steps[0])["loss"]
            session.save(tmp_path / base_precision)
        with made(work, base_precision=base_precision, method="lora", adapter=tmp_path / base_precision) as session:
            assert session.evaluate(steps[0])["loss"] == pytest.approx(losses["tuned", base_precision], rel=1e-3)
    assert len(set(losses.values())) == 4


def test_weights_that_are_not_finite_are_not_a_result(work, tmp_path):  # noqa: F811
    with made(work) as session:
        session.step(stepped(rows_of(work), 2, 1)[0], lr=1e38)
        with pytest.raises(tierflow.NumericError, match="holds an infinity or a NaN"):
            session.save(tmp_path / "out")


def durable(work, folder, every=True, **more):  # noqa: F811
    budget = tierflow.Budget(device="64MiB", host="64MiB", storage=[folder], durable=every)
    return made(work, budget=budget, allow_any_filesystem=True, **more)


def test_each_setting_that_a_run_began_with_is_named_where_it_is_another(work, tmp_path):  # noqa: F811
    begun = {"loss": {"kind": "simpo", "beta": 0.2}, **SETTINGS}
    del begun["precision"]
    durable(work, tmp_path / "state", **begun).close()
    others = {"loss": {"kind": "simpo", "beta": 0.3}, "clip": 0.5, "betas": (0.9, 0.95), "eps": 1e-4, "weight_decay": 0.1, "seed": 8, "micro_batches": 2, "sequence_length": 16}
    for name, value in others.items():
        with pytest.raises(tierflow.UsageError, match=f"the run whose state is here had {name} .*, not "):
            durable(work, tmp_path / "state", **{**begun, name: value})
    durable(work, tmp_path / "state", **begun).close()


def test_a_commit_comes_when_it_is_asked_for(work, tmp_path):  # noqa: F811
    steps = stepped(rows_of(work), 2, 1)
    session = durable(work, tmp_path / "state", every=100)
    session.step(steps[0])
    session.commit()
    session.step(steps[1])
    del session  # without close(): what came after is gone
    with durable(work, tmp_path / "state", every=100) as again:
        assert again.steps == 1


def test_a_session_that_only_evaluates_leaves_a_state_alone(work, tmp_path):  # noqa: F811
    steps = stepped(rows_of(work), 2, 1)
    with made(work) as session:
        expected = session.evaluate(steps[0])["loss"]
    with durable(work, tmp_path / "state") as session:
        session.step(steps[0])
    before = {path: path.read_bytes() for path in (tmp_path / "state").iterdir()}
    with durable(work, tmp_path / "state", train=False) as session:
        assert session.steps == 0 and session.evaluate(steps[0])["loss"] == expected
    assert before == {path: path.read_bytes() for path in (tmp_path / "state").iterdir()}
