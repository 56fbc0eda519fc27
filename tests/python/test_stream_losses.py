"""Losses of pairs and of a teacher's tokens on streamed models: TRL's and the program's formulas, the same bits under every budget."""

import json
import math
import pickle
import subprocess

import pytest
from program import PROGRAM
from rows import base  # noqa: F401
from streaming import roomy, scarce, tierflow, torch, transformers
from test_preferences import losses_of_trl
from test_sessions import LENGTH, pairs_of, rows_of, stepped, work  # noqa: F401
from tierflow import losses


def resident(work, dtype=torch.float32):  # noqa: F811
    return transformers.LlamaForCausalLM.from_pretrained(work / "model", dtype=dtype)


def batch_of(work, pairs=6):  # noqa: F811
    return next(iter(torch.utils.data.DataLoader(pairs_of(work), pairs)))


def gradient(model, loss):
    model.zero_grad()
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def test_dpo_is_trls(work, tmp_path):  # noqa: F811
    """DPOTrainer's own loss and gradients, of a model that has moved away from its reference."""
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    tokenizer = transformers.AutoTokenizer.from_pretrained(work / "model")
    tokenizer.pad_token = "<s>"
    rows = [json.loads(line) for line in (work / "pairs.jsonl").read_text().splitlines()][:6]
    model, reference = resident(work), resident(work)
    torch.manual_seed(5)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.02)
    arguments = trl.DPOConfig(output_dir=str(tmp_path), report_to=[], use_cpu=True, bf16=False, max_length=LENGTH, beta=0.3, gradient_checkpointing=False, per_device_train_batch_size=6)
    trainer = trl.DPOTrainer(model=model, ref_model=reference, args=arguments, train_dataset=datasets.Dataset.from_list(rows), processing_class=tokenizer)
    theirs_of = trainer.data_collator([trainer.train_dataset[n] for n in range(6)])
    expected = trainer.compute_loss(model, theirs_of)
    wanted = gradient(model, expected)

    mask, ids = theirs_of["completion_mask"].bool(), theirs_of["input_ids"]  # chosen rows, then rejected ones
    order = [row for pair in range(6) for row in (pair, 6 + pair)]
    given = {"input_ids": ids[order], "labels": torch.where(mask, ids, -100)[order]}
    with torch.no_grad():
        given["reference"] = losses.log_probabilities(reference, given)
    found = losses.DPO(beta=0.3)(model, given)
    assert found.item() == pytest.approx(expected.item(), rel=1e-5) and abs(found.item() - math.log(2)) > 1e-3
    assert torch.allclose(gradient(model, found), wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["simpo", "orpo"])
def test_simpo_and_orpo_are_trls(work, name):  # noqa: F811
    model, given = resident(work), batch_of(work)
    ids, labels = given["input_ids"].flatten(0, 1), given["labels"].flatten(0, 1)
    log_p = model(ids).logits[:, :-1].log_softmax(-1)
    counts = labels[:, 1:] >= 0
    means = (log_p.gather(2, ids[:, 1:, None])[..., 0] * counts).sum(1) / counts.sum(1)
    each, *_ = losses_of_trl(name, 0.7, 0.4)(means[::2], means[1::2])
    expected = each.mean()
    if name == "orpo":  # "computed over the full prompt and response"
        ends = [int(row.nonzero().max()) + 1 for row in counts]
        expected = -torch.cat([log_p[at, : ends[at]].gather(1, ids[at, 1 : ends[at] + 1, None]) for at in range(0, len(ids), 2)]).mean() - expected
    wanted = gradient(model, expected)
    loss = losses.SimPO(beta=0.7, gamma=0.4) if name == "simpo" else losses.ORPO(beta=0.7)
    found = loss(model, given)
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    assert torch.allclose(gradient(model, found), wanted, rtol=1e-4, atol=1e-6)
    assert loss.rewards.shape == (6, 2) and loss.rewards.flatten().tolist() == pytest.approx((0.7 * means).tolist(), rel=1e-4)


