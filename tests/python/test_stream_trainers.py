"""The trainers and loaders of others over a streamed model."""

import types

import pytest
from streaming import VOCAB, make, scarce, tierflow, torch, transformers

LR = 1e-3


class Examples(torch.utils.data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        ids = torch.randint(3, VOCAB, (12,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


def test_transformers_trainer(tmp_path):
    pytest.importorskip("accelerate")
    from tierflow.hf import TierflowCallback

    runs = []
    for streamed in (False, True):
        model = make("llama")
        options = dict(per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=4, logging_steps=1, save_steps=4, report_to=[],
                       use_cpu=True, disable_tqdm=True, eval_strategy="steps", eval_steps=2, max_grad_norm=1.0)  # fmt: skip
        if streamed:
            model = tierflow.wrap(model, scarce(tmp_path / "store"))
            opt = tierflow.optim.AdamW(model.parameters(), lr=LR)
        else:
            opt = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
        args = transformers.TrainingArguments(output_dir=tmp_path / str(streamed), **options)
        trainer = transformers.Trainer(model, args, train_dataset=Examples(), eval_dataset=Examples(), optimizers=(opt, None))
        if streamed:
            TierflowCallback().attach(trainer)
        trainer.train()
        runs.append([entry[key] for entry in trainer.state.log_history for key in ("loss", "eval_loss") if key in entry])
        if streamed:
            logged = next(entry for entry in trainer.state.log_history if "tierflow/disk_read_gb" in entry)
            assert logged["tierflow/disk_read_gb"] > 0
    torch.testing.assert_close(torch.tensor(runs[1]), torch.tensor(runs[0]), rtol=2e-2, atol=2e-2)
    saved = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "True" / "checkpoint-4", dtype=torch.bfloat16)
    assert all(torch.equal(p, model.get_parameter(name) + 0) for name, p in saved.named_parameters())


def test_trl_sft_trainer(tmp_path, model):
    trl = pytest.importorskip("trl")
    import datasets
    import tokenizers

    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w3"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", bos_token="w1", eos_token="w2", unk_token="w3")
    data = datasets.Dataset.from_dict({"text": [" ".join(f"w{(i * 7 + j) % 150 + 5}" for j in range(20)) for i in range(16)]})
    args = trl.SFTConfig(output_dir=str(tmp_path), per_device_train_batch_size=2, max_steps=3, logging_steps=1, report_to=[], save_strategy="no",
                         disable_tqdm=True, max_length=32, bf16=False, use_cpu=True)  # fmt: skip
    opt = tierflow.optim.AdamW(model.parameters(), lr=5e-3)
    trainer = trl.SFTTrainer(model=model, args=args, train_dataset=data, processing_class=tokenizer, optimizers=(opt, None))
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 3 and losses[-1] < losses[0]


def test_workers_of_a_data_loader_leave_the_model_alone(tmp_path):
    model = tierflow.wrap(make("llama"), scarce(tmp_path / "store"))
    loader = torch.utils.data.DataLoader(Examples(), batch_size=4, num_workers=1)
    opt = tierflow.optim.AdamW(model.parameters(), lr=LR)
    losses = []
    for _ in range(2):  # workers end between the rounds
        for batch in loader:
            model(**batch).loss.backward()
            opt.step()
            opt.zero_grad()
        losses.append(model(**batch).loss.item())
    assert losses[1] < losses[0]
    tierflow.close(model)


def arguments(folder, **options):
    return transformers.TrainingArguments(**{"output_dir": folder, "per_device_train_batch_size": 2, "logging_steps": 1, "report_to": [], "use_cpu": True, "disable_tqdm": True,
                                             "save_strategy": "no", **options})  # fmt: skip


def test_logs_have_what_moved_since_the_last_one(tmp_path):
    from tierflow.hf import TierflowCallback

    model = tierflow.wrap(make("llama"), scarce(tmp_path / "store"))
    trainer = transformers.Trainer(model, arguments(tmp_path / "out", max_steps=5), train_dataset=Examples(), optimizers=(tierflow.optim.AdamW(model.parameters(), lr=LR), None))
    seen = []

    class Later(transformers.TrainerCallback):
        def on_log(self, args, state, control, logs=None, **_):
            seen.append(dict(logs))  # as one that writes them elsewhere

    trainer.add_callback(Later())
    TierflowCallback().attach(trainer)
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(logs) == 5 and [entry["tierflow/disk_read_gb"] for entry in seen if "loss" in entry] == [entry["tierflow/disk_read_gb"] for entry in logs]
    lanes = tierflow.stats(model)["lanes"]
    for lane in ("disk_read", "disk_write", "upload", "download", "update"):
        moved, busy = [round(entry[f"tierflow/{lane}_gb"] * 1e9) for entry in logs], [entry[f"tierflow/{lane}_busy"] for entry in logs]
        assert 0 < sum(moved) <= lanes[lane]["bytes"] and max(moved) < 0.6 * sum(moved), lane  # each its own share
        assert min(busy) >= 0 and 0 < sum(busy) and max(busy) < 1.5  # shares of the time
    assert [entry["tierflow/skipped_steps"] for entry in logs] == [0] * 5 and not any(key.startswith("tierflow/") for key in trainer.state.log_history[-1])
    tierflow.close(model)


def test_a_lane_that_worked_half_of_the_time_was_busy_by_a_half(monkeypatch):
    from tierflow import hf

    at = {lane: {"bytes": 5e9, "busy_seconds": 2.0} for lane in ("disk_read", "disk_write", "upload", "download", "update")}
    then = {lane: {"bytes": 7e9, "busy_seconds": 5.0} for lane in at}
    found, clock = iter([at, then]), iter([100.0, 106.0, 106.0])
    monkeypatch.setattr(hf, "stats", lambda model: {"lanes": next(found), "skipped_steps": 3})
    monkeypatch.setattr(hf, "time", types.SimpleNamespace(monotonic=lambda: next(clock)))
    callback, logs = hf.TierflowCallback(), {"loss": 1.0}
    callback.attach(types.SimpleNamespace(train=None, callback_handler=types.SimpleNamespace(callbacks=[])))
    callback.on_train_begin(None, None, None)
    callback.on_log(None, types.SimpleNamespace(log_history=[]), None, logs=logs)
    assert logs == {"loss": 1.0, "tierflow/skipped_steps": 3, **{f"tierflow/{lane}_{what}": value for lane in at for what, value in (("gb", 2.0), ("busy", 0.5))}}


def test_a_checkpoint_of_the_model_alone_has_no_state_and_a_second_training_begins_where_it_is(tmp_path, model):
    from tierflow.hf import TierflowCallback

    opt = tierflow.optim.AdamW(model.parameters(), lr=LR)

    def trainer(**options):
        made = transformers.Trainer(model, arguments(tmp_path / "out", save_strategy="steps", save_steps=2, max_steps=2, **options), train_dataset=Examples(), optimizers=(opt, None))
        TierflowCallback().attach(made)
        return made

    trainer(save_only_model=True).train()
    assert not (tmp_path / "out" / "checkpoint-2" / "tierflow").exists()
    one = trainer()
    one.train()
    assert (tmp_path / "out" / "checkpoint-2" / "tierflow" / "checkpoint.json").exists()
    saved = model.lm_head.weight.master()
    with torch.no_grad():
        model.lm_head.weight.fill_(0.5)
    one.train(resume_from_checkpoint=True)  # all of its steps are done
    assert torch.equal(model.lm_head.weight.master(), saved) and not opt.moments_follow
    with torch.no_grad():
        model.lm_head.weight.fill_(0.5)
    one.train()
    assert not torch.equal(model.lm_head.weight.master(), saved), "what was resumed once is not resumed again"


@pytest.mark.parametrize("way", ["callbacks", "add_callback"])
def test_a_callback_that_has_no_trainer_says_how_it_gets_one(way, tmp_path, model):
    from tierflow.hf import TierflowCallback

    opt = tierflow.optim.AdamW(model.parameters(), lr=LR)
    options = {"callbacks": [TierflowCallback()]} if way == "callbacks" else {}
    trainer = transformers.Trainer(model, arguments(tmp_path / "out", max_steps=1), train_dataset=Examples(), optimizers=(opt, None), **options)
    if way == "add_callback":
        trainer.add_callback(TierflowCallback)
    with pytest.raises(tierflow.UsageError, match=r"call TierflowCallback\(\).attach\(trainer\)"):
        trainer.train()
