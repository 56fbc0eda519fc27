"""`tierflow export` of what a durable Python run committed: the folder that the script itself would have written, and beside a run that goes on."""

import json
import pathlib
import signal
import subprocess
import sys
import threading

import pytest
from safetensors.torch import load_file
from streaming import BUILD, LR, batches, make, tierflow, torch, transformers
from test_stream_commits import Asking, committed
from test_stream_durable import LARGE, SMALL, gpt2, plan_of, tierflow_program

MIXTURE = dict(vocab_size=160, hidden_size=64, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, num_local_experts=4,
               num_experts_per_tok=2, max_position_embeddings=64, initializer_range=0.08)  # fmt: skip
MODELS = {
    "llama": lambda: make("llama"),
    "gpt2": gpt2,  # tied
    "mixtral": lambda: transformers.MixtralForCausalLM(transformers.MixtralConfig(**MIXTURE)).bfloat16(),  # its experts are other tensors in a folder
}


def files(folder):
    return {path.name: path.read_bytes() for path in pathlib.Path(folder).iterdir()}


def export(storage, out):
    code, said, error = tierflow_program("export", "--storage", storage, "--out", out)
    assert code == 0, error
    return said + error


def step(model, opt, batch):
    model(**batch).loss.backward()
    opt.step()
    opt.zero_grad()


@pytest.mark.parametrize("size", [SMALL, LARGE], ids=["streamed", "resident"])
@pytest.mark.parametrize("family", MODELS)
def test_the_folder_is_that_of_save_pretrained(family, size, tmp_path):
    model = tierflow.wrap(MODELS[family]().train(), plan_of([tmp_path / "a"], size=LARGE if family == "mixtral" else size))
    opt = tierflow.optim.AdamW(model.parameters(), lr=LR)
    tierflow.resume(model, opt)
    for batch in batches("llama", 2):
        step(model, opt, batch)
    model.save_pretrained(tmp_path / "mine")
    tierflow.close(model)
    assert "warning" not in export(tmp_path / "a", tmp_path / "out")
    assert files(tmp_path / "out") == files(tmp_path / "mine")
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def test_the_tokenizer_comes_from_the_folder_of_the_model(tmp_path):
    make("llama").save_pretrained(tmp_path / "base")
    (tmp_path / "base" / "tokenizer.json").write_text("{}")
    model = tierflow.load(tmp_path / "base", plan_of([tmp_path / "a"], size=LARGE))
    opt = tierflow.optim.AdamW(model.parameters(), lr=LR)
    tierflow.resume(model, opt)
    step(model, opt, batches("llama", 1)[0])
    model.save_pretrained(tmp_path / "mine")
    tierflow.close(model)
    export(tmp_path / "a", tmp_path / "out")
    assert files(tmp_path / "out") == {**files(tmp_path / "mine"), "tokenizer.json": b"{}"}


