"""What a result has besides weights: the files of the tokenizer, with the chat templates that the model was trained with."""

import json
import shutil

from program import needs_torch, run, small

pytestmark = needs_torch


def with_templates(work):
    """A model's folder with a tokenizer that has several chat templates, and a file with another template."""
    run(work, "init", "--config", "config.json", "--out", "model")
    (work / "model" / "additional_chat_templates").mkdir()
    for name in ("chat_template.jinja", "additional_chat_templates/tool_use.jinja"):
        (work / "model" / name).write_text(f"of the model: {name}")
    (work / "own.jinja").write_text("of the run")


def templates(folder):
    return {str(path.relative_to(folder)): path.read_text() for path in sorted(folder.rglob("*.jinja"))}


def test_every_result_has_all_chat_templates(work):
    with_templates(work)
    own = templates(work / "model")
    assert len(own) == 2
    words = ["train", "--model", "model", "--data", "text.txt", "--steps", "2", *small()]
    run(work, *words, "--out", "whole", "--export-every", "1")
    run(work, *words, "--method", "lora", "--out", "adapters")
    run(work, "merge", "--adapter", "adapters", "--out", "merged")
    for name in ("whole", "whole/checkpoint-1", "adapters", "merged"):
        assert {path: text for path, text in templates(work / name).items() if "checkpoint" not in path} == own, name
    # What a run left that died is removed with them, and another's files are not.
    for path in ("config.json", "tierflow_run.json"):
        (work / "whole" / path).unlink()
    (work / "whole" / "config.json.partial").touch()
    shutil.rmtree(work / "whole" / "checkpoint-1")
    run(work, *words, "--out", "whole")
    assert templates(work / "whole") == own


def test_a_result_has_the_chat_template_that_it_was_trained_with(work):
    with_templates(work)
    words = ["train", "--model", "model", "--data", "text.txt", "--steps", "2", "--chat-template", "own.jinja"]
    run(work, *words, "--out", "whole", *small())
    run(work, *words, "--method", "lora", "--out", "adapters", *small())
    run(work, "merge", "--adapter", "adapters", "--out", "merged")
    run(work, *words, "--no-export", *small("--storage", "store", "--durability", "step"))
    run(work, "export", "--storage", "store", "--out", "exported")
    for name in ("whole", "adapters", "merged", "exported"):
        assert templates(work / name) == {"chat_template.jinja": "of the run"}, name
    # Over the model itself its own template is taken, which is said.
    words = ["eval", "--model", "model", "--adapter", "adapters", "--data", "text.txt", "--max-sequences", "1", *small()]
    warning = "warning: adapters has another chat template than model, whose own is taken: --chat-template takes the other\n"
    assert warning in run(work, *words).stderr and warning not in run(work, *words, "--chat-template", "own.jinja").stderr


def test_an_export_has_what_goes_with_the_weights_or_says_what_it_lacks(work):
    with_templates(work)
    (work / "model" / "generation_config.json").write_text("{}")
    for method in ("full", "lora"):
        run(work, "train", "--model", "model", "--data", "text.txt", "--steps", "1", "--no-export", "--method", method, *small("--storage", method, "--durability", "step"))
        done = run(work, "export", "--storage", method, "--out", f"{method}-out")
        assert "warning" not in done.stderr and (work / f"{method}-out" / "generation_config.json").exists() and len(templates(work / f"{method}-out")) == 2
    config = json.loads((work / "lora-out" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(work / "model")
    (work / "model").rename(work / "moved")
    done = run(work, "export", "--storage", "full", "--out", "alone")
    assert f"warning: the tokenizer's files are not in the result: {work / 'model'} is gone\n" in done.stderr and (work / "alone" / "config.json").exists()
