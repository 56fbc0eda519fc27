"""tierflow.Session computes what the program does: the same losses and results, to the bit, for pairs, adapters, projected gradients and a teacher's tokens."""

import json
import math

import numpy as np
import pytest
from program import needs_torch, run, small, steps_of, the_error
from rows import base, the_library, transformers, write_rows  # noqa: F401
from streaming import tierflow, torch

pytestmark = needs_torch
LENGTH, STEPS, LR = 32, 3, 5e-3
BUDGET = {"device": "64MiB", "host": "64MiB"}


@pytest.fixture(scope="module")
def work(base, tmp_path_factory):  # noqa: F811
    """A model and a larger teacher with one tokenizer, rows and pairs, prepared."""
    folder = tmp_path_factory.mktemp("sessions")
    tokenizer = the_library(base)
    for seed, (name, hidden) in enumerate((("model", 64), ("teacher", 96))):
        torch.manual_seed(seed)
        transformers.LlamaForCausalLM(transformers.LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=hidden, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            max_position_embeddings=64, initializer_range=0.1)).to(torch.bfloat16).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    kinds = ["the answer is ", "what ", "you "], ["long for", "a b c", "user and"], ["system", "and what", "x"]
    rows = [{"prompt": kinds[0][n % 3] * (1 + n % 2), "chosen": kinds[1][n // 2 % 3], "rejected": kinds[2][n // 3 % 3]} for n in range(12)]
    pairs = tierflow.data.prepare(folder / "model", write_rows(folder / "pairs.jsonl", rows), folder / "pairs.tfd", format="preference", sequence_length=LENGTH, cache=folder / "cache")
    assert isinstance(pairs, tierflow.data.Pairs) and len(pairs) == 12 and pairs[0]["input_ids"].shape == (2, LENGTH)
    tierflow.data.prepare(folder / "model", write_rows(folder / "rows.jsonl", [{"prompt": row["prompt"], "completion": row["chosen"]} for row in rows]),
                          folder / "rows.tfd", sequence_length=LENGTH, cache=folder / "cache")  # fmt: skip
    return folder


def test_what_is_given_in_vain_is_refused_by_name(work):
    for words, options in (("adapters= is for method=", {"adapters": {"rank": 3}}), ('"rnk"', {"method": "lora", "adapters": {"rnk": 3}}), ("a learning rate is a number, 0 or more", {"lr": -1.0}),
                           ("a learning rate is a number", {"lr": math.nan}), ('a loss is cross-entropy, dpo', {"loss": "gold"})):  # fmt: skip
        with pytest.raises(tierflow.UsageError, match=words):
            tierflow.Session(work / "model", tierflow.Budget(**BUDGET), sequence_length=LENGTH, **options)
    with tierflow.Session(work / "model", tierflow.Budget(**BUDGET), method="lora", loss="dpo", sequence_length=LENGTH) as session:
        assert session.computes_reference


def test_a_refused_batch_leaves_the_session_as_it_was(work, tmp_path):
    batch = stepped(rows_of(work), 2, 1)[0]
    with tierflow.Session(work / "model", tierflow.Budget(**BUDGET), sequence_length=LENGTH, micro_batch=2, lr=LR) as session:
        session.step(batch)
        for call in session.step, session.evaluate:
            with pytest.raises(tierflow.UsageError, match="beyond the vocabulary"):
                call([{name: value + 100000 if name == "input_ids" else value for name, value in batch[0].items()}])
        assert session.step(batch)["loss"] > 0
        session.save(tmp_path / "out")


IDS = torch.arange(2 * LENGTH).view(2, LENGTH) % 50
BATCH = {"input_ids": IDS, "labels": IDS}


def padded(mask_value, *places, labels=IDS):
    mask = torch.ones_like(IDS)
    mask[places] = mask_value
    return {"input_ids": IDS, "labels": labels, "attention_mask": mask}


@pytest.mark.parametrize(
    "batches, words",
    [
        (BATCH, "micro-batches come in a list"),
        (None, "micro-batches come in a list"),
        ([IDS], "micro-batch 0 is a dictionary of tensors"),
        ([{**BATCH, "pixel_values": IDS}], "micro-batch 0 has 'pixel_values', which a Session does not use"),
        ([{"input_ids": IDS}], "input_ids, and either labels or targets"),
        ([{**BATCH, "targets": IDS}], "input_ids, and either labels or targets"),
        ([{**BATCH, "input_ids": IDS.float()}], "input_ids are of torch.float32; they are integers"),
        ([{**BATCH, "labels": IDS.double()}], "labels are of torch.float64"),
        ([{"input_ids": IDS[:0], "labels": IDS[:0]}], "micro-batch 0 has no tokens"),
        ([{"input_ids": IDS[:, :0], "labels": IDS[:, :0]}], "micro-batch 0 has no tokens"),
        ([{"input_ids": IDS[0], "labels": IDS[0]}], r"input_ids has the shape \[32\]"),
        ([{"input_ids": IDS[None, None], "labels": IDS[None, None]}], r"input_ids has the shape \[1, 1, 2, 32\]"),
        ([{**BATCH, "labels": IDS[:, 1:]}], r"labels has the shape \[2, 31\]"),
        ([{**BATCH, "position_ids": torch.arange(LENGTH)}], r"position_ids has the shape \[32\]"),
        ([{**BATCH, "attention_mask": IDS[0]}], r"attention_mask has the shape \[32\]"),
        ([{**BATCH, "input_ids": [[1, 2], [3]]}], "no tensor can be made of input_ids"),
        ([{**BATCH, "teacher_ids": IDS[..., None]}], "a teacher's tokens, or their log-probabilities, without the other"),
        ([padded(0, 0, slice(0, 3))], "pad on the right, or leave attention_mask out"),
        ([padded(0, 1, 7)], "pad on the right, or leave attention_mask out"),
        ([padded(0, 1, slice(20, None))], "give -100 where attention_mask is 0"),
    ],
)  # fmt: skip
def test_a_micro_batch_that_cannot_be_is_named_and_the_session_stays(work, tmp_path, session, batches, words):
    loss = session.evaluate([BATCH])["loss"]
    for call in session.step, session.evaluate:
        with pytest.raises(tierflow.UsageError, match=words):
            call(batches)
    assert session.evaluate([BATCH])["loss"] == loss
    session.save(tmp_path / "out")


@pytest.fixture(scope="module")
def session(work):
    with tierflow.Session(work / "model", tierflow.Budget(**BUDGET), sequence_length=LENGTH, micro_batch=2, lr=LR) as made:
        yield made


def test_what_says_the_same_is_the_same(work, session):
    """Arrays and lists are tensors, a mask of ones is none, and padding on the right changes nothing before it."""
    expected = session.evaluate([BATCH])["loss"]
    for given in ({name: value.tolist() for name, value in BATCH.items()}, {name: value.int().numpy() for name, value in BATCH.items()},
                  {name: value.numpy().astype("uint16") for name, value in BATCH.items()}, {name: value.to(torch.uint8) for name, value in BATCH.items()},
                  padded(1), {**BATCH, "attention_mask": None}, {**BATCH, "position_ids": torch.arange(LENGTH).expand(2, LENGTH)}):  # fmt: skip
        assert session.evaluate([given])["loss"] == expected
    following = torch.full_like(IDS, -100)  # targets: of the last token before the padding, too
    following[:, :10] = IDS[:, 1:11]
    masked = {"input_ids": IDS, "targets": following, "attention_mask": (torch.arange(LENGTH) < 10).long().expand(2, LENGTH)}
    assert session.evaluate([masked])["tokens"] == 20
    labels = IDS.clone()
    labels[1, 20:] = -100
    losses = [session.evaluate([batch])["loss"] for batch in (padded(0, 1, slice(20, None), labels=labels), {"input_ids": IDS.where(labels >= 0, 3), "labels": labels})]
    assert losses[0] == pytest.approx(losses[1], abs=1e-6) and losses[0] != expected


@pytest.mark.parametrize("number", [1, np.int64(1)])
def test_a_micro_batch_of_pairs_has_two_rows_each(work, number):
    session = tierflow.Session(work / "model", tierflow.Budget(**BUDGET), sequence_length=LENGTH, loss="simpo", micro_batch=number)
    assert len(session.evaluate([BATCH])["log_probabilities"]) > 0
    session.close()


def test_nothing_is_not_evaluated(session):
    loss = session.evaluate([BATCH])["loss"]
    with pytest.raises(tierflow.UsageError, match="no micro-batches"):
        session.evaluate([])
    assert session.evaluate([BATCH])["loss"] == loss


@pytest.mark.parametrize("lr", ["a", -1.0, math.nan])
def test_a_learning_rate_of_a_step_is_checked(session, lr):
    loss = session.evaluate([BATCH])["loss"]
    with pytest.raises(tierflow.UsageError, match="lr takes a number|a learning rate is a number, 0 or more"):
        session.step([BATCH], lr)
    assert session.evaluate([BATCH])["loss"] == loss


@pytest.mark.parametrize(
    "options, words",
    [
        ({"clip": -1}, "clip is a number above 0, or none"),
        ({"clip": 0}, "clip is a number above 0"),
        ({"clip": math.nan}, "clip is a number above 0"),
        ({"clip": "a"}, "clip takes a number, or None, not 'a'"),
        ({"sequence_length": 10**6}, "sequence_length 1000000 exceeds the model's 64 positions"),
        ({"micro_batch": 0}, "micro_batch, micro_batches and sequence_length are at least 1"),
        ({"micro_batches": 2.5}, "micro_batches takes an integer, not 2.5"),
        ({"lr": "a"}, "lr takes a number, not 'a'"),
        ({"lr": torch.ones(9, 9)}, "lr takes a number, not one of type Tensor"),
        ({"betas": (0.9,)}, r"betas takes two numbers, not \(0.9,\)"),
        ({"betas": None}, "betas takes two numbers, not None"),
        ({"betas": (0.9, 1.0)}, "betas are at least 0 and less than 1"),
        ({"eps": -1.0}, "eps and weight_decay are numbers, 0 or more"),
        ({"steps": -1}, "a run has 0 steps or more"),
        ({"seed": -1}, "seed takes an integer, 0 or more, not -1"),
        ({"train": "no"}, "train takes True or False, not 'no'"),
        ({"device": "tpu"}, "device is cpu or cuda"),
        ({"loss": 3}, "loss takes a dictionary, not 3"),
        ({"loss": "dpo", "micro_batch": None}, "micro_batch takes an integer, not None"),
        ({"data": torch.utils.data.DataLoader([])}, "data is a text that names the data, or tierflow.data.Rows, not of type DataLoader"),
        ({"adapters": 3}, "adapters takes a dictionary, not 3"),
        ({"budget": {"device": 1}}, "budget is a tierflow.Budget"),
        ({"base_precision": "nf4"}, "base_precision= is for method"),
        ({"adapter": "folder"}, "adapter= is for method"),
        ({"method": "lora", "adapter": "folder", "adapters": {"rank": 3}}, "leave out adapters="),
        ({"method": "lora", "adapters": {"rank": 4.0}}, "rank takes an integer, not 4.0"),
        ({"method": "lora", "adapters": {"alpha": "x"}}, "alpha takes a number, not 'x'"),
        ({"method": "lora", "adapters": {"targets": 3}}, "targets takes a list of texts, not 3"),
    ],
)  # fmt: skip
def test_an_option_that_cannot_be_is_named(work, options, words):
    with pytest.raises(tierflow.UsageError, match=words):
        tierflow.Session(work / "model", **{"budget": tierflow.Budget(**BUDGET), "sequence_length": LENGTH, **options})


def test_targets_are_spelled_as_in_peft(work, tmp_path):
    found = []
    for targets in (None, "all-linear", ["all-linear"], "q_proj", ["q_proj"]):
        named = {} if targets is None else {"targets": targets}
        with tierflow.Session(work / "model", tierflow.Budget(**BUDGET), sequence_length=LENGTH, method="lora", adapters=named) as adapted:
            adapted.save(tmp_path / "out")
        found.append(json.loads((tmp_path / "out/adapter_config.json").read_text())["target_modules"])
    assert found[0] == found[1] == found[2] != found[3] == found[4] and len(found[0]) > 1


def test_the_folder_that_a_session_was_made_from_stays(work, tmp_path, session):
    file = work / "model/model.safetensors"
    before = file.read_bytes()
    (tmp_path / "link").symlink_to(work / "model")
    for folder in work / "model", str(tmp_path / "link"):
        with pytest.raises(tierflow.UsageError, match="holds the model that the session was made from: save to another folder"):
            session.save(folder)
    assert file.read_bytes() == before and not (work / "model/adapter_config.json").exists()


def pairs_of(work, **more):
    return tierflow.data.Pairs(work / "pairs.tfd", vocab_size=vocabulary(work), sequence_length=LENGTH, **more)


def rows_of(work, **more):
    return tierflow.data.Rows(work / "rows.tfd", vocab_size=vocabulary(work), sequence_length=LENGTH, packing="none", **more)


def vocabulary(work):
    return json.loads((work / "model" / "config.json").read_text())["vocab_size"]


def stepped(items, micro_batch, micro_batches):
    """The micro-batches of each step, in the program's order."""
    loader = list(torch.utils.data.DataLoader(items, micro_batch))
    return [loader[step * micro_batches : (step + 1) * micro_batches] for step in range(STEPS)]


def by_program(work, tmp_path, data, *more):
    """What it logs of each step, and the folder of its result."""
    words = ["train", "--model", "model", "--data", data, "--lr", str(LR), "--lr-schedule", "constant", "--held-out", "0", "--steps", str(STEPS),
             "--threads", str(torch.get_num_threads()), *small("--sequence-length", str(LENGTH), *more)]  # fmt: skip
    run(work, *words, "--out", tmp_path / "program", "--log-json", tmp_path / "log.json")
    return steps_of(tmp_path / "log.json")


def by_session(work, tmp_path, steps, /, **more):
    with tierflow.Session(work / "model", tierflow.Budget(**BUDGET), sequence_length=LENGTH, lr=LR, **more) as session:
        found = [session.step(batches) for batches in steps]
        session.save(tmp_path / "session")
    return found


def expect_same(found, expected, names, tmp_path):
    for ours, programs in zip(found, expected, strict=True):
        assert {name: ours[name] for name in names} == {name: programs[name] for name in names}
    assert found[0]["loss"] != found[-1]["loss"]
    file = next(name for name in ("adapter_model.safetensors", "model.safetensors") if (tmp_path / "program" / name).exists())
    assert (tmp_path / "program" / file).read_bytes() == (tmp_path / "session" / file).read_bytes()


LORA = {"method": "lora", "adapters": {"rank": 4, "alpha": 8}}
ADAPTED = ["--method", "lora", "--lora-rank", "4", "--lora-alpha", "8"]


@pytest.mark.parametrize("loss", ["dpo", "simpo", "orpo"])
def test_pairs_are_the_programs(work, tmp_path, loss):
    expected = by_program(work, tmp_path, "pairs.tfd", "--loss", loss, "--micro-batch", "2", "--micro-batches", "2", *ADAPTED)
    found = by_session(work, tmp_path, stepped(pairs_of(work), 2, 2), loss={"kind": loss}, micro_batch=2, micro_batches=2, **LORA)
    expect_same(found, expected, ["loss", "grad_norm", "rewards/chosen", "rewards/margins"], tmp_path)


def test_a_reference_that_is_given_is_the_programs(work, tmp_path):
    expected = by_program(work, tmp_path, "pairs.tfd", "--loss", "dpo", "--micro-batch", "2", "--micro-batches", "2")
    steps = stepped(pairs_of(work), 2, 2)
    with tierflow.Session(work / "model", tierflow.Budget(**BUDGET), loss={"kind": "dpo"}, micro_batch=2, micro_batches=2, sequence_length=LENGTH, lr=LR) as session:
        assert not session.computes_reference
        with pytest.raises(tierflow.UsageError, match="reference"):
            session.step(steps[0])
    with tierflow.Session(work / "model", tierflow.Budget(**BUDGET), loss={"kind": "dpo"}, micro_batch=2, micro_batches=2, sequence_length=LENGTH, lr=LR) as session:
        for batches in steps:
            for batch, sums in zip(batches, session.evaluate(batches)["log_probabilities"], strict=True):
                batch["reference"] = torch.tensor(sums, dtype=torch.float64)
        found = [session.step(batches) for batches in steps]
        session.save(tmp_path / "session")
    expect_same(found, expected, ["loss", "grad_norm", "rewards/margins"], tmp_path)


def test_galore_is_the_programs(work, tmp_path):
    windows = ["--method", "galore", "--rank", "8", "--update-gap", "2", "--scale", "0.5"]
    expected = by_program(work, tmp_path, "rows.tfd", "--packing", "none", "--micro-batch", "2", "--micro-batches", "2", *windows)
    found = by_session(work, tmp_path, stepped(rows_of(work), 2, 2), method="galore", adapters={"rank": 8, "update_gap": 2, "scale": 0.5}, micro_batch=2, micro_batches=2)
    expect_same(found, expected, ["loss", "grad_norm"], tmp_path)


def test_a_teachers_tokens_are_the_programs(work, tmp_path):
    words = ["eval", "--model", "teacher", "--data", "rows.tfd", "--packing", "none", *small("--sequence-length", str(LENGTH), "--micro-batch", "4"),
             "--teacher-out", tmp_path / "teacher.tft", "--teacher-top", "8"]  # fmt: skip
    run(work, *words, "--threads", str(torch.get_num_threads()))
    expected = by_program(work, tmp_path, "rows.tfd", "--packing", "none", "--micro-batch", "2", "--micro-batches", "2", "--distill", tmp_path / "teacher.tft")
    taught = rows_of(work, teacher=tmp_path / "teacher.tft")
    steps = stepped(taught, 2, 2)
    found = by_session(work, tmp_path, steps, loss={"top": 8}, micro_batch=2, micro_batches=2)
    expect_same(found, expected, ["loss", "ce_loss", "kd_loss", "grad_norm"], tmp_path)
    with tierflow.Session(work / "teacher", tierflow.Budget(**BUDGET), sequence_length=LENGTH, micro_batch=2, top=8, train=False) as teacher:
        ((ids, log_p),) = teacher.evaluate(steps[0][:1])["top"]
    counts = torch.nn.functional.pad(steps[0][0]["labels"][:, 1:], (0, 1), value=-100).flatten() >= 0
    assert torch.equal(ids[counts], steps[0][0]["teacher_ids"].flatten(0, 1)[counts])
    assert torch.equal(log_p[counts].half(), steps[0][0]["teacher_log_probabilities"].flatten(0, 1)[counts])


def test_streamed_a_dpo_step_reads_the_base_as_often_as_another_and_has_the_same_bits(work, tmp_path):
    steps, read = stepped(pairs_of(work), 2, 2), {}
    resident = by_session(work, tmp_path, steps, loss={"kind": "dpo"}, micro_batch=2, micro_batches=2, **LORA)
    for loss in "dpo", "simpo":
        budget = tierflow.Budget(device="64MiB", host="300KiB", storage=[tmp_path / loss])
        with tierflow.Session(work / "model", budget, sequence_length=LENGTH, lr=LR, loss={"kind": loss}, micro_batch=2, micro_batches=2, allow_any_filesystem=True, **LORA) as session:
            assert session.computes_reference == (loss == "dpo")
            losses, before = [], 0
            for batches in steps:
                before = session.bytes_moved()["disk_read"]
                losses.append(session.step(batches)["loss"])
            read[loss] = session.bytes_moved()["disk_read"] - before
        if loss == "dpo":
            assert losses == [step["loss"] for step in resident]
    assert read["dpo"] == read["simpo"] > 0


@pytest.mark.parametrize("kind", ["cosine", "linear"])
def test_schedules_are_the_programs(work, tmp_path, kind):
    words = ["train", "--model", "model", "--data", "rows.tfd", "--packing", "none", "--lr", str(LR), "--lr-schedule", kind, "--warmup", "2", "--held-out", "0", "--steps",
             "6", "--threads", str(torch.get_num_threads()), *small("--sequence-length", str(LENGTH), "--micro-batch", "2")]  # fmt: skip
    run(work, *words, "--out", tmp_path / "program", "--log-json", tmp_path / "log.json")
    expected = steps_of(tmp_path / "log.json")
    loader = list(torch.utils.data.DataLoader(rows_of(work), 2))
    found = by_session(work, tmp_path, [[batch] for batch in loader[:6]], micro_batch=2, lr_schedule=kind, warmup=2, steps=6)
    assert [step["lr"] for step in found] == [step["lr"] for step in expected] and len({step["lr"] for step in found}) > 3
    expect_same(found, expected, ["loss", "grad_norm"], tmp_path)


def durable(work, folder, every=True, **more):
    budget = tierflow.Budget(device="64MiB", host="64MiB", storage=[folder], durable=every)
    settings = {"method": "galore", "adapters": {"rank": 8, "update_gap": 2}, "micro_batch": 2, "lr": LR, "lr_schedule": "cosine", "warmup": 1, "steps": 6, "data": rows_of(work)}
    return tierflow.Session(work / "model", budget, sequence_length=LENGTH, allow_any_filesystem=True, **{**settings, **more})


def test_a_durable_session_goes_on_with_the_same_bits(work, tmp_path):
    loader = [[batch] for batch in torch.utils.data.DataLoader(rows_of(work), 2)][:6]
    with durable(work, tmp_path / "whole") as session:
        whole = [session.step(batches) for batches in loader]
        session.save(tmp_path / "expected")
        session.close(discard=True)
    assert not list((tmp_path / "whole").iterdir())
    found, begun = {}, []
    for stops in (2, 5, 6):  # killed, killed, closed in order
        session = durable(work, tmp_path / "state")
        begun.append(session.steps)
        assert session.notes == (None if session.steps == 0 else {"after": session.steps})
        for step in range(session.steps, stops):
            found[step] = session.step(loader[step])
            session.notes = {"after": step + 1}
        if stops < 6:
            del session  # the step before may be committed by now, and the last one is not
        else:
            session.close()
    assert begun[0] == 0 and begun[1] <= 1 <= begun[2] <= 4
    with durable(work, tmp_path / "state") as session:
        assert session.steps == 6 and session.notes == {"after": 6}
        assert session.evaluate(loader[0])["perplexity"] == pytest.approx(math.exp(session.evaluate(loader[0])["loss"]))
        session.save(tmp_path / "found")
    names = ["loss", "grad_norm", "lr"]
    assert [{name: found[step][name] for name in names} for step in range(6)] == [{name: step[name] for name in names} for step in whole]
    assert (tmp_path / "found" / "model.safetensors").read_bytes() == (tmp_path / "expected" / "model.safetensors").read_bytes()
    run(work, "export", "--storage", tmp_path / "state", "--out", tmp_path / "exported")
    assert (tmp_path / "exported" / "model.safetensors").read_bytes() == (tmp_path / "expected" / "model.safetensors").read_bytes()
    for more, why in (({"micro_batch": 1}, "had micro_batch 2, not 1"), ({"data": "others"}, "had data"), ({"adapters": {"rank": 4}}, "its adapter is not this one's")):
        with pytest.raises(tierflow.UsageError, match=why):
            durable(work, tmp_path / "state", **more)


@pytest.mark.parametrize("more", [{}, {"method": "full", "adapters": None}, {"method": "lora", "adapters": {"rank": 4}, "loss": {"kind": "dpo", "beta": 0.2}}])
def test_the_program_looks_at_its_state_and_takes_it_for_no_run_of_its_own(work, tmp_path, more):
    with durable(work, tmp_path / "state", **more) as session:
        session.step([next(iter(torch.utils.data.DataLoader(pairs_of(work) if "loss" in more else rows_of(work), 2)))])
    assert "whole: the state after step 1, " in run(work, "verify", tmp_path / "state").stdout
    assert json.loads(run(work, "verify", tmp_path / "state", "--json").stdout)["whole"]
    assert "the script or program that made it goes on with it, if it is whole" in run(work, "status", tmp_path / "state").stdout
    kept = (tmp_path / "state" / "state.tfv").read_bytes()
    words = ["train", "--model", "model", "--data", "rows.jsonl", "--held-out", "0", "--steps", "2", "--out", tmp_path / "out", *small("--storage", tmp_path / "state", "--sequence-length", str(LENGTH))]
    refused = run(work, *words, ok=False)
    assert refused.returncode == 2 and "holds the state of a script's run" in the_error(refused.stderr)
    assert (tmp_path / "state" / "state.tfv").read_bytes() == kept


def test_what_is_wrong_is_one_line(work):
    for more, why in (({"method": "none"}, "none of full, lora, galore"), ({"loss": {"kind": "ipo"}}, "ipo"), ({"loss": {"gama": 1}}, "there are kind, beta"),
                      ({"method": "lora", "adapters": {"r": 8}}, "there are rank"), ({"lr_schedule": "step"}, "none of constant, linear, cosine"),
                      ({"lr_schedule": "cosine"}, "asks for the steps")):  # fmt: skip
        with pytest.raises(tierflow.Error, match=why):
            tierflow.Session(work / "model", tierflow.Budget(**BUDGET), sequence_length=LENGTH, **more)
    closed = tierflow.Session(work / "model", tierflow.Budget(**BUDGET), sequence_length=LENGTH)
    closed.close()
    with pytest.raises(tierflow.UsageError, match="closed"):
        closed.step([])
    with pytest.raises(tierflow.UsageError, match="holds pairs"):
        tierflow.data.Rows(work / "pairs.tfd", vocab_size=vocabulary(work), sequence_length=LENGTH)
