"""What evaluations find: loss, accuracy and each document's share; runs that end early, and the best model on the way."""
import json
import math
import random
import re
import signal
import subprocess

import pytest
from program import BUILD, changed, needs_torch, run, small, start, steps_of, the_error, wait_until

pytestmark = needs_torch

TRAIN = ["train", "--config", "config.json", "--data", "text.txt", "--steps", "6", "--out", "out", "--log-json", "log.json", "--held-out", "0.05",
         "--eval-sequences", "4", "--lr-schedule", "constant"]


def evaluations(log):
    """Held-out loss by step."""
    records = [json.loads(line) for line in log.read_text().splitlines()]
    return {record["step"]: record["held_out_loss"] for record in records if "held_out_loss" in record}


@pytest.fixture
def rows(work):
    """A model whose guesses differ from token to token, and rows of which some tokens count."""
    run(work, "train", "--config", "config.json", "--data", "text.txt", "--out", "model", *small("--steps", "30", "--lr", "1e-2"))
    chance = random.Random(3)
    text = (work / "text.txt").read_bytes()
    written = []
    for length in [chance.randrange(5, 45) for _ in range(12)]:
        first = chance.randrange(len(text) - length)
        ids = list(text[first : first + length])
        written.append({"input_ids": ids, "labels": [-100 if i < length // 3 else token for i, token in enumerate(ids)]})
    (work / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in written))
    return written


def test_a_text_whose_bytes_become_tokens_unasked_is_said(work):
    config = json.loads((work / "config.json").read_text())
    for vocabulary, warns in (1024, False), (1025, True):
        (work / "config.json").write_text(json.dumps({**config, "vocab_size": vocabulary}))
        run(work, "init", "--config", "config.json", "--out", f"model{vocabulary}")
        tokens = work / f"model{vocabulary}.bin"
        tokens.write_bytes(bytes(4 * 1024))
        for words, said in ([], warns), (["--tokenizer", "bytes"], False):
            line = f"warning: model{vocabulary} has no tokenizer: each byte of a text is a token"
            evaluated = ["eval", "--model", f"model{vocabulary}", *small(), *words]
            assert (line in run(work, *evaluated, "--data", "text.txt", "--max-sequences", "2").stderr) == said
            assert line not in run(work, *evaluated, "--data", tokens).stderr
            answer = run(work, "generate", "--model", f"model{vocabulary}", "--prompt", "A", "--max-new-tokens", "1", "--device", "cpu", *words)
            assert (line in answer.stderr) == said


def test_each_document_has_its_own_loss_and_accuracy(work, rows):
    import torch
    import transformers
    model = transformers.AutoModelForCausalLM.from_pretrained(work / "model", dtype=torch.float32).eval()
    expected = []
    for row in rows:
        with torch.no_grad():
            logits = model(torch.tensor([row["input_ids"]])).logits[0, :-1]
        labels = torch.tensor(row["labels"])[1:]
        counts = labels >= 0
        losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none", ignore_index=-100)
        hits = (logits.argmax(1) == labels) & counts
        expected.append((int(counts.sum()), losses[counts].mean().item(), int(hits.sum())))
    tokens = sum(each[0] for each in expected)
    for packing in "none", "bfd":
        done = run(work, "eval", "--model", "model", "--data", "rows.jsonl", "--packing", packing, "--per-document", "each.jsonl", "--json", *small())
        whole = json.loads(done.stdout)
        found = [json.loads(line) for line in (work / "each.jsonl").read_text().splitlines()]
        assert [each["document"] for each in found] == list(range(len(rows)))
        assert [each["tokens"] for each in found] == [each[0] for each in expected]
        for each, (_, loss, _) in zip(found, expected):
            assert each["loss"] == pytest.approx(loss, rel=2e-2)
        # bf16 decides otherwise where two tokens nearly tie.
        assert sum(each["accuracy"] * each["tokens"] for each in found) == pytest.approx(sum(each[2] for each in expected), abs=3)
        assert 0.1 < whole["accuracy"] < 0.9 and whole["tokens"] == tokens
        for key in "loss", "accuracy":
            assert whole[key] == pytest.approx(sum(each[key] * each["tokens"] for each in found) / tokens, rel=1e-9)


def test_so_many_sequences_are_evaluated_as_were_asked_for(work):
    run(work, "init", "--config", "config.json", "--out", "model")

    def evaluated(*words):
        printed = run(work, "eval", "--model", "model", "--data", "text.txt", "--log-json", "eval.json", "--json", *words, *small()).stdout
        log = [json.loads(line) for line in (work / "eval.json").read_text().splitlines()]
        (work / "eval.json").unlink()
        assert json.loads(printed) == log[-1]
        return log[-1]

    some, all_there_are = evaluated("--max-sequences", "3"), evaluated("--max-sequences", "1000000")
    assert some["sequences"] == 3 < all_there_are["sequences"] and some["tokens"] == 3 * all_there_are["tokens"] / all_there_are["sequences"]
    assert some["perplexity"] == pytest.approx(math.exp(some["loss"])) and some["loss"] != all_there_are["loss"]


def test_what_documents_cannot_be_had_of(work, rows):
    words = ["eval", "--model", "model", "--per-document", "each.jsonl", *small()]
    assert "text is cut into sequences without regard to documents" in the_error(run(work, *words, "--data", "text.txt", ok=False).stderr)
    mixed = run(work, *words, "--data", "rows.jsonl", "rows.jsonl", "--data-weights", "1", "2", ok=False)
    assert "--data-weights" in the_error(mixed.stderr)
    (work / "folder").mkdir()
    assert "is no regular file" in the_error(run(work, *changed(words, {"--per-document": "folder"}), "--data", "rows.jsonl", ok=False).stderr)
    assert not (work / "each.jsonl").exists()


def test_a_run_ends_early_where_the_held_out_loss_no_longer_falls(work):
    """The first evaluation is the best so far; none after it is better by the threshold."""
    words = [*TRAIN, *small("--lr", "1e-6", "--eval-every", "1", "--early-stopping-patience", "2", "--early-stopping-threshold", "0.5")]
    done = run(work, *words)
    assert "stopped early after step 3 of 6" in done.stderr and (work / "out" / "config.json").exists()
    assert sorted(evaluations(work / "log.json")) == [0, 1, 2, 3] and len(steps_of(work / "log.json")) == 3
    assert "the run is finished" not in done.stderr
    # One that gets better all the time goes on to its end.
    done = run(work, *changed(words, {"--out": "other", "--lr": "1e-2", "--early-stopping-threshold": "0", "--log-json": "other.json"}))
    assert "stopped early" not in done.stderr and len(steps_of(work / "other.json")) == 6


def test_a_run_that_was_stopped_counts_on(work):
    words = [*TRAIN, *small("--storage", "store", "--host-memory", "1MiB", "--lr", "1e-6", "--eval-every", "1", "--early-stopping-patience", "3",
                            "--early-stopping-threshold", "0.5", "--durability", "step")]
    process = start(work, *words, delay_ms=20, stderr=subprocess.DEVNULL)
    wait_until(lambda: (work / "log.json").exists() and 2 in evaluations(work / "log.json"))
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 128 + signal.SIGTERM
    done = run(work, *words)
    assert "resumed after step" in done.stderr and "stopped early after step 4 of 6" in done.stderr


def test_the_best_model_on_the_way_stays(work):
    """The learning rate grows until the model gets worse."""
    words = [*changed(TRAIN, {"--steps": "8"}), *small("--lr", "2", "--warmup", "8", "--eval-every", "1", "--export-best")]
    done = run(work, *words)
    on_the_way = {step: loss for step, loss in evaluations(work / "log.json").items() if 0 < step < 8}
    best = min(on_the_way, key=on_the_way.get)
    assert best < 7 and all(math.isfinite(loss) for loss in on_the_way.values())
    assert [each.name for each in work.glob("out/checkpoint-*")] == [f"checkpoint-{best}"]
    assert f"the lowest held-out loss was {on_the_way[best]:.4f}, after step {best}: out/checkpoint-{best}" in done.stderr
    run(work, *changed(words, {"--out": "until", "--steps": str(best), "--log-json": "until.json"}))
    assert (work / "until" / "model.safetensors").read_bytes() == (work / "out" / f"checkpoint-{best}" / "model.safetensors").read_bytes()
    # Beside those of --export-every, of which the last stays.
    run(work, *changed(words, {"--out": "both", "--log-json": "both.json"}), "--export-every", "3", "--export-keep", "1")
    assert {each.name for each in work.glob("both/checkpoint-*")} == {f"checkpoint-{best}", "checkpoint-6"}


def test_the_last_models_on_the_way_are_the_last(work):
    """The best evaluation is not among them, and nobody asked for its model."""
    words = [*changed(TRAIN, {"--steps": "8"}), *small("--lr", "2", "--warmup", "8", "--eval-every", "1", "--export-every", "1", "--export-keep", "2")]
    run(work, *words)
    assert {each.name for each in work.glob("out/checkpoint-*")} == {"checkpoint-6", "checkpoint-7"}


def stopped(work, *words):
    """The step after which the run was stopped, and its state committed."""
    process = start(work, *words, delay_ms=20)
    wait_until(lambda: (work / "log.json").exists() and len(evaluations(work / "log.json")) > 3 and (work / "out" / "checkpoint-2").exists())
    process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 128 + signal.SIGTERM, said
    return int(re.search(r"the state after step (\d+) of", said)[1])


def test_what_a_stopped_run_did_not_do_is_done_when_it_goes_on(work):
    """The best model that there is no folder of is written; what somebody else keeps there stays."""
    store = ["--storage", "store", "--host-memory", "1MiB", "--durability", "step"]
    words = [*changed(TRAIN, {"--steps": "12"}), *small("--lr", "1e-3", "--eval-every", "1", *store)]
    step = stopped(work, *words, "--export-every", "2")
    mine = {each.name for each in work.glob("out/checkpoint-*")}
    assert "checkpoint-2" in mine
    done = run(work, *words, "--export-best")
    losses = {at: loss for at, loss in evaluations(work / "log.json").items() if at < 12}
    assert f"model after step {step} written to" in done.stderr or f"checkpoint-{step}" in mine
    assert step in evaluations(work / "log.json") or step in evaluations(work / "log.json.1")
    best = min(losses, key=losses.get)
    assert {each.name for each in work.glob("out/checkpoint-*")} >= {"checkpoint-2", f"checkpoint-{best}"}


def test_a_best_model_that_is_not_in_this_out_is_not_taken_for_the_result(work):
    """It is in the --out of the command before, which another one goes on from."""
    rising = ["--lr", "2", "--warmup", "8", "--eval-every", "1", "--export-best"]
    words = [*changed(TRAIN, {"--steps": "8"}), *small(*rising, "--storage", "store", "--host-memory", "1MiB", "--durability", "step")]
    process = start(work, *words, delay_ms=20)
    wait_until(lambda: (work / "log.json").exists() and 6 in evaluations(work / "log.json"))
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 128 + signal.SIGTERM, process.stderr.read()
    losses = evaluations(work / "log.json")
    best = min((step for step in losses if step), key=losses.get)
    done = run(work, *changed(words, {"--out": "elsewhere", "--log-json": "later.json"}))
    assert best < 6 and f"the lowest held-out loss was {losses[best]:.4f}, after step {best}: its model is not in elsewhere" in done.stderr
    records = [json.loads(line) for line in (work / "later.json").read_text().splitlines()]
    assert [record["best"] for record in records if "best" in record] == [{"step": best, "held_out_loss": pytest.approx(losses[best]), "folder": None}]


def test_the_best_model_that_cannot_be_written_leaves_the_one_before(work):
    words = [*TRAIN, *small("--lr", "1e-3", "--eval-every", "1", "--export-best")]
    shim = {"LD_PRELOAD": str(BUILD / "librecord_calls.so"), "TIERFLOW_FAIL": "flush:checkpoint-5.partial/model.safetensors.partial:28"}
    done = run(work, *words, env=shim)
    losses = evaluations(work / "log.json")
    assert min(range(1, 6), key=losses.get) == 5 and losses[6] < losses[4]
    assert "warning: the model after step 5 was not written" in done.stderr
    assert [each.name for each in work.glob("out/checkpoint-*")] == ["checkpoint-4"]
    assert "the lowest held-out loss is the result's, after step 6" in done.stderr


@pytest.mark.parametrize("words, why", [
    (["--export-best"], "--export-best needs --eval-every"),
    (["--early-stopping-patience", "2"], "--early-stopping-patience needs --eval-every"),
    (["--early-stopping-threshold", "0.1"], "is for --early-stopping-patience"),
    (["--eval-every", "1", "--export-best", "--held-out", "0"], "need held-out sequences: raise --held-out"),
])  # fmt: skip
def test_what_cannot_be(work, words, why):
    train = [word for word in TRAIN if word not in ("--held-out", "0.05")] if "--held-out" in words else TRAIN
    assert why in the_error(run(work, *train, *small(*words), ok=False).stderr)
    assert not (work / "out").exists()
