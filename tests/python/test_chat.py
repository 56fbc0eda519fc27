"""The program on rows of conversations, from the outside: prepare, preview, train, evaluate."""

import contextlib
import json
import os
import pathlib
import pty
import subprocess

import pytest

from program import config, needs_torch, run, small, steps_of, the_error
from rows import CHATS, MARKED, PLAIN, SHORTENING, base, messages, the_library, write_rows  # noqa: F401

pytestmark = needs_torch


@pytest.fixture
def chat(base, tmp_path):  # noqa: F811
    """A folder with a model's config and tokenizer, a template and rows."""
    for file in pathlib.Path(base).iterdir():
        (tmp_path / "model").mkdir(exist_ok=True)
        (tmp_path / "model" / file.name).write_bytes(file.read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(config(vocab=400)))
    (tmp_path / "model" / "config.json").write_text(json.dumps(config(vocab=400)))
    (tmp_path / "plain.jinja").write_text(PLAIN)
    write_rows(tmp_path / "a.jsonl", [{"messages": messages(turns)} for turns in CHATS * 3])
    return tmp_path


def choice(*more):
    """Options of all commands; those in `more` replace them."""
    options = {"--model": "model", "--data": "a.jsonl", "--chat-template": "plain.jinja", "--data-cache": "kept", "--sequence-length": "64", "--packing": "none"}
    return [*(word for option, value in options.items() if option not in more for word in (option, value)), *more]


def test_files_that_are_not_read_are_said(chat):
    (chat / "folder").mkdir()
    (chat / "folder" / "a.txt").write_text("word " * 200)
    for name in ("b.csv", "c.jsonl.gz", ".hidden.csv"):
        (chat / "folder" / name).write_text("x")
    words = choice("--data", "folder", "--tokenizer", "bytes", "--packing", "concat")
    assert "2 files of other kinds not read, the first: folder/b.csv\n" in run(chat, "data", "prepare", *words).stdout
    (summary,) = json.loads(run(chat, "data", "prepare", *words, "--json").stdout)
    assert (summary["other_files"], summary["first_other_file"]) == (2, "folder/b.csv")


def test_a_text_has_the_same_tokens_whatever_packs_it(chat):
    (chat / "text.jsonl").write_text(json.dumps({"text": "the answer is what you long for"}) + "\n" + json.dumps({"text": "assistant</s>"}) + "\n")
    prepared = {packing: json.loads(run(chat, "data", "prepare", *choice("--data", "text.jsonl", "--packing", packing, "--sequence-length", "8"), "--json").stdout) for packing in ("none", "bfd", "concat")}
    tokens = {packing: sum(part["tokens"] for part in parts) for packing, parts in prepared.items()}
    tokenizer = the_library(chat / "model", PLAIN)
    count = len(tokenizer("the answer is what you long for")["input_ids"]) + 1 + len(tokenizer("assistant</s>")["input_ids"])
    assert tokens == {"none": count, "bfd": count, "concat": count}


def test_prepare_says_what_became_of_the_rows(chat):
    with open(chat / "a.jsonl", "a") as file:
        file.write("junk\n")
    done = run(chat, "data", "prepare", *choice(), ok=False)
    assert done.returncode == 3 and "a.jsonl:16: is no JSON" in the_error(done.stderr)
    done = run(chat, "data", "prepare", *choice("--on-bad-row", "skip", "--json", "--out", "rows.tfd"))
    (summary,) = json.loads(done.stdout)
    assert summary["bad_rows"] == 1 and "a.jsonl:16" in summary["first_bad_row"]
    assert (summary["examples"], summary["sequences"], summary["truncated"]) == (12, 12, 3)
    assert summary["dropped"] == {"untrained": 3, "untrained_when_cut": 0}
    assert sum(entry["examples"] for entry in summary["lengths"]) == 12
    assert summary["prepared"] == "rows.tfd"
    again = run(chat, "data", "prepare", *choice("--on-bad-row", "skip"))
    assert "12\n" in again.stdout and "up to" in again.stdout and "a.jsonl:16" in again.stdout
    # The file alone serves, without Python.
    (other,) = json.loads(run(chat, "data", "prepare", *choice("--data", "rows.tfd", "--python", "/nonexistent", "--json")).stdout)
    assert {**other, "data": 0, "prepared": 0} == {**summary, "data": 0, "prepared": 0}
    # Mixed with others.
    mixed = choice("--data", "rows.tfd", "rows.tfd", "--json")
    assert [part["share"] for part in json.loads(run(chat, "data", "prepare", *mixed, "--data-weights", "0.7,0.3").stdout)] == [0.7, 0.3]
    for weights, words in [("1", "1 numbers for 2"), ("1,0", "above 0"), ("1,x", "must be a number")]:
        done = run(chat, "data", "prepare", *mixed, "--data-weights", weights, ok=False)
        assert done.returncode == 2 and words in the_error(done.stderr)
    assert "--data-weights" in the_error(run(chat, "data", "prepare", *mixed, ok=False).stderr)