@pytest.mark.parametrize("how", [{}, {"use_dora": True}, {"modules_to_save": ["lm_head"]}], ids=lambda how: "".join(how) or "lora")
def test_an_adapter_is_the_folder_that_peft_writes(how, tmp_path):
    import peft

    model = tierflow.wrap(make("llama").requires_grad_(False), plan_of([tmp_path / "a"], size=LARGE, trainable=False))
    torch.manual_seed(1)
    model = peft.get_peft_model(model, peft.LoraConfig(**{"r": 4, "target_modules": ["q_proj"], **how})).train()
    opt = tierflow.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LR)
    tierflow.resume(model, opt)
    for batch in batches("llama", 2):
        step(model, opt, batch)
    model.save_pretrained(tmp_path / "mine")
    tierflow.close(model)
    assert "warning" not in export(tmp_path / "a", tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    assert json.loads((tmp_path / "out/adapter_config.json").read_text()) == json.loads((tmp_path / "mine/adapter_config.json").read_text())
    mine, out = (load_file(tmp_path / folder / "adapter_model.safetensors") for folder in ("mine", "out"))
    assert mine.keys() == out.keys() and all(torch.equal(value, out[name]) and value.dtype == out[name].dtype for name, value in mine.items())


class Own(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(32, 32) for _ in range(2))
        self.register_buffer("scale", torch.full((3,), 0.5))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x * self.scale.mean().to(x.dtype)


def train_own(folder):
    torch.manual_seed(2)
    model = tierflow.wrap(Own(), plan_of([folder], size=LARGE, blocks=("Linear",)))
    opt = tierflow.optim.AdamW(model.parameters(), lr=LR)
    tierflow.resume(model, opt)
    model(torch.ones(2, 32, dtype=torch.bfloat16)).float().square().sum().backward()
    opt.step()
    return model


def test_a_module_of_ones_own_has_its_tensors_and_that_is_said(tmp_path):
    model = train_own(tmp_path / "a")
    tierflow.save(model, tmp_path / "mine")
    tierflow.close(model)
    said = export(tmp_path / "a", tmp_path / "out")
    assert said.count("warning") == 1 and "the model is the script's own: the folder has its tensors as safetensors, and no config.json" in said
    assert files(tmp_path / "out") == files(tmp_path / "mine")


@pytest.mark.parametrize("why", [None, "it is made of two"])
def test_what_only_the_script_can_save_so_has_its_names_in_the_script(why, tmp_path, monkeypatch):
    """None: the state of an earlier version."""
    said_so = tierflow.durable.result_of
    monkeypatch.setattr(tierflow.durable, "result_of", lambda model: {"why": why} if why else said_so(model))
    if why is None:
        whole = tierflow.durable.as_safetensors
        monkeypatch.setattr(tierflow.durable, "as_safetensors", lambda tensors, metadata: whole(tensors, {"record": metadata["record"]}))
    model = train_own(tmp_path / "a")
    expected = {name: value.detach().clone() for name, value in model.state_dict().items()}
    tierflow.close(model)
    said = export(tmp_path / "a", tmp_path / "out")
    assert "under the names that they have in the script, and no config.json: " + (why or "the state is of an earlier version") in said
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == expected.keys() and all(torch.equal(found[name], value) for name, value in expected.items())


class Slow:
    """save_whole(), which the thread of an export is in until it may go on."""

    def __init__(self, monkeypatch):
        self.began, self.may_end = threading.Event(), threading.Event()
        whole = tierflow.model_requests.save_whole

        def save_whole(folder, write):
            self.began.set()
            assert self.may_end.wait(60)
            whole(folder, write)

        monkeypatch.setattr(tierflow.model_requests, "save_whole", save_whole)


@pytest.mark.parametrize("size, every, last", [({"device": "600KiB", "host": "2MiB"}, 1, 6), (LARGE, 1, 6), (LARGE, 4, 5)], ids=["streamed", "resident", "seldom"])
def test_training_goes_on_while_the_model_is_written_and_no_step_is_committed(size, every, last, tmp_path, monkeypatch):
    """A commit that was due meanwhile comes as soon as the model is there."""
    data = batches("gpt2", 7)
    losses, weights = {}, {}
    for folder in ("plain", "asked"):
        model = tierflow.wrap(gpt2(), plan_of([tmp_path / folder], durable=every, size=size))
        opt = tierflow.optim.AdamW(model.parameters(), lr=LR)
        tierflow.resume(model, opt)
        losses[folder] = []
        for at, batch in enumerate(data):
            loss = model(**batch).loss
            if folder == "asked" and at == 1:
                asks = Asking(tmp_path / folder, tmp_path / "so-far")
                slow = Slow(monkeypatch)
            loss.backward()
            opt.step()
            opt.zero_grad()
            losses[folder].append(loss.item())
            if folder == "asked" and at == 2:
                assert slow.began.wait(60)
            if folder == "asked" and at == 4:  # its bytes are read after two more steps
                assert committed(tmp_path / folder) == 2 and not (tmp_path / "so-far").exists()
                slow.may_end.set()
                code, said = asks.answer()
                assert code == 0 and "so-far, the model after step 2" in said
            if folder == "plain" and at == 1:
                model.save_pretrained(tmp_path / "mine")
        if folder == "asked":
            assert committed(tmp_path / folder) == last
        weights[folder] = {name: p.master() for name, p in model.named_parameters()}
        tierflow.close(model)
    assert losses["asked"] == losses["plain"] and files(tmp_path / "so-far") == files(tmp_path / "mine")
    assert all(torch.equal(value, weights["asked"][name]) for name, value in weights["plain"].items())
    assert not [*tmp_path.glob("*.partial")]


def test_a_model_that_is_on_its_way_is_written_before_the_run_ends(made_slow, tmp_path):
    model, slow, asks = made_slow
    threading.Timer(0.3, slow.may_end.set).start()
    tierflow.close(model)
    code, said = asks.answer()
    assert code == 0 and "the model after step 1" in said and (tmp_path / "so-far" / "config.json").exists()
    assert committed(tmp_path / "a") == 2


def test_a_run_that_is_dropped_gives_the_model_up(made_slow, tmp_path):
    """Who asked gets what is committed."""
    model, slow, asks = made_slow
    threading.Timer(0.3, slow.may_end.set).start()
    tierflow.model.engine_of(model).close(commits=False)
    code, said = asks.answer()
    assert code == 0 and "result: " in said and "after step" not in said.splitlines()[-1] and (tmp_path / "so-far" / "config.json").exists()


@pytest.fixture
def made_slow(tmp_path, monkeypatch):
    """After two steps, and somebody waits for the model after the first."""
    model = tierflow.wrap(gpt2(), plan_of([tmp_path / "a"], size=LARGE))
    opt = tierflow.optim.AdamW(model.parameters(), lr=LR)
    tierflow.resume(model, opt)
    slow = Slow(monkeypatch)
    first, second = batches("gpt2", 2)
    model(**first).loss.backward()
    asks = Asking(tmp_path / "a", tmp_path / "so-far")
    opt.step()
    opt.zero_grad()
    step(model, opt, second)
    assert slow.began.wait(60)
    yield model, slow, asks
    slow.may_end.set()
    asks.process.kill()


def test_killed_while_it_writes_a_model_the_run_goes_on_from_that_step(tmp_path):
    code = f"""
import sys; sys.path[:0] = {sys.path!r}
import os, signal, threading, test_stream_export as t
model = t.tierflow.wrap(t.gpt2(), t.plan_of([{str(tmp_path / "a")!r}], size=t.LARGE))
opt = t.tierflow.optim.AdamW(model.parameters(), lr=t.LR)
t.tierflow.resume(model, opt)
t.tierflow.model_requests.save_whole = lambda folder, write: (os.makedirs(folder + ".partial"), print("writes", flush=True), threading.Event().wait())
data = t.batches("gpt2", 4)
model(**data[0]).loss.backward()
print("ask", flush=True); sys.stdin.readline()
for batch in data[1:]:
    opt.step(); opt.zero_grad(); model(**batch).loss.backward()
print("done", flush=True); threading.Event().wait()
"""
    run = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert run.stdout.readline() == "ask\n"
    asks = subprocess.Popen([BUILD / "tierflow", "export", "--storage", tmp_path / "a", "--out", tmp_path / "so-far"], stderr=subprocess.PIPE, text=True)
    assert "trains with this state" in asks.stderr.readline()
    run.stdin.write("\n")
    run.stdin.flush()
    assert {run.stdout.readline(), run.stdout.readline()} == {"writes\n", "done\n"}
    run.send_signal(signal.SIGKILL)
    run.wait(60)
    assert asks.communicate(timeout=60)[1].splitlines()[-1].startswith("result: ") and asks.returncode == 0  # it took what is committed
    assert committed(tmp_path / "a") == 1
    assert export(tmp_path / "a", tmp_path / "out") and files(tmp_path / "out") == files(tmp_path / "so-far")


def test_a_state_whose_commit_says_nonsense_is_damaged(tmp_path, monkeypatch):
    whole = tierflow.durable.as_safetensors
    for at, result in enumerate(('{"adapter": 1}', "[]", '{"adapter": false, "files": {"../x": ""}, "streamed": [], "beside": {}}', '{"adapter": false, "files": {}, "streamed": [], "beside": {}}')):
        monkeypatch.setattr(tierflow.durable, "as_safetensors", lambda tensors, metadata, result=result: whole(tensors, {**metadata, "result": result}))
        tierflow.close(train_own(tmp_path / f"a{at}"))
        code, _, error = tierflow_program("export", "--storage", tmp_path / f"a{at}", "--out", tmp_path / "out")
        assert code == 6 and "does not say how its model is saved" in error and "\n" not in error and not (tmp_path / "out").exists()
