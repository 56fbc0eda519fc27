"""What is generated while a model is trained is what `tierflow generate` writes with the weights of that step, and changes no bit of the training."""
import json
import shutil
import signal
import subprocess

import pytest
from program import changed, needs_torch, on_a_card, run, small, start, steps_of, the_error, wait_until
from rows import base, the_library, transformers, write_rows  # noqa: F401

pytestmark = needs_torch
PROMPTS = ["the answer is", "what", "you long for the user and"]


@pytest.fixture(scope="module")
def work(base, tmp_path_factory):  # noqa: F811
    import torch
    folder = tmp_path_factory.mktemp("samples")
    tokenizer = the_library(base)
    torch.manual_seed(1)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=64, initializer_range=0.1)).to(torch.bfloat16).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=64, num_hidden_layers=8, num_attention_heads=4, num_key_value_heads=4,
        max_position_embeddings=512, initializer_range=0.1)).to(torch.bfloat16).save_pretrained(folder / "deep")
    tokenizer.save_pretrained(folder / "deep")
    write_rows(folder / "rows.jsonl", [{"prompt": text, "completion": " and what you long for"} for text in PROMPTS * 4])
    (folder / "prompts.txt").write_text("\n".join(PROMPTS) + "\n")
    (folder / "long.txt").write_text("\n".join(" ".join([text] * 20) for text in PROMPTS) + "\n")
    return folder


def words(*more):
    return ["train", "--model", "model", "--data", "rows.jsonl", "--data-cache", "cache", "--lr", "5e-3", "--lr-schedule", "constant", "--held-out", "0",
            *small("--sequence-length", "32"), "--micro-batches", "2", *more]  # fmt: skip


SAMPLES = ["--sample-every", "2", "--sample-prompts", "prompts.txt", "--max-new-tokens", "6"]


def samples_of(log):
    return [(line["step"], line["samples"]) for line in map(json.loads, log.read_text().splitlines()) if "samples" in line]


def weights(folder):
    return next(path.read_bytes() for path in sorted(folder.glob("*model.safetensors")))


def test_a_sample_is_what_the_result_generates(work, tmp_path):
    log = tmp_path / "log.json"
    said = run(work, *words("--steps", "4", *SAMPLES), "--out", tmp_path / "out", "--log-json", log).stderr
    (two, _), (four, last) = samples_of(log)
    assert (two, four) == (2, 4) and [sample["prompt"] for sample in last] == [1, 2, 3]
    generated = run(work, "generate", "--model", tmp_path / "out", "--prompts", "prompts.txt", "--temperature", "0", "--max-new-tokens", "6", "--json",
                    *small("--sequence-length", "32")[:6]).stdout  # fmt: skip
    expected = [json.loads(line) for line in generated.splitlines()]
    assert [sample["tokens"] for sample in last] == [sample["tokens"] for sample in expected]
    for sample, theirs in zip(last, expected, strict=True):
        assert sample == theirs
        assert f"step 4: sample {sample['prompt']} ({sample['finish_reason']}): {json.dumps(sample['text'], ensure_ascii=False)}" in said
    run(work, *words("--steps", "4"), "--out", tmp_path / "plain", "--log-json", tmp_path / "plain.json")
    assert weights(tmp_path / "plain") == weights(tmp_path / "out")
    plain = steps_of(tmp_path / "plain.json")
    assert [step["loss"] for step in steps_of(log)] == [step["loss"] for step in plain]
    # What samples fetch is there for the step that follows, and is none of what it moved.
    uploads = [step["lanes"]["upload"]["bytes"] for step in steps_of(log)]
    assert uploads[2] == 0 and uploads[:2] == [step["lanes"]["upload"]["bytes"] for step in plain][:2]


