"""Adapters beside PEFT: its folder is read as ours is meant, and training takes the same course."""
import json
import statistics
import subprocess

import fork_server
import numpy
import peft
import pytest
import torch
import transformers
from peft.tuners.lora.loraga import preprocess_loraga
from program import BUILD, needs_torch
from safetensors.torch import load_file, save_file
from test_models import CONFIGS, randomised

pytestmark = needs_torch

PROBE = BUILD / "adapter_probe"
SMALL = {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64}
MODELS = {
    "llama": lambda tie_word_embeddings=False, intermediate_size=96: transformers.LlamaConfig(**SMALL, intermediate_size=intermediate_size, num_key_value_heads=2, tie_word_embeddings=tie_word_embeddings),
    "qwen3": lambda: transformers.Qwen3Config(**SMALL, intermediate_size=96, num_key_value_heads=2, head_dim=16),
    "gpt2": lambda tie_word_embeddings=True: transformers.GPT2Config(tie_word_embeddings=tie_word_embeddings, vocab_size=128, n_embd=64, n_layer=2, n_head=4, n_positions=64, embd_pdrop=0, attn_pdrop=0, resid_pdrop=0),
    "opt": lambda tie_word_embeddings=True: transformers.OPTConfig(tie_word_embeddings=tie_word_embeddings, vocab_size=128, hidden_size=64, ffn_dim=96, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=64, word_embed_proj_dim=64, dropout=0.0),
    "gpt_neox": lambda tie_word_embeddings=False: transformers.GPTNeoXConfig(**SMALL, intermediate_size=96, tie_word_embeddings=tie_word_embeddings),
}


def tokens(step):
    rows, columns = torch.arange(4).unsqueeze(1), torch.arange(33).unsqueeze(0)
    return (rows * 31 + columns * columns * 7 + step % 5 * 13) % 128


def loss_of(model, step):
    ids = tokens(step)
    logits = model(input_ids=ids[:, :-1]).logits.float()
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def probe(folder, out, steps, *options):
    done = fork_server.run([PROBE, folder, out, steps, *options], timeout=300)
    assert done.returncode == 0, done.stderr
    return [float(line) for line in done.stdout.split()]


def probe_logits(folder, out, steps, *options):
    """The losses, and the logits of the tokens of step 0: of the session, and of the folder that it wrote in fp32."""
    file = out.with_suffix(".logits")
    losses = probe(folder, out, steps, f"logits={file}", *options)
    return losses, torch.from_numpy(numpy.fromfile(file, dtype=numpy.float32)).reshape(2, 4, 32, -1)


def logits_of(model):
    with torch.no_grad():
        return model(input_ids=tokens(0)[:, :-1]).logits.float()


def expect_the_logits_of(model, found, in_bf16=6e-2):
    """At every position those of PEFT's model: to rounding in fp32, and as bf16 computes them."""
    expected = logits_of(model.eval())
    ours, exactly = ((ours - expected).norm(dim=-1) / expected.norm(dim=-1) for ours in found)
    assert exactly.max() < 1e-5 and ours.max() < in_bf16 and ours.mean() < in_bf16 / 3
    return expected


def make_base(family, folder, **more):
    torch.manual_seed(1)
    base = transformers.AutoModelForCausalLM.from_config(MODELS[family](**more)).to(torch.bfloat16)
    with torch.no_grad():
        for parameter in base.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3)  # so that there is something to learn within a few steps
    base.save_pretrained(folder)


def plain(folder, **more):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager", **more)


def train_with_peft(model, steps, lr=1e-2, optimizer=None):
    """What PEFT's model loses in each step of AdamW over what it trains."""
    model.train()
    optimizer = optimizer or torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], lr=lr, weight_decay=0.0)
    losses = []
    for step in range(steps):
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def expect_the_same_course(ours, theirs, within=5e-2):
    """Of bf16 beside fp32: the first ten losses, their mean, and all of them. Later losses move apart to both sides, by as much as 3% on some processors."""
    assert ours[-1] < 0.95 * ours[0]
    assert ours[:10] == pytest.approx(theirs[:10], rel=5e-3)
    assert statistics.mean(ours) == pytest.approx(statistics.mean(theirs), rel=5e-3)
    assert ours == pytest.approx(theirs, rel=within)


