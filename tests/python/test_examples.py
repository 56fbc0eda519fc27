"""Every example runs, learns, and leaves no files but those it says it writes."""

import os
import pathlib
import re
import subprocess
import sys

import pytest
from play_script import play
from rows import PLAIN, base, messages, the_library, write_rows  # noqa: F401
from safetensors.torch import load_file
from streaming import BUILD, TEXT, torch, transformers

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples" / "python"


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**TEXT, "vocab_size": 256}, num_key_value_heads=2)).bfloat16().save_pretrained(folder)
    return folder


def run(script, *arguments):
    done = play(EXAMPLES / script, *arguments)
    assert done.returncode == 0, done.stderr
    losses = [float(found) for found in re.findall(r"loss ([0-9.]+)", done.stdout)]
    assert losses[-1] < 0.9 * losses[0], done.stdout
    return losses


def storage(tmp_path):
    (tmp_path / "store").mkdir()
    return ["--storage", tmp_path / "store", "--allow-any-filesystem"]


@pytest.mark.parametrize("layers", [[], ["--fused-layers"]])
def test_full_finetune_in_both_orders(layers, model_folder, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("all work and no play makes jack a dull boy\n" * 400)
    options = [*storage(tmp_path), "--device", "2MiB", "--host", "2MiB", "--length", "32", "--lr", "5e-3", "--steps", "6", "--micro-batches", "2", *layers]
    free = run("full_finetune.py", model_folder, text, tmp_path / "a", *options)
    layer_major = run("full_finetune.py", model_folder, text, tmp_path / "b", *options, "--layer-major")
    assert free == layer_major
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in "ab"]
    assert weights[0] == weights[1] and not list((tmp_path / "store").iterdir())
    transformers.LlamaForCausalLM.from_pretrained(tmp_path / "a")


def test_lora(base, tmp_path):  # noqa: F811
    pytest.importorskip("peft")
    tokenizer = the_library(base, PLAIN)
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**TEXT, "vocab_size": len(tokenizer)}, num_key_value_heads=2)).bfloat16().save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    chats = [[("user", f"What is {a} + {b}?"), ("assistant", f"It is {a + b}.")] for a in range(8) for b in range(8)]
    rows = write_rows(tmp_path / "chats.jsonl", [{"messages": messages(chat)} for chat in chats])
    subprocess.run([BUILD / "tierflow", "data", "prepare", "--model", tmp_path / "model", "--data", rows, "--out", tmp_path / "rows.tfd", "--python", sys.executable,
                    "--data-cache", tmp_path / "cache"], check=True, capture_output=True)  # fmt: skip
    run("lora.py", tmp_path / "model", tmp_path / "rows.tfd", tmp_path / "out", *storage(tmp_path), "--device", "4MiB", "--host", "300KiB", "--length", "128", "--steps", "15")
    assert (tmp_path / "out" / "adapter_model.safetensors").exists() and not list((tmp_path / "store").iterdir())


@pytest.mark.parametrize("session", [[], ["--session"]])
def test_preferences(base, tmp_path, session):  # noqa: F811
    pytest.importorskip("peft")
    tokenizer = the_library(base, PLAIN)
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**TEXT, "vocab_size": len(tokenizer)}, num_key_value_heads=2)).bfloat16().save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    rows = [{"prompt": f"What is {a} + {b}?", "chosen": f" {a + b}", "rejected": " the answer"} for a in range(6) for b in range(6)]
    subprocess.run([BUILD / "tierflow", "data", "prepare", "--model", tmp_path / "model", "--data", write_rows(tmp_path / "pairs.jsonl", rows), "--data-format", "preference",
                    "--out", tmp_path / "pairs.tfd", "--python", sys.executable, "--data-cache", tmp_path / "cache"], check=True, capture_output=True)  # fmt: skip
    losses = run("preferences.py", tmp_path / "model", tmp_path / "pairs.tfd", tmp_path / "out", *storage(tmp_path), "--device", "24MiB", "--host", "2MiB", "--length", "64", *session)
    assert losses[0] == pytest.approx(0.6931, abs=1e-4)  # what is trained begins as its reference
    assert (tmp_path / "out" / "adapter_model.safetensors").exists() and not list((tmp_path / "store").iterdir())


def test_own_module(tmp_path):
    run("own_module.py", *storage(tmp_path))
    assert not list((tmp_path / "store").iterdir())