def adapted(work, plan, **more):  # noqa: F811
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    model = peft.get_peft_model(tierflow.load(work / "model", plan), peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", **more))
    return model.train(), tierflow.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3)


def test_dpo_of_a_peft_model_takes_the_base_as_its_reference(work, tmp_path):  # noqa: F811
    steps, seen, reads = stepped(pairs_of(work), 2, 2), [], []
    for plan in roomy(trainable=False), scarce(tmp_path / "state", trainable=False):
        model, opt = adapted(work, plan)
        trainer = tierflow.Trainer(model, opt, loss="dpo")
        before = trainer.evaluate(steps[0], losses.log_probabilities)
        seen.append([trainer.step(batches).loss for batches in steps])
        assert not any("reference" in batch for batches in steps for batch in batches)  # they are the caller's
        # The adapters are back, and what they begin from is what it was.
        with model.disable_adapter():
            after = trainer.evaluate(steps[0], losses.log_probabilities)
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        assert not torch.equal(trainer.evaluate(steps[0], losses.log_probabilities)[0], before[0])
        reads.append(trainer.evaluate(steps[0]))
        tierflow.close(model)
    assert seen[0] == seen[1] and reads[0] == reads[1]
    assert seen[0][0] == pytest.approx(math.log(2), abs=1e-6)
    # The same course with references of a pass before the first step, and in a loop of one's own.
    model, opt = adapted(work, roomy(trainable=False))
    trainer = tierflow.Trainer(model, opt, loss=losses.DPO(beta=0.1))
    given = [[{**batch, "reference": values} for batch, values in zip(batches, trainer.evaluate(batches, losses.log_probabilities), strict=True)] for batches in steps]
    for batches, loss in zip(given, seen[0], strict=True):
        total = 0.0
        for batch in batches:
            one = losses.DPO()(model, batch)
            (one / 2).backward()
            total += one.item() / 2
        torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1.0)
        opt.step()
        opt.zero_grad()
        assert total == loss
    tierflow.close(model)


def test_a_dpo_step_reads_the_base_as_often_as_another(work, tmp_path):  # noqa: F811
    steps, read = stepped(pairs_of(work), 1, 3), {}
    for loss in "dpo", "simpo":
        plan = scarce(tmp_path / loss, trainable=False)
        plan.extra = {"chaos_seed": 5, "chunk_elements": 4096}
        plan.budget = tierflow.Budget(device="120KiB", host="100KiB", storage=[tmp_path / loss], activations=0.0)  # the base does not fit
        model, opt = adapted(work, plan)
        trainer = tierflow.Trainer(model, opt, loss=loss)
        moved = [tierflow.stats(model)["lanes"]["disk_read"]["bytes"]]
        for batches in steps:
            trainer.step(batches)
            moved.append(tierflow.stats(model)["lanes"]["disk_read"]["bytes"])
        trainer.evaluate(steps[0])
        moved.append(tierflow.stats(model)["lanes"]["disk_read"]["bytes"])
        read[loss] = [after - before for before, after in zip(moved, moved[1:], strict=False)][1:]  # the first step learns the order
        tierflow.close(model)
    assert read["dpo"] == read["simpo"] and min(read["dpo"]) > 0


def test_a_reference_beside_saved_modules_takes_its_own_pass_and_says_so(work, caplog):  # noqa: F811
    steps = stepped(pairs_of(work), 2, 2)
    model, opt = adapted(work, roomy(trainable=False), modules_to_save=["lm_head"])
    trainer = tierflow.Trainer(model, opt, loss="dpo")
    with model.disable_adapter():
        references = [trainer.evaluate(batches, losses.log_probabilities) for batches in steps]
    found = [trainer.step(batches).loss for batches in steps]
    said = [record.message for record in caplog.records if record.name == "tierflow"]
    assert [message for message in said if "in a pass of its own" in message] == said[:1]
    tierflow.close(model)
    model, opt = adapted(work, roomy(trainable=False), modules_to_save=["lm_head"])
    trainer = tierflow.Trainer(model, opt, loss="dpo")
    given = [[{**batch, "reference": values} for batch, values in zip(batches, of_step, strict=True)] for batches, of_step in zip(steps, references, strict=True)]
    assert [trainer.step(batches).loss for batches in given] == found
    tierflow.close(model)