def moved_apart(ours, theirs, begun):
    """How far apart two runs have brought the factors, beside how far they came from where both began. Each folder: adapters of PEFT's."""
    ours, theirs, begun = (load_file(folder / "adapter_model.safetensors") for folder in (ours, theirs, begun))
    apart = sum((value - theirs[name]).square().sum() for name, value in ours.items())
    return (apart / sum((value - begun[name]).square().sum() for name, value in theirs.items())).sqrt().item()


@pytest.mark.parametrize("family", MODELS)
def test_peft_reads_the_folder_and_trains_the_same_way(family, tmp_path):
    make_base(family, tmp_path / "model")
    steps = 50
    _, begun = probe_logits(tmp_path / "model", tmp_path / "begun", 0)
    losses, tuned = probe_logits(tmp_path / "model", tmp_path / "tuned", steps)

    def loaded(adapter, **more):
        return peft.PeftModel.from_pretrained(plain(tmp_path / "model"), tmp_path / adapter, **more)

    # An adapter that has not been trained changes nothing; one that has gives PEFT the logits that it gave us.
    model = loaded("tuned")
    expected = expect_the_logits_of(model, tuned)
    with model.disable_adapter():
        plainly = expect_the_logits_of(model, begun)
    assert ((expected - plainly).norm(dim=-1) / plainly.norm(dim=-1)).min() > 0.1
    config = json.loads((tmp_path / "tuned" / "adapter_config.json").read_text())
    assert config["r"] == 4 and config["lora_alpha"] == 8 and config["fan_in_fan_out"] == (family == "gpt2")

    # PEFT, from the same first values.
    model = loaded("begun", is_trainable=True)
    layers = 7 if family in ("llama", "qwen3") else 6 if family == "opt" else 4
    assert sum(parameter.requires_grad for parameter in model.parameters()) == 2 * 2 * layers
    expect_the_same_course(losses[:-1], train_with_peft(model, steps))

    # What PEFT trained and wrote gives us its logits.
    model.save_pretrained(tmp_path / "theirs")
    assert moved_apart(tmp_path / "tuned", tmp_path / "theirs", tmp_path / "begun") < 0.5
    expect_the_logits_of(model, probe_logits(tmp_path / "model", tmp_path / "again", 0, f"from={tmp_path / 'theirs'}")[1])
    again, theirs = (load_file(tmp_path / folder / "adapter_model.safetensors") for folder in ("again", "theirs"))
    assert again.keys() == theirs.keys() and all(value.equal(again[name]) for name, value in theirs.items())


@pytest.mark.parametrize("family, base", [("llama", "bf16"), ("gpt2", "bf16"), ("opt", "bf16"), ("llama", "nf4")])
def test_small_steps_bring_the_factors_to_where_peft_brings_them(family, base, tmp_path):
    """50 of them. PEFT's base in nf4 is bitsandbytes', whose kernel for the CPU takes rows for whole numbers of blocks: then they have to be."""
    make_base(family, tmp_path / "model", **({"intermediate_size": 128} if base == "nf4" else {}))
    options = [f"base={base}", "lr=1e-3"]
    probe(tmp_path / "model", tmp_path / "begun", 0, *options)
    losses = probe(tmp_path / "model", tmp_path / "tuned", 50, *options)
    quantised = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    theirs = plain(tmp_path / "model") if base == "bf16" else plain(tmp_path / "model", quantization_config=quantised, device_map="cpu")
    model = peft.PeftModel.from_pretrained(theirs, tmp_path / "begun", is_trainable=True)
    assert any(type(module).__name__ == "Linear4bit" for module in model.modules()) == (base == "nf4")
    assert losses[:-1] == pytest.approx(train_with_peft(model, 50, lr=1e-3), rel=2e-3) and losses[-2] < losses[0] - 0.1
    model.save_pretrained(tmp_path / "theirs")
    assert moved_apart(tmp_path / "tuned", tmp_path / "theirs", tmp_path / "begun") < 0.1