class OwnBlock(torch.nn.Module):
    """As in own_lora.cpp."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = torch.nn.LayerNorm(96), torch.nn.Linear(96, 384), torch.nn.Linear(384, 96)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class OwnModel(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.ModuleDict({"table": torch.nn.Embedding(64, 96)})
        self.blocks = torch.nn.ModuleList(OwnBlock() for _ in range(6))
        self.head = torch.nn.ModuleDict({"out": torch.nn.Linear(96, 64)})

    def loss(self, factor):
        ids = torch.arange(64).view(2, 32)
        hidden = self.embed["table"](ids)
        for block in self.blocks:
            hidden = block(hidden)
        return torch.nn.functional.cross_entropy(self.head["out"](hidden).float().flatten(0, 1), ((ids * factor + 3) % 64).flatten()).item()


def test_adapters_of_layers_of_ones_own_in_cpp_are_pefts(tmp_path):
    """What the program writes of LibTorch modules is what PEFT makes of their twins in Python, with the losses that it printed."""
    peft = pytest.importorskip("peft")
    done = subprocess.run([BUILD / "own_lora", tmp_path / "store", tmp_path / "own"], capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    base, before, after = (float(found) for found in re.findall(r"(?:loss|adapters) ([0-9.]+)", done.stdout))
    assert not list((tmp_path / "store").iterdir())
    model = OwnModel().bfloat16()
    model.load_state_dict(load_file(tmp_path / "own" / "base" / "model.safetensors"))
    assert model.loss(5) == pytest.approx(base, abs=2e-3) and model.loss(11) == pytest.approx(before, rel=2e-3)
    tuned = peft.PeftModel(model, peft.LoraConfig.from_pretrained(tmp_path / "own" / "adapter"))
    tuned.load_adapter(tmp_path / "own" / "adapter", "default")
    assert sum("lora_A" in name for name, _ in tuned.named_parameters()) == 12
    assert model.loss(11) == pytest.approx(after, abs=2e-2) and after < 0.5 * before


@pytest.fixture(scope="module")
def adapters_work(tmp_path_factory):
    """A folder whose model the examples of adapters share; the first of them makes it."""
    return tmp_path_factory.mktemp("adapters")


def run_adapters(script, work, folder=EXAMPLES.parent / "adapters"):
    environment = {**os.environ, "TIERFLOW": str(BUILD / "tierflow"), "PYTHON": sys.executable, "WORK": str(work), "BASE_STEPS": "8", "STEPS": "12"}
    done = subprocess.run([folder / script], env=environment, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    assert not (work / "state").exists()
    return done.stdout + done.stderr


@pytest.mark.parametrize("script, out, says", [
    ("instruction.sh", "instruction", ["The units are measured.", "held-out loss"]),
    ("qlora.sh", "qlora", ["nf4-double", "of 20 questions that were not trained on: before 0, after"]),
    ("preference.sh", "preference", ['"rejected"', "pairs right", "reference: 364 pairs"]),
    ("distillation.sh", "student", ["teacher's tokens: 32 at each of", "== texts that the students have not seen"]),
    ("own_data.sh", "own", ["quantity,thing,unit", '"content": "In '],),
    ("galore.sh", "galore", ["full: ", "galore: ", "MiB written a step"]),
])  # fmt: skip
def test_adapters(script, out, says, adapters_work):
    pytest.importorskip("peft")
    printed = run_adapters(script, adapters_work)
    assert all(words in printed for words in says), printed
    first, last = re.findall(r"held-out loss ([0-9.]+) before, ([0-9.]+) after", printed)[-1]
    assert float(last) < float(first)
    assert any((adapters_work / out / f"{name}.safetensors").exists() for name in ("adapter_model", "model"))


def test_generate(adapters_work):
    printed = run_adapters("generate.sh", adapters_work)
    assert all(words in printed for words in ('{"prompt":1,"text":', '{"prompt":2,"text":', "the same bytes of text either way"))
    answers = (adapters_work / "answers-streamed.jsonl").read_text().splitlines()
    assert len(answers) == 20 and re.search(r"% of the weights, keys and values of 4 of 4 layers \(\d+ MiB\); storage: ", " ".join(printed.split()))


def test_the_demo_of_adapters_asks_before_and_after_and_leaves_no_state(tmp_path):
    pytest.importorskip("peft")
    for name in "qlora", "state":  # of a run before
        (tmp_path / name).mkdir()
        (tmp_path / name / "old").write_text("old")
    (tmp_path / "own.txt").write_text("mine")
    printed = run_adapters("demo_lora.sh", tmp_path, EXAMPLES.parents[1] / "tools")
    asked = printed.index("== questions that were not trained on")
    assert "of 20 questions that were not trained on: before 0, after" in printed[asked:]
    assert all(words in printed[asked:] for words in ("before", "after", f"The adapters are in {tmp_path}/qlora, their model in {tmp_path}/base."))
    first, last = re.findall(r"held-out loss ([0-9.]+) before, ([0-9.]+) after", printed)[-1]
    assert float(last) < float(first)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "data", "own.txt", "qlora"]
    assert (tmp_path / "qlora" / "adapter_model.safetensors").exists() and not (tmp_path / "qlora" / "old").exists()
