"""What a tired user types: outputs that are inputs, closed streams, folders of others, files in the place of folders. One line, and nothing is lost."""
import json
import os
import shutil
import subprocess

import pytest
from program import MIB, PROGRAM, needs_torch, run, small, the_error

pytestmark = needs_torch

TRAIN = ["train", "--config", "config.json", "--data", "text.txt", "--steps", "2", "--held-out", "0"]


@pytest.fixture
def model(work):
    run(work, *TRAIN, "--out", "model", *small())
    (work / "rows.jsonl").write_text("".join(json.dumps({"input_ids": [1, 2, 3, 4], "labels": [1, 2, 3, 4]}) + "\n" for _ in range(4)))
    return work / "model"


def contents(work):
    return {path: path.read_bytes() for path in work.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train", "--model", "model", "--data", "text.txt", "--out", "out", "--trace", "text.txt"], "--trace is text.txt, which --data names too"),
        (["train", "--model", "model", "--data", "text.txt", "--out", "out", "--trace", "model/config.json"], "--trace is model/config.json, a file of --model"),
        (["train", "--config", "config.json", "--data", "text.txt", "--out", "out", "--trace", "config.json"], "--trace is config.json, which --config names too"),
        (["train", "--model", "model", "--data", "text.txt", "--out", "out", "--log-json", "./text.txt"], "--log-json is ./text.txt, which --data names too"),
        (["train", "--model", "model", "--data", "text.txt", "--out", "out", "--log-json", "new", "--trace", "new"], "which --trace names too"),
        (["train", "--config-file", "run.json", "--trace", "run.json"], "--trace is run.json, which --config-file names too"),
        (["eval", "--model", "model", "--data", "rows.jsonl", "--per-document", "rows.jsonl"], "--per-document is rows.jsonl, which --data names too"),
        (["eval", "--model", "model", "--data", "rows.jsonl", "--teacher-out", "rows.jsonl"], "--teacher-out is rows.jsonl, which --data names too"),
        (["eval", "--model", "model", "--data", "rows.jsonl", "--teacher-out", "model/model.safetensors"], "a file of --model"),
        (["eval", "--model", "model", "--data", "rows.jsonl", "--teacher-out", "link"], "--teacher-out is link, which --data names too"),
        (["eval", "--model", "model", "--data", "folder", "--per-document", "folder/rows.jsonl"], "--per-document is folder/rows.jsonl, a file of --data"),
        (["eval", "--model", "model", "--data", "text.txt", "--tokenizer", "t.json", "--log-json", "./t.json"], "which --tokenizer names too"),
        (["train", "--model", "model", "--data", "text.txt", "--out", "out", "--log-json", "new", "--trace", "./new"], "which --trace names too"),
        (["data", "prepare", "--model", "model", "--data", "link.tfd", "--out", "same.tfd"], "--out is same.tfd, which --data names too"),
    ],
)
def test_an_output_that_is_an_input_is_refused(words, said, work, model):
    (work / "link").symlink_to("rows.jsonl")
    (work / "same.tfd").write_text("any")
    (work / "link.tfd").symlink_to("same.tfd")
    (work / "folder").mkdir()
    shutil.copy(work / "rows.jsonl", work / "folder")
    (work / "t.json").write_text("{}")
    (work / "run.json").write_text(json.dumps({"model": "model", "data": ["text.txt"], "out": "out"}))
    before = contents(work)
    done = run(work, *words, *([] if words[0] == "data" else small()), ok=False)
    assert done.returncode == 2 and said in the_error(done.stderr) and "it would be overwritten; name another file" in done.stderr
    assert contents(work) == before and not (work / "out").exists()


@pytest.mark.parametrize("storage", ["nothing", "empty", "text.txt"])
@pytest.mark.parametrize("words", [["status"], ["verify"], ["export", "--out", "out"]])
def test_storage_without_a_state_is_named(words, storage, work):
    (work / "empty").mkdir()
    done = run(work, *words, "--storage", storage, ok=False)
    assert done.returncode == 3 and the_error(done.stderr) == f"tierflow: {storage}: holds no state of a training run: --storage names the folders that the run was given"
    assert not (work / "out").exists() and not (work / "nothing").exists()


def test_outputs_beside_inputs_are_written(work, model):
    run(work, "train", "--model", "model", "--data", "text.txt", "--steps", "1", "--out", "out", "--trace", "model/trace", "--log-json", "model/log.jsonl", *small())
    for _ in range(2):
        run(work, "eval", "--model", "model", "--data", "text.txt", "--max-sequences", "2", "--log-json", "model/eval.json", *small())
    run(work, "train", "--model", "model", "--data", "text.txt", "--steps", "1", "--out", "out3", "--log-json", "/dev/null", "--trace", "/dev/null", *small())
    run(work, "train", "--model", "model", "--data", "text.txt", "--steps", "1", "--out", "out2", "--trace", "model/trace", "--log-json", "model/log.jsonl", *small())
    assert (work / "model/trace").exists() and (work / "model/log.jsonl.1").exists()


def with_closed(number, work, *words):
    """The command without that stream, as `>&-` leaves it."""
    return subprocess.run(["sh", "-c", f'exec "$@" {number}>&-', "sh", PROGRAM, *words], cwd=work, capture_output=True, text=True, timeout=120)