def read_by_each_other(theirs, tuned, folder, **within):
    """PEFT has our logits (`tuned`) with what we tuned, and we have its with what it trains further. That model; and the tensors of theirs, as we write them again and as PEFT did."""
    model = peft.PeftModel.from_pretrained(plain(folder / "model"), folder / "tuned")
    expect_the_logits_of(model, tuned, **within)
    train_with_peft(theirs, 10)
    theirs.save_pretrained(folder / "theirs")
    expect_the_logits_of(theirs, probe_logits(folder / "model", folder / "again", 0, f"from={folder / 'theirs'}")[1], **within)
    return model, *(load_file(folder / name / "adapter_model.safetensors") for name in ("again", "theirs"))


# The other dense families: with fused projections (phi3, glm), biases (qwen2, starcoder2), norms behind and scores that are capped or scaled (gemma, olmo, granite, cohere).
DENSE = ["phi3", "phi4_mini", "glm", "glm4", "qwen2", "gemma2", "gemma3", "olmo2", "olmo3", "smollm3", "granite", "cohere", "cohere2", "starcoder2", "mistral_window", "seed_oss"]


@pytest.mark.parametrize("family", DENSE)
def test_each_dense_family_is_read_by_peft_and_the_reverse(family, tmp_path):
    torch.manual_seed(1)
    config = CONFIGS[family]()
    config.vocab_size = 128  # that of the tokens
    randomised(config).to(torch.bfloat16).save_pretrained(tmp_path / "model")
    _, begun = probe_logits(tmp_path / "model", tmp_path / "begun", 0)
    losses, tuned = probe_logits(tmp_path / "model", tmp_path / "tuned", 10)
    assert losses[-1] < losses[0] and (tuned[1] - begun[1]).norm() > 0.05 * begun[1].norm()
    theirs = peft.PeftModel.from_pretrained(plain(tmp_path / "model"), tmp_path / "begun", is_trainable=True)
    linear = {name for name, module in theirs.named_modules() if isinstance(module, peft.tuners.lora.layer.LoraLayer)}
    _, again, written = read_by_each_other(theirs, tuned, tmp_path, in_bf16=0.2)
    assert len(again) == 2 * len(linear) > 0 and again.keys() == written.keys() and all(value.equal(again[name]) for name, value in written.items())
    # Each linear layer of a block has one.
    assert linear == {name for name, module in theirs.named_modules() if ".layers." in name and isinstance(getattr(module, "base_layer", None), torch.nn.Linear)}
    assert not any(isinstance(module, torch.nn.Linear) and ".layers." in name and not {part for part in ("lora_A", "lora_B", "base_layer") if part in name} and name not in linear
                   for name, module in theirs.named_modules())  # fmt: skip


@pytest.mark.parametrize("family, saved, tied", [("llama", ["embed_tokens", "lm_head", "norm"], False), ("llama", ["lm_head"], True),
                                                 ("gpt2", ["wte", "ln_f"], True), ("opt", ["embed_tokens", "fc1", "layer_norm"], True), ("gpt_neox", ["lm_head", "final_layer_norm"], False), ("gpt_neox", ["embed_out"], False), ("gpt_neox", ["embed_in"], True)])
def test_modules_that_are_saved_are_those_of_peft(family, saved, tied, tmp_path):
    make_base(family, tmp_path / "model", tie_word_embeddings=tied)
    steps = 30
    words = [f"saved={name}" for name in saved]
    begun = probe(tmp_path / "model", tmp_path / "begun", 0, *words)
    losses, tuned = probe_logits(tmp_path / "model", tmp_path / "tuned", steps, *words)
    assert begun[-1] == pytest.approx(losses[0], rel=1e-6)

    # PEFT makes the same folder of the same configuration.
    config = json.loads((tmp_path / "begun" / "adapter_config.json").read_text())
    assert config["ensure_weight_tying"] == any(name in ("embed_tokens", "lm_head", "wte", "embed_in") for name in saved if tied)
    kept = {key: config[key] for key in ("r", "lora_alpha", "target_modules", "modules_to_save", "ensure_weight_tying", "fan_in_fan_out", "task_type")}
    theirs = peft.get_peft_model(plain(tmp_path / "model"), peft.LoraConfig(**kept))
    theirs.save_pretrained(tmp_path / "theirs")
    ours, other = (load_file(tmp_path / folder / "adapter_model.safetensors") for folder in ("begun", "theirs"))
    assert {name: value.shape for name, value in ours.items()} == {name: value.shape for name, value in other.items()}
    for name, value in ours.items():
        if "lora_" not in name:
            assert value.equal(other[name]), name

    # What PEFT trains from the same values takes the same course, and each reads what the other has trained.
    model = peft.PeftModel.from_pretrained(plain(tmp_path / "model"), tmp_path / "begun", is_trainable=True)
    expect_the_same_course(losses[:-1], train_with_peft(model, steps))
    _, again, other = read_by_each_other(theirs, tuned, tmp_path)
    for name, value in other.items():
        assert value.equal(again[name]), name