def test_evaluation_shares_each_fetch(work, tmp_path):  # noqa: F811
    """Layer-major: of eight micro-batches the weights are read as often as of one."""
    model = tierflow.load(work / "model", scarce(tmp_path / "state"))
    trainer = tierflow.Trainer(model, tierflow.optim.AdamW(model.parameters()), loss="simpo")
    parts = stepped(pairs_of(work), 1, 4)[0]

    def reads(batches):
        before = tierflow.stats(model)["lanes"]["disk_read"]["bytes"]
        trainer.evaluate(batches, losses.log_probabilities)
        return tierflow.stats(model)["lanes"]["disk_read"]["bytes"] - before

    reads(parts[:1])
    one, all_of_them = reads(parts[:1]), reads(parts)
    assert 0 < all_of_them <= one * 1.1
    alone = [trainer.evaluate([part], losses.log_probabilities)[0] for part in parts]
    assert all(torch.equal(a, b) for a, b in zip(alone, trainer.evaluate(parts, losses.log_probabilities), strict=True))
    tierflow.close(model)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_a_teacher_is_written_and_learned_from(work, tmp_path, temperature):  # noqa: F811
    teacher = tierflow.load(work / "teacher", roomy(trainable=False))
    told = []
    tierflow.data.write_teacher(tierflow.Trainer(teacher, tierflow.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])), rows_of(work), tmp_path / "own.tft", top=8, batch=3, at_once=2,
                                progress=lambda done, count: told.append((done, count)))  # fmt: skip
    tierflow.close(teacher)
    assert told == [(6, 12), (12, 12)]
    taught = rows_of(work, teacher=tmp_path / "own.tft", held_out=0.5)
    of_the_program = tmp_path / "program.tft"
    subprocess.run([PROGRAM, "eval", "--model", work / "teacher", "--data", work / "rows.tfd", "--packing", "none", "--sequence-length", str(LENGTH), "--device", "cpu",
                    "--device-memory", "64MiB", "--host-memory", "64MiB", "--teacher-out", of_the_program, "--teacher-top", "8"], check=True, capture_output=True)  # fmt: skip
    for part, other in (taught, rows_of(work, teacher=of_the_program, held_out=0.5)), (taught.held_out(), rows_of(work, teacher=of_the_program, held_out=0.5).held_out()):
        for ours, theirs in zip(part, other, strict=True):
            assert torch.equal(ours["input_ids"], theirs["input_ids"])
            assert torch.allclose(ours["teacher_log_probabilities"].float(), theirs["teacher_log_probabilities"].float(), atol=0.06)
    # The formula, written out; then a step on a streamed student.
    given = next(iter(torch.utils.data.DataLoader(taught, 4)))
    model = resident(work)
    log_p = model(given["input_ids"]).logits[:, :-1]
    labels, counts = given["labels"][:, 1:], given["labels"][:, 1:] >= 0
    ce = -log_p.log_softmax(-1).gather(2, labels.clamp(min=0)[..., None])[..., 0]
    q = (given["teacher_log_probabilities"][:, :-1].float() / temperature).softmax(-1)
    student = (log_p / temperature).log_softmax(-1).gather(2, given["teacher_ids"][:, :-1].long())
    kd = temperature**2 * (q * (q.log() - student)).sum(-1)
    expected = ((0.3 * ce + 0.6 * kd) * counts).sum() / counts.sum()
    loss = losses.Distillation(alpha=0.6, ce_alpha=0.3, temperature=temperature)
    assert loss(model, given).item() == pytest.approx(expected.item(), rel=1e-5)
    student = tierflow.load(work / "model", roomy())
    trainer = tierflow.Trainer(student, tierflow.optim.AdamW(student.parameters(), lr=5e-3), loss=loss)
    course = [trainer.step([given]).loss for _ in range(4)]
    assert course[0] == pytest.approx(expected.item(), rel=2e-2) and course[-1] < course[0]
    tierflow.close(student)