def test_preview_marks_what_is_trained(chat):
    done = run(chat, "data", "preview", "2", *choice())
    assert done.stdout.count("=== sequence") == 2 and "\033" not in done.stdout
    assert "<|start|>assistant\n{+" in done.stdout
    (sequence,) = json.loads(run(chat, "data", "preview", "1", *choice("--json")).stdout)
    assert sum(len(part["ids"]) for part in sequence["runs"]) == sequence["tokens"]
    assert sum(len(part["ids"]) for part in sequence["runs"] if part["trained"]) == sequence["trained"]
    done = run(chat, "data", "preview", "0", *choice(), ok=False)
    assert done.returncode == 2 and "--examples" in done.stderr


def test_on_a_terminal_what_is_trained_is_green(chat):
    plain = run(chat, "data", "preview", "2", *choice()).stdout
    terminal, there = pty.openpty()
    with os.fdopen(terminal, "rb", buffering=0) as shown:
        run(chat, "data", "preview", "2", *choice(), capture_output=False, stdout=there, stderr=subprocess.PIPE)
        os.close(there)
        pieces = []
        with contextlib.suppress(OSError):  # the end of a terminal that nobody writes to any more
            while piece := shown.read(4096):
                pieces.append(piece)
    text = b"".join(pieces).decode().replace("\r\n", "\n")
    assert "\033[32m" in text and "{+" not in text
    assert text.replace("\033[32m", "{+").replace("\033[0m", "+}") == plain


def test_training_counts_the_assistants_tokens_alone(chat, base):  # noqa: F811
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    run(chat, "init", "--config", "config.json", "--out", "made", "--seed", "3")
    for file in pathlib.Path(base).iterdir():
        (chat / "made" / file.name).write_bytes(file.read_bytes())
    result = json.loads(run(chat, "eval", *small(*choice("--model", "made", "--micro-batch", "5", "--json"))).stdout)
    model = transformers.AutoModelForCausalLM.from_pretrained(chat / "made", dtype=torch.bfloat16)
    tokenizer, total, targets = the_library(base, MARKED), 0.0, 0
    for turns in CHATS * 3:
        out = tokenizer.apply_chat_template(messages(turns), return_dict=True, return_assistant_tokens_mask=True)
        ids, mask = torch.tensor(out["input_ids"][:64]), torch.tensor(out["assistant_masks"][:64])
        with torch.no_grad():
            losses = torch.nn.functional.cross_entropy(model(ids[None]).logits[0, :-1].float(), ids[1:], reduction="none")
        total += float((losses * mask[1:]).sum())
        targets += int(mask[1:].sum())
    assert (result["tokens"], result["sequences"]) == (targets, 12)
    assert abs(result["loss"] - total / targets) < 2e-3

    # Packed with others, each alone: the same loss but for rounding.
    packed = json.loads(run(chat, "eval", *small(*choice("--model", "made", "--packing", "auto", "--json"))).stdout)
    assert packed["tokens"] == targets and packed["sequences"] < 10
    assert abs(packed["loss"] - result["loss"]) < 2e-3
    across = json.loads(run(chat, "eval", *small(*choice("--model", "made", "--packing", "concat", "--json"))).stdout)
    assert abs(across["loss"] - result["loss"]) > 2e-3  # here they see each other

    # A step divides by the tokens that count in all of its micro-batches.
    one = ["--model", "made", "--out", "one", "--steps", "1", "--held-out", "0", "--micro-batch", "1", "--micro-batches", "12", "--log-json", "one.jsonl"]
    run(chat, "train", *small(*choice(*one)))
    assert abs(steps_of(chat / "one.jsonl")[0]["loss"] - result["loss"]) < 1e-3

    words = ["train", *small(*choice("--model", "made", "--packing", "bfd", "--out", "out", "--steps", "12", "--lr", "1e-2", "--log-json", "log.jsonl"))]
    done = run(chat, *words)
    losses = [step["loss"] for step in steps_of(chat / "log.jsonl")]
    assert losses[-1] < 0.5 * losses[0]
    assert "12 examples (messages)" in done.stderr
    (data,) = next(json.loads(line)["data"] for line in (chat / "log.jsonl").read_text().splitlines() if "data" in json.loads(line))
    assert data["trained_tokens"] == targets


def test_resume_refuses_rows_that_count_otherwise(chat):
    words = ["train", *small(*choice("--model", "model", "--storage", "state", "--allow-any-filesystem", "--allow-buffered", "--out", "out"))]
    run(chat, "init", "--config", "config.json", "--out", "made")
    words[words.index("model")] = "made"
    for file in (chat / "model").iterdir():
        (chat / "made" / file.name).write_bytes(file.read_bytes())
    done = run(chat, *words, "--steps", "2", "--max-tb-written", "0.000003", ok=False)
    assert done.returncode == 10, done.stderr
    done = run(chat, *words, "--steps", "2", "--train-on", "all", ok=False)
    assert done.returncode == 2 and "--data" in the_error(done.stderr)


def test_a_template_that_shortens_is_refused_in_one_line(chat):
    (chat / "plain.jinja").write_text(SHORTENING)
    done = run(chat, "data", "prepare", *choice(), ok=False)
    line = the_error(done.stderr)
    assert done.returncode == 3 and "a.jsonl:2" in line and "token " in line


def test_help_names_the_commands(chat):
    text = run(chat, "help", "data").stdout
    assert "tierflow data prepare [OPTIONS]" in text and "tierflow data preview [OPTIONS]" in text and "--train-on" in text
    done = run(chat, "data", "show", ok=False)
    assert done.returncode == 2 and "prepare or preview" in the_error(done.stderr)