@pytest.mark.parametrize("family, targets", [("llama", "q_proj|lm_head|embed_tokens"), ("gpt_neox", "query_key_value|lm_head|embed_in"), ("llama", "lm_head")])
def test_adapters_of_the_head_and_the_table_are_those_of_peft(family, targets, tmp_path):
    make_base(family, tmp_path / "model")
    steps, pattern = 30, f"pattern=.*({targets})"
    probe(tmp_path / "model", tmp_path / "begun", 0, pattern)
    losses, tuned = probe_logits(tmp_path / "model", tmp_path / "tuned", steps, pattern)

    model = peft.PeftModel.from_pretrained(plain(tmp_path / "model"), tmp_path / "tuned")
    expect_the_logits_of(model, tuned)
    theirs = peft.PeftModel.from_pretrained(plain(tmp_path / "model"), tmp_path / "begun", is_trainable=True)
    trained = {name.split(".lora_")[0].rsplit(".", 1)[-1] for name, parameter in theirs.named_parameters() if parameter.requires_grad}
    assert trained == set(targets.split("|"))
    expect_the_same_course(losses[:-1], train_with_peft(theirs, steps))

    # PEFT writes the head and the table themselves, too: read where they are the model's own.
    theirs.save_pretrained(tmp_path / "theirs")
    written = load_file(tmp_path / "theirs" / "adapter_model.safetensors")
    assert any(".base_layer." in name for name in written)
    expect_the_logits_of(theirs, probe_logits(tmp_path / "model", tmp_path / "again", 0, f"from={tmp_path / 'theirs'}")[1])
    again = load_file(tmp_path / "again" / "adapter_model.safetensors")
    assert again.keys() == {name for name in written if ".base_layer." not in name} and all(value.equal(written[name]) for name, value in again.items())
    changed = next(name for name in written if ".base_layer." in name)
    save_file({**written, changed: written[changed] + 1}, tmp_path / "theirs" / "adapter_model.safetensors")
    done = fork_server.run([PROBE, tmp_path / "model", tmp_path / "none", "0", f"from={tmp_path / 'theirs'}"])
    assert done.returncode != 0 and f"{changed} is not the model's" in done.stderr

    # Added to the model it is the same model.
    subprocess.run([BUILD / "tierflow", "merge", "--model", tmp_path / "model", "--adapter", tmp_path / "tuned", "--out", tmp_path / "merged"], check=True, capture_output=True)
    merged, expected = plain(tmp_path / "merged").state_dict(), model.merge_and_unload().state_dict()
    for name, value in expected.items():
        assert (merged[name] - value).abs().max() <= 2**-8 * value.abs().max(), name