def test_trls_trainer_takes_a_streamed_peft_model(work, tmp_path):  # noqa: F811
    """trl.DPOTrainer as it is, over a base that streams: its reference is the base, and its course is that of a resident one."""
    trl, datasets, peft = pytest.importorskip("trl"), pytest.importorskip("datasets"), pytest.importorskip("peft")
    tokenizer = transformers.AutoTokenizer.from_pretrained(work / "model")
    tokenizer.pad_token = "<s>"
    rows = [json.loads(line) for line in (work / "pairs.jsonl").read_text().splitlines()][:6]
    courses = []
    for streamed in True, False:
        torch.manual_seed(1)
        inner = tierflow.load(work / "model", roomy(trainable=False)) if streamed else resident(work, torch.bfloat16)
        arguments = trl.DPOConfig(
            output_dir=str(tmp_path / str(streamed)), report_to=[], use_cpu=True, bf16=False, max_length=LENGTH, learning_rate=5e-3, lr_scheduler_type="constant", max_steps=3,
            per_device_train_batch_size=6, logging_steps=1, beta=0.1, gradient_checkpointing=False, save_strategy="no", disable_tqdm=True)
        model = peft.get_peft_model(inner, peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"))
        opt = tierflow.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3) if streamed else None
        trainer = trl.DPOTrainer(model=model, args=arguments, train_dataset=datasets.Dataset.from_list(rows), processing_class=tokenizer, optimizers=(opt, None))
        trainer.train()
        courses.append([float(record["loss"]) for record in trainer.state.log_history if "loss" in record])
        if streamed:
            tierflow.close(model)
    assert courses[0] == pytest.approx(courses[1], rel=2e-2) and courses[0][-1] < courses[0][0]


def test_what_is_wrong_is_one_line(work):  # noqa: F811
    given = batch_of(work, 2)
    model = tierflow.load(work / "model", roomy())
    opt = tierflow.optim.AdamW(model.parameters())
    with pytest.raises(tierflow.UsageError, match="needs its reference"):
        tierflow.Trainer(model, opt, loss="dpo").step([given])
    opt.zero_grad()
    with pytest.raises(tierflow.UsageError, match="there are dpo, simpo, orpo"):
        tierflow.Trainer(model, opt, loss="ipo")
    with pytest.raises(tierflow.UsageError, match="no teacher_ids"):
        tierflow.Trainer(model, opt, loss=losses.Distillation()).step([given])
    with pytest.raises(tierflow.UsageError, match="beta is above 0"):
        losses.DPO(beta=0)
    with pytest.raises(tierflow.UsageError, match="label that counts"):
        losses.SimPO()(model, {**given, "labels": torch.full_like(given["labels"], -100)})
    tierflow.close(model)


def no_model(**_):
    raise AssertionError("the model runs")


def test_pairs_have_an_order_for_each_seed_and_epoch(work):  # noqa: F811
    def order(pairs):
        return [pair["input_ids"].tolist() for pair in pairs]

    def mixed(**more):
        return tierflow.data.Pairs([work / "pairs.tfd"] * 2, vocab_size=pairs_of(work)._made["vocab_size"], sequence_length=LENGTH, weights=[3, 1], **more)

    assert order(pairs_of(work, seed=1)) != order(pairs_of(work, seed=2)) and sorted(order(pairs_of(work, seed=1))) == sorted(order(pairs_of(work, seed=2)))
    pairs = mixed()
    first = order(pairs)
    pairs.set_epoch(1)
    assert order(pairs) != first
    with pytest.raises(IndexError, match=f"there are {len(pairs)} pairs"):
        pairs[len(pairs)]
    with pytest.raises(tierflow.UsageError, match="shown by `tierflow data preview`"):
        pairs.preview()


