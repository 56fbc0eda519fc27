"""`--method galore`: windows of projected gradients beside GaLore written out in torch, killed anywhere, exported, planned; what is refused."""
import json
import shutil
import signal

import numpy
import pytest
import torch
import transformers
from program import BUILD, again, changed, needs_torch, run, small, start, steps_of, the_error, wait_until
from safetensors.torch import load_file
from test_adapters import loss_of, make_base, plain, probe

pytestmark = needs_torch

SHIM = BUILD / "librecord_calls.so"
GALORE = ["train", "--method", "galore", "--model", "base", "--data", "text.txt", "--lr", "1e-2", "--lr-schedule", "constant", "--rank", "8", "--update-gap", "2", "--scale", "0.5"]


@pytest.fixture
def base(work):
    run(work, "init", "--config", "config.json", "--out", "base")
    return work / "base"


def galore(model, steps, gap, projectors=None, rank=4, scale=0.5, lr=1e-2, keeps_moments=True, folds=True):
    """GaLore as its repository has it (type "std", AdamW without decay), on dense weights W = W0 + P S: the losses, what the linear layers of the blocks have changed by, and how much of each gradient its projector sees of what the best of that rank does. projectors: by window and layer, in place of the gradient's singular vectors, which have no sign of their own while moments go on from window to window. The switches leave a part out."""
    model.train()
    linear = {name + ".weight": module for name, module in model.named_modules() if "layers." in name and isinstance(module, torch.nn.Linear)}
    begun = {name: module.weight.detach().clone() for name, module in linear.items()}
    base, trained, projector, moments, losses, seen = dict(begun), {}, {}, {}, [], []
    for step in range(steps):
        loss = loss_of(model, step)
        loss.backward()
        losses.append(loss.item())
        with torch.no_grad():
            for name, weight in model.named_parameters():
                g = weight.grad
                if name in linear:
                    left = g.shape[0] < g.shape[1]
                    if step % gap == 0:
                        base[name] = weight.clone() if folds else begun[name]
                        trained[name] = torch.zeros(rank, g.shape[1]) if left else torch.zeros(g.shape[0], rank)
                        u, s, vh = torch.linalg.svd(g, full_matrices=False)
                        projector[name] = u[:, :rank] if left else vh[:rank]
                        if projectors:
                            projector[name] = projectors[step // gap][name].view(projector[name].shape)
                            seen.append(((projector[name].t() @ g if left else g @ projector[name].t()).norm() / s[:rank].norm()).item())
                        if not keeps_moments:
                            moments.pop(name, None)
                    g = projector[name].t() @ g if left else g @ projector[name].t()
                m, v, t = moments.get(name, (torch.zeros_like(g), torch.zeros_like(g), 0))
                m, v, t = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g, t + 1
                moments[name] = m, v, t
                change = lr * (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)
                if name in linear:
                    trained[name] -= scale * change
                    weight.copy_(base[name] + (projector[name] @ trained[name] if left else trained[name] @ projector[name]))
                else:
                    weight -= change
        model.zero_grad()
    return losses, {name: module.weight.detach() - begun[name] for name, module in linear.items()}, seen


def read_projectors(file, steps, gap):
    names, values = file.with_name(file.name + ".names").read_text().split(), torch.from_numpy(numpy.fromfile(file, dtype=numpy.float32))
    windows = (steps + gap - 1) // gap
    layers = len(names) // windows
    assert layers * windows == len(names) and names == names[:layers] * windows
    sides = [4 * min(module.weight.shape) for module in map(dict(plain(file.parent / "model").named_modules()).get, names)]
    parts = iter(zip(names, values.split(sides)))
    return [{name + ".weight": next(parts)[1] for name in names[:layers]} for _ in range(windows)]


def test_windows_are_galore(tmp_path):
    make_base("llama", tmp_path / "model")
    gap, steps = 3, 8  # two windows and the beginning of a third
    ours = probe(tmp_path / "model", tmp_path / "tuned", steps, f"galore={gap}", f"projectors={tmp_path / 'projectors'}")[:-1]
    projectors = read_projectors(tmp_path / "projectors", steps, gap)
    losses, changes, seen = galore(plain(tmp_path / "model"), steps, gap, projectors)
    assert ours == pytest.approx(losses, rel=3e-2) and ours[-1] < 0.9 * ours[0]
    # Projectors are orthonormal and see as much of the gradient as any.
    assert len(seen) == 3 * 14 and min(seen) > 0.97 and max(seen) < 1.02
    for window in projectors:
        for p in window.values():
            side = p.view(4, -1) if torch.allclose(p.view(4, -1) @ p.view(4, -1).t(), torch.eye(4), atol=2e-2) else p.view(-1, 4).t()
            assert torch.allclose(side @ side.t(), torch.eye(4), atol=2e-2)

    # How far the layers have come, beside where GaLore takes them, and where it does with a part left out.
    before, after = (load_file(tmp_path / folder / "model.safetensors") for folder in ("model", "tuned"))

    def distance(**without):
        theirs = galore(plain(tmp_path / "model"), steps, gap, projectors, **without)[1]
        off = sum((after[name].float() - before[name].float() - change).norm() ** 2 for name, change in theirs.items())
        return (off / sum(change.norm() ** 2 for change in changes.values())).sqrt().item()

    near = distance()
    assert near < 0.15
    for without in ({"keeps_moments": False}, {"folds": False}, {"scale": 1}):
        assert distance(**without) > 4 * near, without


def losses(work):
    found = {}
    for log in sorted(work.glob("log.json*")):
        text = log.read_text()
        log.write_text(text[: text.rfind("\n") + 1])
        for record in steps_of(log):
            assert found.setdefault(record["step"], record["loss"]) == record["loss"]
    return found


def weights(folder):
    return (folder / "model.safetensors").read_bytes()


def test_the_result_is_an_ordinary_model_and_the_state_may_stream(work, base):
    done = run(work, *GALORE, "--steps", "8", "--out", "out", *small("--log-json", "log.json"))
    assert "gradients projected to rank 8, anew every 2 steps" in " ".join(done.stderr.split())
    assert [record["window"]["step"] for record in map(json.loads, (work / "log.json").read_text().splitlines()) if "window" in record] == [1, 3, 5, 7]
    assert sorted(path.name for path in (work / "out").iterdir()) == ["config.json", "model.safetensors", "tierflow_run.json"]
    assert load_file(work / "out" / "model.safetensors").keys() == load_file(base / "model.safetensors").keys()
    transformers.AutoModelForCausalLM.from_pretrained(work / "out")
    found = steps_of(work / "log.json")
    assert found[-1]["loss"] < found[0]["loss"] - 0.2
    assert len({record["lanes"]["upload"]["bytes"] for record in found}) == 1, "what the beginning of a window moves is no step's"
    tuned = json.loads(run(work, "eval", "--model", "out", "--data", "text.txt", "--max-sequences", "8", "--json", *small()).stdout)["loss"]
    assert tuned < json.loads(run(work, "eval", "--model", "base", "--data", "text.txt", "--max-sequences", "8", "--json", *small()).stdout)["loss"] - 0.2
    run(work, *GALORE, "--steps", "8", "--out", "streamed", *small("--storage", "store", "--host-memory", "2MiB"))
    assert weights(work / "streamed") == weights(work / "out")


def test_killed_at_each_call_it_goes_on_to_the_bit(work, base):
    """In the middle of what begins a window, above all: it writes most."""
    words = [*GALORE, "--steps", "5", "--out", "out", *small("--storage", "store", "--host-memory", "2MiB", "--durability", "step", "--log-json", "log.json", "--engine", "threads", "--held-out", "0")]
    run(work, *changed(words, {"--out": "whole", "--log-json": "whole.json"}), env={"LD_PRELOAD": str(SHIM), "TIERFLOW_CALL_COUNT": "count"})
    expected = {record["step"]: record["loss"] for record in steps_of(work / "whole.json")}
    calls, killed, resumed = int((work / "count").read_text()), 0, 0
    for part in (0.4, 0.65, 0.9):
        died = run(work, *words, ok=False, env={"LD_PRELOAD": str(SHIM), "TIERFLOW_KILL_AT": str(int(calls * part))})
        done = died if died.returncode == 0 else again(work, *words)
        assert done.returncode == 0, f"call {int(calls * part)} of {calls}: {done.stderr}"
        killed += died.returncode == -signal.SIGKILL
        resumed += "resumed after step" in done.stderr
        assert losses(work) == expected and weights(work / "out") == weights(work / "whole"), f"call {int(calls * part)} of {calls}"
        for left in [work / "out", *work.glob("log.json*")]:
            shutil.rmtree(left) if left.is_dir() else left.unlink()
    assert killed == 3 and resumed >= 2


def test_what_a_stopped_run_left_is_exported_as_the_whole_model(work, base):
    words = [*GALORE, "--steps", "4000", "--out", "out", *small("--storage", "store", "--host-memory", "2MiB", "--durability", "step", "--log-json", "log.json", "--held-out", "0")]
    training = start(work, *words)
    wait_until(lambda: (work / "log.json").exists() and (work / "log.json").read_text().count('"loss"') > 4)
    training.send_signal(signal.SIGINT)
    assert "is committed" in training.communicate()[1]
    step = len(steps_of(work / "log.json"))
    run(work, "export", "--storage", "store", "--out", "exported")
    run(work, *changed(words, {"--steps": str(step), "--out": "whole", "--storage": "other", "--log-json": "other.json"}))
    assert weights(work / "exported") == weights(work / "whole")
    assert json.loads((work / "exported" / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    for option, value in (("--rank", "4"), ("--update-gap", "3"), ("--scale", "1")):
        assert "its adapter is not this one's" in the_error(run(work, *changed(words, {option: value}), ok=False).stderr)


def test_from_random_weights_and_layers_by_name(work, base):
    words = changed([word if word != "--model" else "--config" for word in GALORE], {"--config": "config.json"})
    run(work, *words, "--steps", "2", "--out", "out", "--lora-target-modules", "q_proj,down_proj", "--lora-rank-pattern", "q_proj=4", "--freeze", "embed_tokens", *small())
    before, after = load_file(base / "model.safetensors"), load_file(work / "out" / "model.safetensors")  # both of seed 0
    for name, weight in after.items():
        assert weight.equal(before[name]) == ("embed_tokens" in name), name
        if "q_proj" in name or "down_proj" in name:
            assert torch.linalg.matrix_rank((weight.float() - before[name].float()), rtol=3e-2) <= (4 if "q_proj" in name else 8), name


def refused(work, *words):
    done = run(work, *words, ok=False)
    assert done.returncode == 2
    return the_error(done.stderr)


def test_what_cannot_be_is_one_line(work, base):
    more = ["--steps", "1", "--out", "out", *small()]
    assert "smaller side is 32; give a smaller rank" in refused(work, *changed(GALORE, {"--rank": "33"}), *more)
    assert "--update-gap" in refused(work, *changed(GALORE, {"--update-gap": "0"}), *more)
    assert "--scale must be above 0" in refused(work, *changed(GALORE, {"--scale": "0"}), *more)
    assert "has no --weight-decay" in refused(work, *GALORE, "--weight-decay", "0.1", *more)
    for words in (["--lora-rank", "4"], ["--lora-alpha", "4"], ["--lora-dropout", "0.1"], ["--use-dora"], ["--use-rslora"], ["--init", "pissa"], ["--modules-to-save", "lm_head"], ["--merge"],
                  ["--base-precision", "nf4"], ["--loraplus-lr-ratio", "4"], ["--adapter", "base"], ["--lora-alpha-pattern", "q_proj=4"]):
        assert "--method galore takes those that name layers" in refused(work, *GALORE, *words, *more)
    for words in (["--rank", "4"], ["--update-gap", "4"], ["--scale", "4"]):
        assert "are for --method galore" in refused(work, "train", "--method", "lora", "--model", "base", "--data", "text.txt", *words, *more)
    assert "begin as default, pissa, olora, lora-ga, lora_ga or" in refused(work, "train", "--method", "lora", "--model", "base", "--data", "text.txt", "--init", "galore", *more)
    assert "it has no --loss dpo" in refused(work, *GALORE, "--loss", "dpo", *more)
    assert not (work / "out").exists()


def test_the_plan_says_what_is_spared(work, base):
    words = ["--model", "base", "--method", "galore", "--rank", "8", *small("--storage", "store", "--host-memory", "1MiB")]
    plan = json.loads(run(work, "plan", *words, "--json").stdout)
    found, full = plan["galore"], plan["galore"]["full"]
    assert found["update_gap"] == 200 and found["base_written_per_step"] == 0
    assert found["trained_in_their_place"] < found["projected_parameters"] / 2
    for key in ("state", "written_per_step", "gradients_per_step"):
        assert 0 < found[key] < full[key], key
    assert found["written_per_window"] > 4 * found["projected_parameters"]
    text = run(work, "plan", *words).stdout
    assert "(full tuning" in text and "written once a window" in text