@pytest.mark.parametrize("family, init", [("llama", "pissa"), ("qwen3", "olora"), ("gpt2", "pissa_niter_40"), ("opt", "olora")])
def test_first_values_from_the_base_are_those_of_peft(family, init, tmp_path):
    make_base(family, tmp_path / "model")
    steps = 30
    begun = probe(tmp_path / "model", tmp_path / "begun", 0, f"init={init}")
    losses, logits = probe_logits(tmp_path / "model", tmp_path / "tuned", steps, f"init={init}")
    # The model begins as it is, in every bit that the loss shows.
    standard = probe(tmp_path / "model", tmp_path / "standard", 1)
    assert losses[0] == standard[0] and begun[-1] == probe(tmp_path / "model", tmp_path / "unchanged", 0)[-1]

    # What is written is an ordinary adapter of twice the rank: the present factors and, with a minus, the first ones.
    config = json.loads((tmp_path / "tuned" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["init_lora_weights"]) == (8, 16, True)
    first, tuned = (load_file(tmp_path / folder / "adapter_model.safetensors") for folder in ("begun", "tuned"))
    for name, value in first.items():
        there = tuned[name]
        if "lora_A" in name:
            assert value[:4].equal(value[4:]) and there[4:].equal(value[4:]) and not there[:4].equal(value[:4])
        else:
            assert value[:, :4].equal(-value[:, 4:]) and there[:, 4:].equal(value[:, 4:])
    expect_the_logits_of(peft.PeftModel.from_pretrained(plain(tmp_path / "model"), tmp_path / "tuned"), logits)
    assert probe(tmp_path / "model", tmp_path / "again", 0, f"from={tmp_path / 'tuned'}")[-1] == pytest.approx(losses[-1], rel=1e-2)

    # PEFT's own first values of the same base, with the whole decomposition: the same product up to rounding to bf16, and the same course.
    theirs = peft.get_peft_model(plain(tmp_path / "model"), peft.LoraConfig(r=4, lora_alpha=8, target_modules=config["target_modules"], fan_in_fan_out=family == "gpt2", init_lora_weights=init.split("_")[0]))
    values = dict(theirs.named_parameters())
    for name, a in first.items():
        if "lora_A" in name:
            a0, b0 = values[name.replace("weight", "default.weight")], values[name.replace("lora_A", "lora_B").replace("weight", "default.weight")]
            product, other = first[name.replace("lora_A", "lora_B")][:, :4] @ a[:4], b0 @ a0
            assert (product - other).norm() < 2e-2 * other.norm(), name
    expect_the_same_course(losses[:-1], train_with_peft(theirs, steps))


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt"])
def test_first_values_of_the_gradient_are_its_singular_vectors(family, tmp_path):
    make_base(family, tmp_path / "model")
    begun = probe(tmp_path / "model", tmp_path / "begun", 0, "init=lora-ga")
    assert begun == probe(tmp_path / "model", tmp_path / "unchanged", 0)  # the model begins as it is
    values, standard = (load_file(tmp_path / folder / "adapter_model.safetensors") for folder in ("begun", "unchanged"))
    model = plain(tmp_path / "model")
    loss_of(model, 0).backward()
    gradients = {name: p.grad.double() if family != "gpt2" else p.grad.double().t() for name, p in model.named_parameters() if p.dim() == 2}
    layers = [name for name in values if "lora_A" in name]
    assert len(layers) == 2 * {"llama": 7, "gpt2": 4, "opt": 6}[family]
    for name in layers:
        g = gradients[name.removeprefix("base_model.model.").replace("lora_A.", "")]
        a, b = values[name].double()[4:], -values[name.replace("lora_A", "lora_B")].double()[:, 4:]
        assert a.equal(values[name].double()[:4])
        # Orthonormal but for the factor of the paper: out^(1/4) / sqrt(16).
        length = g.shape[0] ** 0.25 / 4
        for basis in a, b.t():
            assert torch.allclose(basis @ basis.t(), length**2 * torch.eye(4, dtype=torch.float64), atol=2e-2 * length**2), name
        # The first singular vectors on the right, on the left those behind them: they see as much of the gradient as any.
        s = torch.linalg.svdvals(g)
        assert (g @ a.t()).norm() / length == pytest.approx(s[:4].norm().item(), rel=2e-2), name
        assert (b.t() @ g).norm() / length == pytest.approx(s[4:8].norm().item(), rel=8e-2), name
        # So the first step, of plain descent, goes along the gradient as far as rank 8 can, where the default's does not.
        def along(step):
            return (step * g).sum().item() / (step.norm() * g.norm()).item()

        best, ours = (s[:8].norm() / s.norm()).item(), along(g @ a.t() @ a + b @ b.t() @ g)
        a = standard[name].double()
        assert ours == pytest.approx(best, rel=3e-2) and ours > 1.5 * along(g @ a.t() @ a), name
    # It learns as the others do.
    losses = probe(tmp_path / "model", tmp_path / "tuned", 40, "init=lora-ga")
    assert losses[0] == probe(tmp_path / "model", tmp_path / "one", 1)[0] and losses[-2] < 0.9 * losses[0]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_first_values_of_the_gradient_by_pefts_name_are_those_of_peft(family, tmp_path):
    make_base(family, tmp_path / "model")
    begun = probe(tmp_path / "model", tmp_path / "begun", 0, "init=lora_ga")
    assert begun == probe(tmp_path / "model", tmp_path / "unchanged", 0)
    config = json.loads((tmp_path / "begun" / "adapter_config.json").read_text())
    assert (config["r"], config["init_lora_weights"]) == (8, True)
    values = load_file(tmp_path / "begun" / "adapter_model.safetensors")

    lora = peft.LoraConfig(r=4, lora_alpha=8, target_modules=config["target_modules"], fan_in_fan_out=family == "gpt2", init_lora_weights="lora_ga", lora_ga_config=peft.LoraGAConfig())
    model = plain(tmp_path / "model")
    preprocess_loraga(model, lora, lambda: loss_of(model, 0).backward())
    theirs = dict(peft.get_peft_model(model, lora).named_parameters())
    layers = [name for name in values if "lora_A" in name]
    assert len(layers) == 2 * {"llama": 7, "gpt2": 4}[family]
    for name in layers:
        other = name.replace("lora_A", "lora_B")
        a, b = values[name][4:], -values[other][:, 4:]
        a0, b0 = (theirs[each.replace("weight", "default.weight")].detach() for each in (name, other))
        # The same up to the signs that a pair of singular vectors may change together: their spaces, and their lengths.
        for ours, peers in ((a.t() @ a, a0.t() @ a0), (b @ b.t(), b0 @ b0.t())):
            assert (ours - peers).norm() < 0.1 * peers.norm(), name
        assert torch.allclose(a.norm(dim=1), a0.norm(dim=1), rtol=1e-2) and torch.allclose(b.norm(dim=0), b0.norm(dim=0), rtol=5e-2), name


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "opt"])
def test_magnitudes_are_those_of_peft(family, tmp_path):
    make_base(family, tmp_path / "model")
    steps = 30
    begun = probe(tmp_path / "model", tmp_path / "begun", 0, "dora")
    losses, logits = probe_logits(tmp_path / "model", tmp_path / "tuned", steps, "dora")
    assert begun[-1] == pytest.approx(probe(tmp_path / "model", tmp_path / "plain", 0)[-1], rel=1e-3)

    # PEFT begins with the same lengths, and trains the same way from the same values.
    config = json.loads((tmp_path / "begun" / "adapter_config.json").read_text())
    assert config["use_dora"] is True
    theirs = peft.get_peft_model(plain(tmp_path / "model"), peft.LoraConfig(r=4, lora_alpha=8, target_modules=config["target_modules"], fan_in_fan_out=family == "gpt2", use_dora=True))
    theirs.save_pretrained(tmp_path / "theirs")
    ours, other, tuned = (load_file(tmp_path / folder / "adapter_model.safetensors") for folder in ("begun", "theirs", "tuned"))
    assert {name: value.shape for name, value in ours.items()} == {name: value.shape for name, value in other.items()}
    for name, value in ours.items():
        if "magnitude" in name:
            assert value.allclose(other[name], rtol=1e-5), name
            assert (tuned[name] - value).abs().max() > 0.01
    model = peft.PeftModel.from_pretrained(plain(tmp_path / "model"), tmp_path / "begun", is_trainable=True)
    expect_the_same_course(losses[:-1], train_with_peft(model, steps))

    # Each reads what the other has trained; added to the model it is the same model.
    model, again, other = read_by_each_other(theirs, logits, tmp_path)
    for name, value in other.items():
        assert value.allclose(again[name], rtol=1e-6), name
    subprocess.run([BUILD / "tierflow", "merge", "--model", tmp_path / "model", "--adapter", tmp_path / "tuned", "--out", tmp_path / "merged"], check=True, capture_output=True)
    merged, expected = plain(tmp_path / "merged").state_dict(), model.merge_and_unload().state_dict()
    for name, value in expected.items():
        assert (merged[name] - value).abs().max() <= 2**-8 * value.abs().max(), name