def test_a_loss_says_which_micro_batch_is_no_pair(work):  # noqa: F811
    one = {"input_ids": torch.ones(3, 8, dtype=torch.long), "labels": torch.ones(3, 8, dtype=torch.long)}
    with pytest.raises(tierflow.UsageError, match="two rows a pair"):
        losses.SimPO()(no_model, one)
    with pytest.raises(tierflow.UsageError, match="gradients|two rows|label that counts"):
        losses.DPO()(no_model, {"input_ids": one["input_ids"][:2], "labels": torch.tensor([[1] * 8, [-100] * 8])})


def test_a_teacher_is_written_in_eval_mode_and_goes_with_its_rows(work, tmp_path):  # noqa: F811
    model = tierflow.load(work / "teacher", roomy(trainable=False)).train()
    trainer = tierflow.Trainer(model, tierflow.optim.AdamW([torch.nn.Parameter(torch.zeros(1))]))
    modes = []
    model.register_forward_pre_hook(lambda module, args, kwargs: modes.append(module.training), with_kwargs=True)
    tierflow.data.write_teacher(trainer, rows_of(work), tmp_path / "own.tft", top=4)
    assert modes and not any(modes) and model.training
    modes.clear()
    hook = model.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        tierflow.data.write_teacher(trainer, rows_of(work), tmp_path / "other.tft", top=4)
    hook.remove()
    assert model.training and not (tmp_path / "other.tft").exists()
    taught = rows_of(work, teacher=tmp_path / "own.tft", held_out=0.5)
    for rows in taught, taught.held_out():
        again = pickle.loads(pickle.dumps(rows))
        assert all(torch.equal(row["teacher_ids"], other["teacher_ids"]) for row, other in zip(rows, again, strict=True))
        for row in rows:
            counts = losses.what_follows(row["labels"][None])[0] >= 0
            values = row["teacher_log_probabilities"][counts].float()
            assert (values <= 0).all() and (values.diff(dim=-1) <= 0).all() and (values.exp().sum(-1) <= 1.01).all()
    for rows in pairs_of(work), taught:
        with pytest.raises(tierflow.UsageError, match="neither pairs nor taught"):
            tierflow.data.write_teacher(trainer, rows, tmp_path / "third.tft")
    tierflow.close(model)


def test_a_micro_batch_without_a_label_that_counts_teaches_nothing(work):  # noqa: F811
    model = resident(work)
    given = {"input_ids": torch.ones(1, 8, dtype=torch.long), "labels": torch.full((1, 8), -100), "teacher_ids": torch.zeros(1, 8, 2, dtype=torch.int),
             "teacher_log_probabilities": torch.zeros(1, 8, 2)}  # fmt: skip
    assert losses.Distillation()(model, given).item() == 0.0


def test_pairs_are_not_packed(work, tmp_path):  # noqa: F811
    options = {"format": "preference", "sequence_length": LENGTH, "cache": tmp_path / "cache"}
    assert len(tierflow.data.prepare(work / "model", work / "pairs.jsonl", packing="none", **options)) == len(pairs_of(work))
    with pytest.raises(tierflow.UsageError, match='packing is "bfd"; each answer of a pair is a sequence of its own'):
        tierflow.data.prepare(work / "model", work / "pairs.jsonl", packing="bfd", **options)


def test_adapters_within_layers_alone_can_be_switched_off_in_a_visit(work):  # noqa: F811
    peft = pytest.importorskip("peft")
    within = {"r": 2, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
    for config, expected in (
        (peft.LoraConfig(**within), True),
        (peft.LoraConfig(**within, modules_to_save=["lm_head"]), False),
        (peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2), False),
    ):
        assert losses.switches(peft.get_peft_model(resident(work), config)) is expected
    assert losses.switches(resident(work))
