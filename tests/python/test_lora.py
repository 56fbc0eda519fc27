"""`tierflow train --method lora`: a result that PEFT reads, gone on with to the bit, added to its model; what is refused."""
import hashlib
import json
import signal

import peft
import pytest
import transformers
from program import again, changed, config, needs_torch, on_a_card, run, small, start, steps_of, the_error, wait_until
from safetensors.torch import load_file, save_file

pytestmark = needs_torch

LORA = ["train", "--method", "lora", "--model", "base", "--data", "text.txt", "--lr", "1e-2", "--lora-rank", "4", "--lora-alpha", "8"]


@pytest.fixture
def base(work):
    run(work, "init", "--config", "config.json", "--out", "base")
    return work / "base"


def loss(work, *words):
    return json.loads(run(work, "eval", "--data", "text.txt", "--max-sequences", "8", "--json", *small(*words)).stdout)["loss"]


def files(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def test_the_result_is_peft_s_folder_and_the_base_stays_as_it_is(work, base):
    before = files(base)
    done = run(work, *LORA, "--steps", "8", "--out", "out", *small("--storage", "store", "--host-memory", "1MiB"))
    assert done.stderr.endswith(f"result: {work / 'out'}\n") and "of them trained" in done.stderr
    assert files(base) == before
    assert sorted(path.name for path in (work / "out").iterdir()) == ["adapter_config.json", "adapter_model.safetensors", "tierflow_run.json"]
    config = json.loads((work / "out" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (4, 8, str(base))
    tuned, plain = loss(work, "--model", "base", "--adapter", "out"), loss(work, "--model", "base")
    assert tuned < plain - 0.05
    # Added to the model: the same up to bf16, and the folder it names is found.
    run(work, "merge", "--adapter", "out", "--out", "merged")
    assert loss(work, "--model", "merged") == pytest.approx(tuned, abs=2e-3)
    weights, merged, added = load_file(base / "model.safetensors"), load_file(work / "merged" / "model.safetensors"), load_file(work / "out" / "adapter_model.safetensors")
    module = "model.layers.1.mlp.down_proj"
    delta = 2 * added[f"base_model.model.{module}.lora_B.weight"] @ added[f"base_model.model.{module}.lora_A.weight"]
    assert (merged[f"{module}.weight"] == (weights[f"{module}.weight"].float() + delta).bfloat16()).all()
    assert (merged["lm_head.weight"] == weights["lm_head.weight"]).all()
    # The run itself does the same with --merge.
    run(work, *LORA, "--steps", "8", "--merge", "--out", "whole", *small())
    assert (work / "whole" / "model.safetensors").read_bytes() == (work / "merged" / "model.safetensors").read_bytes()
    assert not (work / "whole" / "adapter_config.json").exists()


def test_adapters_for_other_weights_are_said(work, base):
    run(work, *LORA, "--steps", "1", "--out", "out", *small())
    run(work, "init", "--config", "config.json", "--seed", "1", "--out", "other")
    for words in (["eval", "--data", "text.txt", "--max-sequences", "1", *small()], ["merge", "--out"], ["train", "--method", "lora", "--data", "text.txt", "--steps", "1", *small(), "--out"]):
        for model, warned in (("base", False), ("other", True)):
            out = [f"{words[0]}-{model}"] if words[-1] == "--out" else []
            done = run(work, *words, *out, "--model", model, "--adapter", "out")
            assert ("warning: the adapters of out were trained over other weights than those of other" in done.stderr) == warned, (words, done.stderr)
    peft.PeftModel.from_pretrained(transformers.AutoModelForCausalLM.from_pretrained(work / "other"), work / "out").save_pretrained(work / "resaved")
    assert "other weights" not in run(work, "merge", "--model", "other", "--adapter", "resaved", "--out", "whole").stderr  # PEFT's does not say


def test_modules_that_are_saved_go_beside_the_adapters_and_into_the_whole_model(work, base):
    words = [*LORA, "--steps", "8", "--modules-to-save", "embed_tokens,lm_head,norm"]
    run(work, *words, "--out", "out", *small("--storage", "store", "--host-memory", "1MiB"))
    assert json.loads((work / "out" / "adapter_config.json").read_text())["modules_to_save"] == ["embed_tokens", "lm_head", "norm"]
    weights, beside = load_file(base / "model.safetensors"), load_file(work / "out" / "adapter_model.safetensors")
    saved = [name for name in weights if name.split(".")[-2].endswith(("embed_tokens", "lm_head", "norm"))]
    assert len(saved) == 7
    assert sorted(name for name in beside if "lora_" not in name) == sorted(f"base_model.model.{name}" for name in saved)
    tuned = loss(work, "--model", "base", "--adapter", "out")
    # The whole model has them as they were trained, rounded, and the same from the run itself, in memory.
    run(work, "merge", "--adapter", "out", "--out", "merged")
    assert loss(work, "--model", "merged") == pytest.approx(tuned, abs=2e-3)
    merged = load_file(work / "merged" / "model.safetensors")
    for name in saved:
        assert merged[name].equal(beside[f"base_model.model.{name}"].bfloat16()) and not merged[name].equal(weights[name])
    run(work, *words, "--merge", "--out", "whole", *small())
    assert (work / "whole" / "model.safetensors").read_bytes() == (work / "merged" / "model.safetensors").read_bytes()
    # They are gone on with, and are a part of what the run is.
    more = ["train", "--method", "lora", "--model", "base", "--adapter", "out", "--data", "text.txt", "--steps", "4", "--lr", "1e-2", "--lr-scale", "embed_tokens=0", "--out", "more"]
    run(work, *more, *small())
    again = load_file(work / "more" / "adapter_model.safetensors")
    kept = "base_model.model.model.embed_tokens.weight"
    assert [name for name in again if again[name].equal(beside[name])] == [kept]
    assert "no module that could be saved is called wte" in refused(work, *changed(words, {"--modules-to-save": "wte,norm"}), "--out", "none", *small())


@pytest.mark.parametrize("init, precision", [("pissa", "bf16"), ("olora", "nf4")])
def test_first_values_from_the_base_are_written_as_an_ordinary_adapter(work, base, init, precision):
    before = files(base)
    words = [*LORA, "--init", init, "--base-precision", precision, "--use-rslora", "--lr-schedule", "constant"]
    run(work, *words, "--steps", "30", "--out", "whole", *small())
    config = json.loads((work / "whole" / "adapter_config.json").read_text())
    assert config["r"] == 8 and config["lora_alpha"] == pytest.approx(8 * 2**0.5) and config["init_lora_weights"] is True and config["use_rslora"]
    tuned = loss(work, "--model", "base", "--adapter", "whole", "--base-precision", precision)
    assert tuned < loss(work, "--model", "base", "--base-precision", precision) - 0.05 and files(base) == before
    # Stopped, exported from the store and gone on with, streamed: the same bits. Another beginning is another run.
    stored = [*words, "--steps", "30", "--out", "out", *small("--storage", "store", "--host-memory", "1MiB", "--durability", "step", "--log-json", "log.json")]
    training = start(work, *stored, delay_ms=10)
    wait_until(lambda: (work / "log.json").exists() and len(steps_of(work / "log.json")) > 3)
    training.send_signal(signal.SIGINT)
    assert "is committed" in training.communicate()[1]
    step = len(steps_of(work / "log.json"))
    run(work, "export", "--storage", "store", "--out", "exported")
    run(work, *words, "--steps", str(step), "--out", "then", *small())
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        there, here = ((work / folder / name).read_text(errors="replace").replace(str(base), "") for folder in ("exported", "then"))
        assert there.replace("null", '""') == here.replace("null", '""')
    assert "its adapter is not this one's" in the_error(run(work, *changed(stored, {"--init": "pissa_niter_4"}), ok=False).stderr)
    assert "resumed after step" in run(work, *stored).stderr
    assert (work / "out" / "adapter_model.safetensors").read_bytes() == (work / "whole" / "adapter_model.safetensors").read_bytes()
    # Added to the model by either way.
    run(work, "merge", "--adapter", "whole", "--out", "merged")
    run(work, *words, "--steps", "30", "--merge", "--out", "added", *small())
    merged, added, plain = (load_file(work / folder / "model.safetensors") for folder in ("merged", "added", "base"))
    for name, value in merged.items():
        assert (value.float() - added[name].float()).abs().max() <= 2e-2 * value.float().abs().max(), name
        assert value.equal(plain[name]) == ("_proj" not in name), name
    # PEFT's own folder of the kind belongs to another base.
    path = work / "whole" / "adapter_config.json"
    path.write_text(json.dumps({**config, "init_lora_weights": init}))
    assert "belong to a changed base" in refused(work, "eval", "--model", "base", "--adapter", "whole", "--data", "text.txt", *small())
    assert "there is no \"pizza\"" in refused(work, *changed(words, {"--init": "pizza"}), "--out", "none", *small())


def test_magnitudes_are_trained_written_and_added(work, base):
    words = [*LORA, "--use-dora", "--base-precision", "nf4-double", "--steps", "8"]
    run(work, *words, "--out", "out", *small("--storage", "store", "--host-memory", "1MiB"))
    run(work, *words, "--out", "whole", *small())
    assert (work / "out" / "adapter_model.safetensors").read_bytes() == (work / "whole" / "adapter_model.safetensors").read_bytes()
    tuned = loss(work, "--model", "base", "--adapter", "out")
    assert tuned < loss(work, "--model", "base") - 0.05
    run(work, "merge", "--adapter", "out", "--out", "merged")
    assert loss(work, "--model", "merged") == pytest.approx(tuned, abs=2e-3)
    run(work, *words, "--merge", "--out", "added", *small())
    assert (work / "added" / "model.safetensors").read_bytes() == (work / "merged" / "model.safetensors").read_bytes()
    assert "begin as" in refused(work, *words, "--init", "pissa", "--out", "none", *small())


def test_killed_it_is_gone_on_with_to_the_bit(work, base):
    run(work, *LORA, "--steps", "40", "--out", "whole", *small())
    words = [*LORA, "--steps", "40", "--out", "out", *small("--storage", "store", "--host-memory", "1MiB", "--durability", "step", "--log-json", "log.json")]
    training = start(work, *words, delay_ms=10)
    wait_until(lambda: (work / "log.json").exists() and len(steps_of(work / "log.json")) > 5)
    training.send_signal(signal.SIGKILL)
    training.communicate()
    assert "state after step" in again(work, "status", "store").stdout
    done = run(work, *words)
    assert "resumed after step" in done.stderr
    assert (work / "out" / "adapter_model.safetensors").read_bytes() == (work / "whole" / "adapter_model.safetensors").read_bytes()
    # The same command once more says that it is done.
    assert "the run is finished" in run(work, *words).stderr


def test_what_a_stopped_run_left_is_exported_as_the_adapters(work, base):
    words = [*LORA, "--steps", "4000", "--lr-schedule", "constant", "--out", "out", *small("--storage", "store", "--host-memory", "1MiB", "--durability", "step", "--log-json", "log.json")]
    training = start(work, *words)
    wait_until(lambda: (work / "log.json").exists() and len(steps_of(work / "log.json")) > 3)
    training.send_signal(signal.SIGINT)
    assert "is committed" in training.communicate()[1]
    step = len(steps_of(work / "log.json"))
    run(work, "export", "--storage", "store", "--out", "exported")
    assert sorted(path.name for path in (work / "exported").iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    run(work, *LORA, "--steps", str(step), "--lr-schedule", "constant", "--out", "whole", *small())
    assert (work / "exported" / "adapter_model.safetensors").read_bytes() == (work / "whole" / "adapter_model.safetensors").read_bytes()
    # Another rank is another run.
    other = [word if word != "4" else "8" for word in words]
    assert "its adapter is not this one's (r 4, not 8): go on as" in the_error(run(work, *other, ok=False).stderr)


def test_adapters_that_are_there_are_gone_on_with(work, base):
    run(work, *LORA, "--steps", "8", "--out", "first", *small())
    begun = loss(work, "--model", "base", "--adapter", "first")
    log = work / "log.json"
    run(work, "train", "--method", "lora", "--model", "base", "--adapter", "first", "--data", "text.txt", "--steps", "8", "--lr", "1e-2", "--out", "second", *small("--log-json", log))
    assert loss(work, "--model", "base", "--adapter", "second") < begun
    assert json.loads((work / "second" / "adapter_config.json").read_text())["r"] == 4


def test_checkpoints_of_a_run_are_adapters_too(work, base):
    run(work, *LORA, "--steps", "4", "--export-every", "2", "--out", "out", *small())
    assert sorted(path.name for path in (work / "out" / "checkpoint-2").iterdir()) == ["adapter_config.json", "adapter_model.safetensors", "tierflow_run.json"]


def test_each_option_reaches_the_adapters(work, base):
    run(work, *LORA, "--steps", "1", "--out", "out", "--use-rslora", "--lora-dropout", "0.1", "--lora-target-modules", "q_proj,down_proj", "--lora-exclude-modules", "layers.0.mlp.down_proj",
        "--lora-rank-pattern", "q_proj=2", "--lora-alpha-pattern", "down_proj=3", *small())
    config = json.loads((work / "out" / "adapter_config.json").read_text())
    assert config["use_rslora"] and config["lora_dropout"] == 0.1 and config["rank_pattern"] == {"q_proj": 2} and config["alpha_pattern"] == {"down_proj": 3}
    shapes = {name: list(value.shape) for name, value in load_file(work / "out" / "adapter_model.safetensors").items()}
    assert sorted(shapes) == [f"base_model.model.model.layers.{name}.lora_{side}.weight" for name in ("0.self_attn.q_proj", "1.mlp.down_proj", "1.self_attn.q_proj") for side in "AB"]
    assert shapes["base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"] == [2, 64]
    run(work, *LORA, "--steps", "1", "--out", "one", "--lora-target-modules", r".*\.(k|v)_proj", "--lora-layers", "1", *small())
    assert sorted(load_file(work / "one" / "adapter_model.safetensors")) == [f"base_model.model.model.layers.1.self_attn.{name}_proj.lora_{side}.weight" for name in "kv" for side in "AB"]
    model = peft.PeftModel.from_pretrained(transformers.AutoModelForCausalLM.from_pretrained(base), work / "one")
    assert sum("lora_A" in name for name, _ in model.named_parameters()) == 2


def test_the_learning_rate_of_b_is_its_own(work, base):
    for out, *words in (["plain"], ["one", "--loraplus-lr-ratio", "1"], ["none", "--loraplus-lr-ratio", "0"]):
        run(work, *LORA, "--steps", "3", "--out", out, *words, *small())
    plain, one, none = (load_file(work / out / "adapter_model.safetensors") for out in ("plain", "one", "none"))
    for name, value in plain.items():
        assert value.equal(one[name])
        assert (value.abs().sum() > 0) and (none[name].abs().sum() == 0) == ("lora_B" in name)
    # Of Adam's first step the learning rate is a factor, and the product of A and B begins as zero.
    for out, *words in (["step"], ["steps", "--loraplus-lr-ratio", "16"]):
        run(work, *LORA, "--steps", "1", "--out", out, *words, *small())
    step, steps = (load_file(work / out / "adapter_model.safetensors") for out in ("step", "steps"))
    for name, value in step.items():
        assert steps[name].equal(value * (16 if "lora_B" in name else 1)), name


def refused(work, *words):
    done = run(work, *words, ok=False)
    assert done.returncode != 0
    return the_error(done.stderr)


@pytest.mark.parametrize("precision", ["int8", "nf4-double"])
def test_a_base_in_another_precision_streams_and_is_gone_on_with(work, base, precision):
    before = files(base)
    words = [*LORA, "--base-precision", precision, "--steps", "60"]
    run(work, *words, "--out", "whole", *small())
    assert loss(work, "--model", "base", "--adapter", "whole", "--base-precision", precision) < loss(work, "--model", "base", "--base-precision", precision) - 0.05
    log = work / "log.json"
    stored = [*words, "--out", "out", *small("--storage", "store", "--host-memory", "192KiB", "--durability", "step", "--log-json", log)]
    training = start(work, *stored, delay_ms=10)
    wait_until(lambda: log.exists() and len(steps_of(log)) > 3)
    training.send_signal(signal.SIGINT)
    assert "is committed" in training.communicate()[1]
    assert "its base's precision is not this one's" in the_error(run(work, *changed(stored, {"--base-precision": "bf16", "--host-memory": "1MiB"}), ok=False).stderr)
    run(work, "verify", "store")
    done = run(work, *stored)
    assert "resumed after step" in done.stderr
    assert (work / "out" / "adapter_model.safetensors").read_bytes() == (work / "whole" / "adapter_model.safetensors").read_bytes()
    assert files(base) == before
    summary = json.loads(log.read_text().splitlines()[-1])["summary"]
    assert summary["lanes"]["disk_read"]["bytes"] > 0


def test_what_cannot_be_is_one_line(work, base):
    more = ["--steps", "1", "--out", "out", *small()]
    assert "no linear layer is called c_attn: this model has down_proj" in refused(work, *LORA, *more, "--lora-target-modules", "c_attn")
    assert "no linear layer to exclude is called c_attn" in refused(work, *LORA, *more, "--lora-exclude-modules", "c_attn")
    assert "fits c_attn, for which a rank is given" in refused(work, *LORA, *more, "--lora-rank-pattern", "c_attn=4")
    galore = ["train", "--method", "galore", "--rank", "2", "--config", "config.json", "--data", "text.txt"]
    assert "fits c_attn, for which a rank is given" in refused(work, *galore, *more, "--lora-rank-pattern", "c_attn=4")
    assert "no linear layer is left" in refused(work, *LORA, *more, "--lora-target-modules", "h[0-9]+")
    assert "no regular expression" in refused(work, *LORA, *more, "--lora-target-modules", "(q_proj")
    assert "stands alone" in refused(work, *LORA, *more, "--lora-target-modules", ".*q,v_proj")
    assert "--lora-rank-pattern takes NAME=VALUE" in refused(work, *LORA, *more, "--lora-rank-pattern", "q_proj")
    assert "--lora-rank is for adapters: give --method lora too" in refused(work, "train", "--model", "base", "--data", "text.txt", "--lora-rank", "4", *more)
    assert "--base-precision is for adapters" in refused(work, "train", "--model", "base", "--data", "text.txt", "--base-precision", "nf4", *more)
    assert "it must be one of auto, bf16, fp8, fp8-rows, mxfp4, int8, nf4, nf4-double" in refused(work, *LORA, *more, "--base-precision", "nf3")
    assert "needs --model" in refused(work, "train", "--method", "lora", "--config", "config.json", "--data", "text.txt", *more)
    assert not (work / "out").exists()


def test_foreign_adapters_are_refused_by_file_and_field(work, base):
    run(work, *LORA, "--steps", "1", "--out", "out", *small())
    eval_ = ["eval", "--model", "base", "--adapter", "out", "--data", "text.txt", *small()]
    path, weights = work / "out" / "adapter_config.json", work / "out" / "adapter_model.safetensors"
    good, tensors = json.loads(path.read_text()), load_file(weights)
    for change, why in (({"peft_type": "IA3"}, 'is "IA3"'), ({"use_dora": True}, "lora_magnitude_vector is missing"), ({"modules_to_save": ["lm_head"]}, "lm_head.weight is missing"),
                        ({"target_modules": 3}, "target_modules"), ({"r": "4"}, "r is"), ({"rank_pattern": {"q_proj": "x"}}, "rank_pattern")):
        path.write_text(json.dumps({**good, **change}))
        line = refused(work, *eval_)
        assert "adapter_config.json" in line and why in line
    path.write_text(json.dumps({**good, "use_dora": None, "modules_to_save": [], "unknown": 5}))
    run(work, *eval_)
    path.write_text(json.dumps({**good, "r": 8}))
    assert "lora_A.weight" in refused(work, *eval_)
    path.write_text(json.dumps(good))
    tensors.popitem()
    save_file(tensors, weights)
    assert "lora_" in refused(work, *eval_)
    weights.unlink()
    assert "adapter_model.safetensors" in refused(work, *eval_)
    assert "nothing: is no folder" in refused(work, *[word if word != "out" else "nothing" for word in eval_])
    path.write_text(json.dumps({**good, "base_model_name_or_path": "somebody/model"}))
    assert "give --model" in refused(work, "merge", "--adapter", "out", "--out", "merged")


MIXTURE = {"num_experts_per_tok": 2, "head_dim": 16, "eos_token_id": None, "pad_token_id": None}
MIXTURES = {
    "qwen3_moe": {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": 4, "moe_intermediate_size": 48, "norm_topk_prob": True, **MIXTURE},
    "granitemoe": {"architectures": ["GraniteMoeForCausalLM"], "model_type": "granitemoe", "num_local_experts": 4, **{**MIXTURE, "head_dim": None}},
    "gpt_oss": {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "num_local_experts": 4, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, **MIXTURE},
}
EXPERTS = ["--lora-target-parameters", "experts.gate_up_proj,experts.down_proj"]


@pytest.fixture(params=MIXTURES)
def mixture(request, work):
    (work / "config.json").write_text(json.dumps({name: value for name, value in config(**MIXTURES[request.param]).items() if value is not None}))
    run(work, "init", "--config", "config.json", "--out", "base")
    return request.param


def added_by_experts(adapter, layer, scale):
    """What each expert's matrices [experts, out, in] get, from the folder's factors."""
    deltas = []
    for wrapper in ("experts.base_layer", "experts"):
        a, b = (next(value for name, value in adapter.items() if f"layers.{layer}." in name and f".{wrapper}.lora_{side}.weight" in name) for side in "AB")
        a, b = a.reshape(4, -1, a.shape[1]), b.reshape(b.shape[0], -1, 4).permute(2, 0, 1)
        deltas.append(scale * b @ a)
    return deltas


def test_adapters_of_experts_stream_as_they_are_resident_and_are_added(work, mixture):
    before = files(work / "base")
    words = [*LORA, *EXPERTS, "--steps", "6"]
    run(work, *words, "--out", "out", *small("--storage", "store", "--host-memory", "2MiB"))
    run(work, *words, "--out", "whole", *small())
    assert (work / "out" / "adapter_model.safetensors").read_bytes() == (work / "whole" / "adapter_model.safetensors").read_bytes()
    assert files(work / "base") == before
    tuned = loss(work, "--model", "base", "--adapter", "out")
    assert tuned < loss(work, "--model", "base") - 0.05
    # Added, in the folder's own layout: base + scale * B A in fp32, rounded once.
    run(work, "merge", "--adapter", "out", "--out", "merged")
    run(work, *words, "--merge", "--out", "added", *small())
    assert (work / "added" / "model.safetensors").read_bytes() == (work / "merged" / "model.safetensors").read_bytes()
    base, merged, adapter = (load_file(work / folder / name) for folder, name in (("base", "model.safetensors"), ("merged", "model.safetensors"), ("out", "adapter_model.safetensors")))
    assert base.keys() == merged.keys()
    both, down = added_by_experts(adapter, 1, 2)
    for name, value in base.items():
        if not name.startswith("model.layers.1.") or not (".experts." in name or "_linear" in name) or name.endswith("_bias"):
            continue
        if mixture == "qwen3_moe":
            expert, kind = int(name.split(".")[-3]), name.split(".")[-2]
            delta = down[expert] if kind == "down_proj" else both[expert].chunk(2)[kind == "up_proj"]
        else:
            delta = down if "down_proj" in name or "output_linear" in name else both
            delta = delta.transpose(1, 2) if mixture == "gpt_oss" else delta
        expected, found = (value.float() + delta).bfloat16(), merged[name]
        assert not found.equal(value), name
        assert ((found.float() - expected.float()).abs() <= 2**-7 * expected.float().abs()).all() and (found != expected).float().mean() < 1e-3, name
    routers = [name for name in base if "router" in name or name.endswith("mlp.gate.weight")]
    assert routers and all(base[name].equal(merged[name]) for name in routers)
    assert loss(work, "--model", "merged") == pytest.approx(tuned, abs=1e-2)
    transformers.AutoModelForCausalLM.from_pretrained(work / "merged")


def test_adapters_of_experts_over_four_bits_are_gone_on_with(work, mixture):
    words = [*LORA, *EXPERTS, "--lora-target-modules", "none", "--base-precision", "nf4", "--steps", "12"]
    run(work, *words, "--out", "whole", *small())
    stored = [*words, "--out", "out", *small("--storage", "store", "--host-memory", "2MiB", "--durability", "step", "--log-json", "log.json")]
    training = start(work, *stored, delay_ms=10)
    wait_until(lambda: (work / "log.json").exists() and len(steps_of(work / "log.json")) > 3)
    training.send_signal(signal.SIGKILL)
    training.communicate()
    assert "state after step" in again(work, "status", "store").stdout
    # Other parameters are another run.
    assert "its adapter is not this one's" in the_error(run(work, *changed(stored, {"--lora-target-parameters": "down_proj"}), ok=False).stderr)
    assert "resumed after step" in run(work, *stored).stderr
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (work / "out" / name).read_bytes() == (work / "whole" / name).read_bytes()
    config = json.loads((work / "out" / "adapter_config.json").read_text())
    assert config["target_modules"] == [] and config["target_parameters"] == ["experts.gate_up_proj", "experts.down_proj"]
    assert all(".experts." in name for name in load_file(work / "out" / "adapter_model.safetensors"))
    # It is gone on with.
    run(work, "train", "--method", "lora", "--model", "base", "--adapter", "out", "--data", "text.txt", "--steps", "2", "--out", "more", *small())
    assert json.loads((work / "more" / "adapter_config.json").read_text())["target_modules"] == []


def test_a_plan_counts_the_factors_of_experts(work):
    (work / "config.json").write_text(json.dumps(config(**MIXTURES["gpt_oss"])))
    run(work, "init", "--config", "config.json", "--out", "base")
    run(work, *LORA, *EXPERTS, "--lora-target-modules", "none", "--steps", "1", "--out", "out", *small())
    plain = on_a_card(["plan", "--method", "lora", "--model", "base", "--lora-rank", "4", "--json", *small()])
    planned, without = (json.loads(run(work, *plain, *more).stdout) for more in (EXPERTS, []))
    factors = load_file(work / "out" / "adapter_model.safetensors")
    numbers, largest = sum(value.numel() for value in factors.values()), sorted(value.numel() for name, value in factors.items() if "lora_B" in name)[-2:]
    assert planned["model"]["parameters"] - without["model"]["parameters"] == numbers
    host = {name: planned["host"][name] - without["host"][name] for name in ("used", "resident", "buffers", "loading", "exporting")}
    # Two are held while they are read, one while it is written.
    assert host["loading"] == 4 * sum(largest) and host["exporting"] == 4 * largest[-1] and host["used"] == host["resident"] + host["buffers"] + 4 * sum(largest)
    assert host["resident"] % 4096 == 0 and host["resident"] >= 2 * numbers  # their state is on the card


def test_parameters_that_there_are_none_of_are_one_line(work, base):
    more = ["--steps", "1", "--out", "out", *small()]
    assert "the model has no experts" in refused(work, *LORA, *more, *EXPERTS)
    (work / "config.json").write_text(json.dumps(config(**{**MIXTURES["gpt_oss"], "eos_token_id": 1, "pad_token_id": 1})))
    run(work, "init", "--config", "config.json", "--out", "mixture")
    words = [*changed(LORA, {"--model": "mixture"}), *more]
    assert "no parameter of experts is called w1: this model has mlp.experts.down_proj, mlp.experts.gate_up_proj" in refused(work, *words, "--lora-target-parameters", "w1")
    assert "router.weight is a router's: routers have no adapters here" in refused(work, *words, "--lora-target-parameters", "router.weight")
    assert "have no dropout" in refused(work, *words, *EXPERTS, "--lora-dropout", "0.1")
    assert "have no magnitude" in refused(work, *words, *EXPERTS, "--use-dora")
    assert "begin as" in refused(work, *words, *EXPERTS, "--init", "olora")
    assert "there is nothing to adapt" in refused(work, *words, "--lora-target-modules", "none")
    for choice in (["--lora-layers", "0"], ["--lora-exclude-modules", "q_proj"], ["--lora-exclude-modules", ".*q_proj"]):
        assert "name the layer in the path" in refused(work, *words, *EXPERTS, "--lora-target-modules", "none", *choice)
    assert not (work / "out").exists()