def test_a_closed_stream_is_no_place_for_a_file(work, model):
    command = ["eval", "--model", "model", "--data", "rows.jsonl", "--per-document", "each.jsonl", *small()]
    run(work, *command)
    before = (work / "each.jsonl").read_text()
    for number in (1, 2):
        done = with_closed(number, work, *command)
        assert (work / "each.jsonl").read_text() == before and done.returncode == (5 if number == 1 else 0), done.stderr
    assert "standard output cannot be written" in with_closed(1, work, "eval", "--model", "model", "--data", "text.txt", "--max-sequences", "2", *small()).stderr
    done = with_closed(1, work, "generate", "--model", "model", "--prompt", "hi", "--max-new-tokens", "2", "--device", "cpu", "--device-memory", "64MiB", "--host-memory", "64MiB")
    assert done.returncode == 5 and "standard output" in done.stderr


def test_text_is_not_bytes_where_the_tokenizer_has_another_form(work, model):
    (model / "tokenizer.model").write_bytes(b"\x0a\x03")
    for words in (["train", "--steps", "1", "--out", "out"], ["eval"]):
        done = run(work, words[0], "--model", "model", "--data", "text.txt", *words[1:], *small(), ok=False)
        assert done.returncode == 3 and "model: has tokenizer.model, but no tokenizer.json" in the_error(done.stderr)
        assert "save_pretrained('model')" in done.stderr and "--tokenizer bytes" in done.stderr
    done = run(work, "generate", "--model", "model", "--prompt", "hi", "--device", "cpu", "--device-memory", "64MiB", "--host-memory", "64MiB", ok=False)
    assert done.returncode == 3 and "has tokenizer.model, but no tokenizer.json" in the_error(done.stderr)
    run(work, "eval", "--model", "model", "--data", "rows.jsonl", *small())  # tokens need none
    run(work, "eval", "--model", "model", "--data", "text.txt", "--max-sequences", "2", "--tokenizer", "bytes", *small())


def test_a_state_of_another_user_is_not_called_lost(work):
    if os.geteuid() != 0:
        pytest.skip("only root may become another user")
    run(work, *TRAIN, "--storage", "store", "--no-export", *small("--allow-buffered", "--allow-any-filesystem"))
    for folder in (work, *work.parents):
        if folder.stat().st_uid == 0 and len(folder.parts) > 2:
            folder.chmod(0o755)
    os.chmod(work / "store/state.tfv", 0o600)
    for mode in (0o755, 0o700):
        (work / "store").chmod(mode)
        for words in (["status", "store"], ["verify", "store"], [*TRAIN, "--storage", "store", "--out", "/tmp/none", *small()]):
            done = run(work, *words, ok=False, user=65534, group=65534, extra_groups=[])
            assert done.returncode == 4, done.stderr
            assert "this user may not read it: run as the user who trained" in the_error(done.stderr) and "--fresh" not in done.stderr
    run(work, "verify", "store")


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--model", "text.txt", "--out", "out"], 3, "text.txt: is a file; a model is a folder"),
        (["--config", "config.json", "--out", "out", "--storage", "text.txt"], 3, "text.txt: is a file: name a folder"),
        (["--config", "config.json", "--out", "out", "--storage", "dangling"], 3, "dangling: is a link to what is not there"),
        (["--config", "config.json", "--out", "dangling"], 3, "dangling: is a link to what is not there"),
        (["--config", "config.json", "--out", "out", "--fresh"], 2, "--fresh is for --storage"),
        (["--config", "config.json", "--out", "out", "--storage", "to-file"], 3, "to-file: is a file: name a folder"),
        (["--model", "folder", "--out", "out", "--rank", "8", "--base-precision", "int8"], 2, "--base-precision is for adapters"),
        (["--model", "folder", "--out", "out", "--merge"], 2, "--merge is for adapters: give --method lora too"),
        (["--model", "folder", "--out", "out", "--base-precision", "int8"], 2, "--base-precision is for adapters"),
        (["--model", "folder", "--out", "out", "--use-dora"], 2, "--use-dora is for adapters"),
        (["--model", "folder", "--out", "out", "--init", "pissa"], 2, "--init is for adapters"),
    ],
)
def test_what_is_wrong_is_named(words, code, said, work):
    (work / "folder").mkdir()
    shutil.copy(work / "config.json", work / "folder")
    (work / "dangling").symlink_to("nowhere")
    (work / "to-file").symlink_to("text.txt")
    done = run(work, "train", "--data", "text.txt", *words, *small(), ok=False)
    assert (done.returncode, said in the_error(done.stderr)) == (code, True), done.stderr


def test_a_model_is_no_adapter(work, model):
    done = run(work, "train", "--model", "model", "--data", "text.txt", "--out", "out", "--method", "lora", "--adapter", "model", *small(), ok=False)
    assert done.returncode == 3 and "model/adapter_config.json: does not exist: adapters are a folder" in the_error(done.stderr)


def test_a_json_array_is_no_rows(work, model):
    (work / "array.jsonl").write_text('[\n {"text": "a"}]\n')
    done = run(work, "eval", "--model", "model", "--data", "array.jsonl", *small(), ok=False)
    assert done.returncode == 3 and "array.jsonl:1: begins a JSON array" in the_error(done.stderr) and "jq -c" in done.stderr
    (work / "prompts.json").write_text('[{"text": "a"}]\n')
    done = run(work, "generate", "--model", "model", "--prompts", "prompts.json", "--device", "cpu", ok=False)
    assert done.returncode == 3 and "prompts.json: is JSON: prompts are lines of text" in the_error(done.stderr)


def test_a_state_of_two_folders_names_both(work):
    run(work, *TRAIN, "--storage", "a,b", "--no-export", *small("--allow-buffered", "--allow-any-filesystem", "--host-memory", str(64 * MIB)))
    (work / "b").rename(work / "c")
    done = run(work, "verify", "a", ok=False)
    assert f"name all of them: {work}/a, {work}/b" in the_error(done.stderr) and done.returncode == 2
