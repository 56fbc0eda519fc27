"""What Tierflow writes, transformers and safetensors read; and the other way round."""

import json
import os
import signal
import subprocess
import time

import pytest

from conftest import BUILD

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors")
import safetensors.torch  # noqa: E402

SMALL = dict(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
LLAMA = dict(SMALL, intermediate_size=48)
LLAMA3 = dict(rope_type="llama3", rope_theta=5e5, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=1024)
GPT2 = dict(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=128, bos_token_id=0, eos_token_id=0)
OPT = dict(SMALL, ffn_dim=48, max_position_embeddings=128, word_embed_proj_dim=32)
MODELS = {
    "llama": ("Llama", dict(LLAMA, num_key_value_heads=2, rope_parameters=LLAMA3)),
    "llama_biased_tied": ("Llama", dict(LLAMA, attention_bias=True, mlp_bias=True, tie_word_embeddings=True)),
    "mistral": ("Mistral", dict(LLAMA, num_key_value_heads=2, head_dim=16)),
    "qwen2": ("Qwen2", dict(LLAMA, num_key_value_heads=2, tie_word_embeddings=True)),
    "qwen3": ("Qwen3", dict(LLAMA, num_key_value_heads=2, head_dim=16)),
    "gpt2": ("GPT2", GPT2),
    "gpt2_untied": ("GPT2", dict(GPT2, tie_word_embeddings=False)),
    "opt": ("OPT", OPT),
    "opt_norm_after": ("OPT", dict(OPT, do_layer_norm_before=False)),
    "opt_without_bias": ("OPT", dict(OPT, enable_bias=False)),
}


def make_config(name):
    family, arguments = MODELS[name]
    config = getattr(transformers, family + "Config")(**arguments)
    config.architectures = ["GPT2LMHeadModel" if family == "GPT2" else family + "ForCausalLM"]
    return config


def program(name):
    path = BUILD / name
    if not path.exists():
        pytest.skip(f"{path} is not built")
    return path


def check(folder):
    """What the C++ reader makes of a model folder: name -> (elements, sum, first value)."""
    done = subprocess.run([program("core_probe"), "check", folder], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    return {name: (int(count), float(total), float(first)) for name, count, total, first in rows}


def assert_same(read, parameters):
    assert set(read) == set(parameters)
    for name, tensor in parameters.items():
        values = tensor.detach().double().flatten()
        count, total, first = read[name]
        assert count == values.numel()
        assert first == pytest.approx(values[0].item(), rel=1e-8)
        assert total == pytest.approx(values.sum().item(), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("name", MODELS)
def test_init_makes_what_transformers_expects(tierflow, tmp_path, name):
    make_config(name).save_pretrained(tmp_path / "config")
    for out, extra in ("one", []), ("many", ["--shard-size", "8KiB"]):
        subprocess.run([tierflow, "init", "--config", tmp_path / "config" / "config.json", "--out", tmp_path / out, "--seed", "5", *extra],
                       check=True, timeout=60)  # fmt: skip
        model, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / out, output_loading_info=True, dtype="auto")
        assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
        assert model.dtype == torch.bfloat16
        assert_same(check(tmp_path / out), dict(model.named_parameters()))
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                assert 0.002 < parameter.float().std() < 0.025, parameter_name
            else:
                assert set(parameter.unique().tolist()) <= {0.0, 1.0}, parameter_name
    assert (tmp_path / "many" / "model.safetensors.index.json").exists()
    assert sorted(os.listdir(tmp_path / "one")) == ["config.json", "model.safetensors"]
    one = safetensors.torch.load_file(tmp_path / "one" / "model.safetensors")
    for name_, tensor in transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "many", dtype="auto").state_dict().items():
        assert name_ not in one or torch.equal(one[name_], tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama", "gpt2", "opt"])
def test_what_transformers_saves_is_read(tmp_path, name, dtype):
    model = transformers.AutoModelForCausalLM.from_config(make_config(name)).to(dtype)
    for folder, size in ("one", "5GB"), ("many", "8KB"):
        model.save_pretrained(tmp_path / folder, max_shard_size=size)
        assert_same(check(tmp_path / folder), dict(model.named_parameters()))
    assert not (tmp_path / "many" / "model.safetensors").exists()


def test_a_checkpoint_of_the_bare_model_is_read(tmp_path):
    model = transformers.AutoModelForCausalLM.from_config(make_config("gpt2"))
    model.save_pretrained(tmp_path)
    bare = {name.removeprefix("transformer."): tensor.clone() for name, tensor in model.transformer.state_dict().items()}
    safetensors.torch.save_file(bare, tmp_path / "model.safetensors")
    assert_same(check(tmp_path), dict(model.named_parameters()))


def test_init_stopped_half_way_leaves_nothing(tierflow, tmp_path):
    config = make_config("llama").to_dict() | dict(hidden_size=2048, intermediate_size=8192, num_hidden_layers=30)
    (tmp_path / "config.json").write_text(json.dumps(config))
    process = subprocess.Popen([tierflow, "init", "--config", tmp_path / "config.json", "--out", tmp_path / "out"], stderr=subprocess.PIPE, text=True)
    while not (tmp_path / "out").exists() and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    line = process.communicate(timeout=60)[1]
    assert process.returncode == 143 and line.count("\n") == 1 and "nothing was kept" in line
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "words, code, text",
    [
        ([], 2, "Usage"),
        (["trian"], 2, "trian"),
        (["init"], 2, "--config"),
        (["init", "--confg", "x"], 2, "did you mean --config?"),
        (["init", "--config", "/nonexistent/config.json", "--out", "OUT"], 3, "/nonexistent/config.json"),
        (["init", "--config", "/dev/zero", "--out", "OUT"], 3, "/dev/zero"),
        (["init", "--config", "GOOD", "--out", "/proc/tierflow"], None, "/proc/tierflow"),
        (["init", "--config", "HUGE", "--out", "OUT"], 4, "GiB free"),
    ],
)
def test_bad_input_gives_one_line_and_its_code(tierflow, tmp_path, words, code, text):
    good = make_config("llama").to_dict()
    (tmp_path / "good.json").write_text(json.dumps(good))
    (tmp_path / "huge.json").write_text(json.dumps(good | dict(hidden_size=65536, intermediate_size=262144, num_hidden_layers=200)))
    names = {"GOOD": tmp_path / "good.json", "HUGE": tmp_path / "huge.json", "OUT": tmp_path / "out"}
    done = subprocess.run([tierflow, *(names.get(word, word) for word in words)], capture_output=True, text=True, timeout=60)
    assert done.returncode == code if code is not None else done.returncode in (3, 4, 5)
    assert text in done.stderr
    assert not words or done.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()