def test_a_sample_ends_with_the_models_stop_token(work, tmp_path):
    logs = [tmp_path / name for name in ("log.json", "ended.json")]
    run(work, *words("--steps", "2", *SAMPLES), "--out", tmp_path / "out", "--log-json", logs[0])
    ((_, whole),) = samples_of(logs[0])
    end = whole[0]["tokens"][2]
    shutil.copytree(work / "model", tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": end, "do_sample": True, "temperature": 2.0}))
    run(work, *changed(words("--steps", "2", *SAMPLES), {"--model": str(tmp_path / "model")}), "--out", tmp_path / "ended", "--log-json", logs[1])
    ((_, ended),) = samples_of(logs[1])
    for sample, before in zip(ended, whole, strict=True):
        stops = end in before["tokens"]
        assert sample["tokens"] == (before["tokens"][: before["tokens"].index(end)] if stops else before["tokens"])
        assert sample["finish_reason"] == ("stop" if stops else "length")


@pytest.mark.parametrize("more", [["--method", "lora", "--lora-rank", "4"], ["--clip", "none"]])
def test_streamed_they_are_the_same(work, tmp_path, more):
    found = []
    for name in "resident", "streamed":
        log, run_words = tmp_path / f"{name}.json", words("--steps", "4", *SAMPLES, *more)
        if name == "streamed":
            run_words = [*changed(run_words, {"--host-memory": "600KiB"}), "--storage", str(tmp_path / "store")]
        run(work, *run_words, "--out", tmp_path / name, "--log-json", log)
        found.append((samples_of(log), [step["loss"] for step in steps_of(log)], weights(tmp_path / name)))
    assert found[0] == found[1] and len(found[0][0]) == 2


LONG = changed(SAMPLES, {"--sample-prompts": "long.txt"})


def on_storage(*more):
    """Words of a run whose samples have more keys and values than RAM."""
    return [*changed(words("--steps", "2", *LONG), {"--host-memory": "600KiB", "--model": "deep"}), "--storage", "store", *more]


def storage_of_a_plan(work):
    return json.loads(run(work, "plan", *on_storage()[1:], "--json", env={"XDG_CACHE_HOME": str(work / "profiles")}).stdout)["storage"]


def test_where_keys_and_values_lie_changes_no_token(work, tmp_path):
    found = []
    for name, budget in ("in RAM", changed(words("--steps", "2", *LONG), {"--model": "deep"})), ("on storage", on_storage()):
        log = tmp_path / f"{name}.json"
        said = run(work, *budget, "--out", tmp_path / name, "--log-json", log).stderr
        found.append((samples_of(log), weights(tmp_path / name)))
        assert ("those of the other layers on storage" in " ".join(said.split())) == (name == "on storage")
    assert found[0] == found[1] and len(found[0][0]) == 1
    assert storage_of_a_plan(work)["keys_and_values"] > 0


def test_where_they_and_two_copies_of_the_state_do_not_fit_there_is_one_copy(work, tmp_path):
    drive = tmp_path / "drive"
    drive.mkdir()
    on_drive = [*changed(on_storage(), {"--storage": str(drive)}), "--allow-any-filesystem", "--allow-buffered"]
    storage = storage_of_a_plan(work)
    size = storage["bytes"] + 2 * 2**20  # files take up to 1 MiB more than they hold: two copies alone fit
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", drive], capture_output=True).returncode != 0:
        pytest.skip("this machine does not let us mount")
    try:
        log = tmp_path / "log.json"
        said = run(work, *on_drive, "--out", tmp_path / "out", "--log-json", log).stderr
        assert "no room for a second copy of the state: a crash loses the run" in said and samples_of(log), said
    finally:
        subprocess.run(["umount", "--lazy", drive], check=True)


def test_writing_them_does_not_pass_the_limit(work, tmp_path):
    log = tmp_path / "log.json"
    run(work, *on_storage(), "--out", tmp_path / "out", "--log-json", log)
    written = 1e12 * json.loads(log.read_text().splitlines()[-1])["summary"]["tb_written"]
    said = run(work, *on_storage("--max-tb-written", str(1e-12 * (written - 4096))), "--out", tmp_path / "limited").stderr
    assert "warning: there are no samples after step 2: writing their keys and values to storage might pass --max-tb-written" in " ".join(said.split())


def test_their_keys_and_values_are_of_the_budget(work, tmp_path):
    said = run(work, *words("--steps", "1", *SAMPLES), "--out", tmp_path / "out").stderr
    assert "keys and values of 2 of 2 layers" in " ".join(said.split())
    refused = run(work, *words("--steps", "1", "--max-new-tokens", "6"), "--out", tmp_path / "none", ok=False)
    assert "--max-new-tokens is for --sample-every" in the_error(refused.stderr)
    refused = run(work, *changed(words("--steps", "1", *SAMPLES), {"--max-new-tokens": "50", "--host-memory": "10KiB"}), "--out", tmp_path / "none", ok=False)
    assert refused.returncode == 2 and "keys and values of 2 sequences take" in the_error(refused.stderr)
    for options, why in ((["--sample-every", "2"], "belong together"), (["--sample-prompts", "prompts.txt"], "belong together"),
                         (changed(SAMPLES, {"--max-new-tokens": "60"}), "beyond the model's 64 positions"),
                         (changed(SAMPLES, {"--sample-prompts": "nothing.txt"}), "nothing.txt")):  # fmt: skip
        refused = run(work, *words("--steps", "1", *options), "--out", tmp_path / "none", ok=False)
        assert refused.returncode in (2, 3) and why in the_error(refused.stderr)


def test_a_plan_counts_them(work, tmp_path):
    def planned(*options, **more):
        asked = ["plan", "--model", "model", *small("--sequence-length", "32", "--micro-batches", "2", *options)]
        return run(work, *on_a_card(asked), "--json", **more)
    plain, counted = json.loads(planned().stdout), json.loads(planned(*SAMPLES).stdout)
    assert counted["device"]["workspace"] > plain["device"]["workspace"] and counted["host"]["keys_and_values"] > plain["host"]["keys_and_values"] == 0
    said = run(work, *words("--steps", "1", *SAMPLES), "--out", tmp_path / "out").stderr  # a run sets as much aside
    assert "samples: keys and values of 2 at once take" in said and "samples: keys and values of 2 at once take" in planned(*SAMPLES).stderr
    refused = planned(*changed(SAMPLES, {"--max-new-tokens": "50"}), "--host-memory", "10KiB", ok=False)
    assert refused.returncode == 2 and "keys and values of 2 sequences take" in the_error(refused.stderr)


def test_a_signal_does_not_wait_for_them(work, tmp_path):
    log = tmp_path / "log.json"
    child = start(work, *changed(words("--steps", "100000", *SAMPLES), {"--sample-every": "1"}), "--out", tmp_path / "out", "--log-json", log)
    wait_until(lambda: log.exists() and '"samples"' in log.read_text())
    child.send_signal(signal.SIGINT)
    _, said = child.communicate(timeout=60)
    assert child.returncode == 128 + signal.SIGINT and "stopped after step" in said
    assert "warning: there are no samples" not in said
    assert (tmp_path / "out" / "model.safetensors").exists()