MIXTURES = {
    "mixtral": lambda **more: transformers.MixtralConfig(**SMALL, **more, num_key_value_heads=2, intermediate_size=48, num_local_experts=4),
    "qwen3_moe": lambda **more: transformers.Qwen3MoeConfig(**SMALL, **more, num_key_value_heads=2, head_dim=16, intermediate_size=96, moe_intermediate_size=40, num_experts=4, norm_topk_prob=True),
    "granitemoe": lambda **more: transformers.GraniteMoeConfig(**SMALL, **more, num_key_value_heads=2, intermediate_size=48, num_local_experts=4),
    "glm4_moe": lambda **more: transformers.Glm4MoeConfig(**SMALL, **more, num_key_value_heads=2, head_dim=16, intermediate_size=96, moe_intermediate_size=40, n_routed_experts=4, first_k_dense_replace=1),
    "gpt_oss": lambda **more: transformers.GptOssConfig(**SMALL, **more, num_key_value_heads=2, head_dim=16, intermediate_size=48, num_local_experts=4, eos_token_id=2, swiglu_limit=1.0, rope_parameters={"rope_type": "default", "rope_theta": 10000.0}),
}


@pytest.mark.parametrize("parameters", [["gate_up_proj", "down_proj"], ["down_proj"]], ids="+".join)
@pytest.mark.parametrize("family", MIXTURES)
def test_adapters_of_experts_are_those_of_peft(family, parameters, tmp_path, monkeypatch):
    monkeypatch.setitem(MODELS, family, lambda: MIXTURES[family](num_experts_per_tok=2))
    make_base(family, tmp_path / "model")
    wanted = [f"parameter=experts.{name}" for name in parameters]
    wanted += ["alone"] if len(parameters) == 1 else []
    if family == "mixtral":
        wanted += ["rank_of=.*\\.gate_up_proj:3", "alpha_of=layers.1.mlp.experts.down_proj:16", "rslora"]
    losses, (_, in_fp32) = probe_logits(tmp_path / "model", tmp_path / "tuned", 20, f"gradients={tmp_path / 'gradients'}", *wanted)
    assert losses[-1] < losses[0]
    config = json.loads((tmp_path / "tuned" / "adapter_config.json").read_text())
    if "alone" in wanted or family != "glm4_moe":
        assert config["target_parameters"] == [f"experts.{name}" for name in parameters]

    # A token may go to another expert where bf16 rounds: logits and gradients are compared in fp32.
    model = peft.PeftModel.from_pretrained(plain(tmp_path / "model"), tmp_path / "tuned", is_trainable=True)
    expected = logits_of(model.eval())
    assert ((in_fp32 - expected).norm(dim=-1) / expected.norm(dim=-1)).max() < 1e-5
    with model.disable_adapter():
        assert ((logits_of(model) - expected).norm(dim=-1) / expected.norm(dim=-1)).min() > 0.01
    loss_of(model, 0).backward()
    ours, theirs = load_file(tmp_path / "gradients" / "adapter_model.safetensors"), {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            theirs[name.replace(".default.", ".")] = parameter.grad
    assert ours.keys() == theirs.keys() == load_file(tmp_path / "tuned" / "adapter_model.safetensors").keys()
    for name, gradient in theirs.items():
        assert (ours[name] - gradient).norm() < 1e-4 * gradient.norm(), name

    # What PEFT trained further and wrote is read, and written again as it was.
    train_with_peft(model, 5)
    model.save_pretrained(tmp_path / "theirs")
    _, (_, in_fp32) = probe_logits(tmp_path / "model", tmp_path / "again", 0, f"from={tmp_path / 'theirs'}")
    expected = logits_of(model.eval())
    assert ((in_fp32 - expected).norm(dim=-1) / expected.norm(dim=-1)).max() < 1e-5
    again, theirs = (load_file(tmp_path / folder / "adapter_model.safetensors") for folder in ("again", "theirs"))
    assert again.keys() == theirs.keys() and all(value.equal(again[name]) for name, value in theirs.items())


@pytest.mark.parametrize("family", [*MIXTURES, "olmoe"])
def test_beside_an_expression_for_modules_peft_finds_the_same_adapters(family, tmp_path, monkeypatch):
    olmoe = lambda **more: transformers.OlmoeConfig(**SMALL, **more, num_key_value_heads=2, intermediate_size=40, num_experts=4)  # noqa: E731
    monkeypatch.setitem(MODELS, family, lambda: {**MIXTURES, "olmoe": olmoe}[family](num_experts_per_tok=2))
    make_base(family, tmp_path / "model")
    wanted = ["pattern=.*_proj", "parameter=experts.gate_up_proj", "parameter=experts.down_proj"]
    _, (_, in_fp32) = probe_logits(tmp_path / "model", tmp_path / "tuned", 10, *wanted)
    model = peft.PeftModel.from_pretrained(plain(tmp_path / "model"), tmp_path / "tuned")
    expected = logits_of(model.eval())
    assert ((in_fp32 - expected).norm(dim=-1) / expected.norm(dim=-1)).max() < 1e-5
    probe(tmp_path / "model", tmp_path / "again", 0, f"from={tmp_path / 'tuned'}")
    again, tuned = (load_file(tmp_path / folder / "adapter_model.safetensors") for folder in ("again", "tuned"))
    assert again.keys() == tuned.keys() and all(value.equal(again[name]) for name, value in tuned.items())


@pytest.mark.parametrize("family", ["glm4_moe", "qwen3_moe"])
def test_layers_that_peft_takes_for_experts_are_found(family, tmp_path, monkeypatch):
    """Of a dense layer and of shared experts: their names were experts' in transformers 4."""
    dense = {"mlp_only_layers": [0]} if family == "qwen3_moe" else {}
    monkeypatch.setitem(MODELS, family, lambda: MIXTURES[family](num_experts_per_tok=2, **dense))
    make_base(family, tmp_path / "model")
    _, (_, in_fp32) = probe_logits(tmp_path / "model", tmp_path / "tuned", 10)
    model = peft.PeftModel.from_pretrained(plain(tmp_path / "model"), tmp_path / "tuned")
    expected = logits_of(model.eval())
    assert ((in_fp32 - expected).norm(dim=-1) / expected.norm(dim=-1)).max() < 1e-5
    config = json.loads((tmp_path / "tuned" / "adapter_config.json").read_text())
    assert "model.layers.0.mlp.gate_proj.weight" in config["target_parameters"] and "model.layers.1.self_attn.q_proj" in config["target_modules"]
    probe(tmp_path / "model", tmp_path / "again", 0, f"from={tmp_path / 'tuned'}")
    assert json.loads((tmp_path / "again" / "adapter_config.json").read_text()) == config
    again, tuned = (load_file(tmp_path / folder / "adapter_model.safetensors") for folder in ("again", "tuned"))
    assert again.keys() == tuned.keys() and all(value.equal(again[name]) for name, value in tuned.items())


def test_adapters_beside_experts_of_llama_4_are_those_of_peft(tmp_path, monkeypatch):
    """On attention and on the expert that every token takes; its router, a linear layer to PEFT, has none."""
    monkeypatch.setitem(MODELS, "llama4", lambda: transformers.Llama4TextConfig(**SMALL, num_key_value_heads=2, head_dim=16, intermediate_size=48, num_local_experts=4, attention_chunk_size=12, no_rope_layer_interval=2))
    make_base("llama4", tmp_path / "model")
    losses, (_, in_fp32) = probe_logits(tmp_path / "model", tmp_path / "tuned", 10)
    assert losses[-1] < losses[0]
    model = peft.PeftModel.from_pretrained(plain(tmp_path / "model"), tmp_path / "tuned")
    expected = logits_of(model.eval())
    assert ((in_fp32 - expected).norm(dim=-1) / expected.norm(dim=-1)).max() < 1e-5
    adapted = {name.split(".lora_A")[0].rsplit(".", 1)[1] for name in load_file(tmp_path / "tuned" / "adapter_model.safetensors") if "lora_A" in name}
    assert adapted == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_adapters_of_experts_take_the_course_of_peft(family, tmp_path, monkeypatch):
    """Every token takes all experts."""
    monkeypatch.setitem(MODELS, family, lambda: MIXTURES[family](num_experts_per_tok=4))
    make_base(family, tmp_path / "model")
    wanted = ["parameter=experts.gate_up_proj", "parameter=experts.down_proj"]
    probe(tmp_path / "model", tmp_path / "begun", 0, *wanted)
    losses, tuned = probe_logits(tmp_path / "model", tmp_path / "tuned", 50, *wanted)
    expect_the_logits_of(peft.PeftModel.from_pretrained(plain(tmp_path / "model"), tmp_path / "tuned"), tuned)
    model = peft.PeftModel.from_pretrained(plain(tmp_path / "model"), tmp_path / "begun", is_trainable=True)
    expect_the_same_course(losses[:-1], train_with_peft(model, 50))
