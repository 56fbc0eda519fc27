"""The torch models against transformers: the same weights and tokens give the same logits, losses and gradients.

Each family is a small random model, saved by transformers and read by tests/runtime/models/model_probe.cpp. In fp32 the two agree to
rounding; in bf16 our error, against transformers in fp32 on the same (bf16) weights, is held to that of transformers in bf16.
"""

import json
import os
import pathlib

import fork_server
import numpy
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from safetensors.torch import load_file  # noqa: E402

BUILD = pathlib.Path(os.environ.get("TIERFLOW_BUILD", pathlib.Path(__file__).parents[2] / "build"))
PROBE = BUILD / "model_probe"
BATCH, LENGTH, VOCAB = 3, 40, 160

SMALL = dict(
    vocab_size=VOCAB,
    hidden_size=64,
    intermediate_size=112,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    initializer_range=0.08,
    pad_token_id=None,
    bos_token_id=1,
    eos_token_id=2,
)
GPT2 = dict(vocab_size=VOCAB, n_embd=64, n_layer=3, n_head=4, n_positions=64, initializer_range=0.08, bos_token_id=1, eos_token_id=2)
GPT2.update(embd_pdrop=0.0, resid_pdrop=0.0, attn_pdrop=0.0)
OPT = dict(SMALL, ffn_dim=112, word_embed_proj_dim=64, dropout=0.0, attention_dropout=0.0, init_std=0.08, pad_token_id=1)
for unused in ("intermediate_size", "num_key_value_heads", "initializer_range"):
    del OPT[unused]
NEOX = {name: value for name, value in SMALL.items() if name != "num_key_value_heads"}


def llama3_rope():
    return {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }


def yarn(**more):
    return {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16, **more}


def longrope(original=32):
    """Of half a head's 16 dimensions."""
    factors = {"short_factor": [1.0, 1.1, 1.3, 1.7], "long_factor": [1.0, 2.0, 4.0, 7.5]}
    return {"rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "original_max_position_embeddings": original, **factors}


def half_rotates(theta):
    return {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": 0.5}


SLIDING = ["sliding_attention", "full_attention", "sliding_attention"]
TWO_ROPES = {"full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 50000.0}, "sliding_attention": {"rope_type": "default", "rope_theta": 100.0}}


def gpt_oss(**more):
    """A limit that many gates and ups exceed."""
    return transformers.GptOssConfig(**SMALL, head_dim=16, sliding_window=9, swiglu_limit=0.5, rope_parameters=yarn(truncate=False), **more)


def llama4(**more):
    """Rows of two chunks and a half; queries of the layer without positions that are scaled from the eighth token on."""
    return transformers.Llama4TextConfig(**{**SMALL, "head_dim": 16, "intermediate_size_mlp": 96, "attention_chunk_size": 16, "no_rope_layer_interval": 2, "floor_scale": 8, "attn_scale": 0.5, **more})


# So large that the router's gradient is mostly that of the load-balancing loss.
BALANCED = dict(output_router_logits=True, router_aux_loss_coef=3.0)

CONFIGS = {
    "llama2": lambda: transformers.LlamaConfig(**{**SMALL, "num_key_value_heads": 4}),
    "llama3": lambda: transformers.LlamaConfig(**SMALL, rope_parameters=llama3_rope()),
    "llama_linear_rope_tied": lambda: transformers.LlamaConfig(
        **SMALL, tie_word_embeddings=True, rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
    ),
    "llama_biases": lambda: transformers.LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True, head_dim=24),
    "mistral": lambda: transformers.MistralConfig(**SMALL, sliding_window=None),
    "mistral_window": lambda: transformers.MistralConfig(**SMALL, sliding_window=9),
    "qwen2": lambda: transformers.Qwen2Config(**SMALL),
    "qwen2_tied": lambda: transformers.Qwen2Config(**SMALL, tie_word_embeddings=True),
    "qwen3": lambda: transformers.Qwen3Config(**SMALL, head_dim=32),
    "qwen3_tied": lambda: transformers.Qwen3Config(**SMALL, head_dim=16, tie_word_embeddings=True),
    "qwen3_layers": lambda: transformers.Qwen3Config(**SMALL, head_dim=16, use_sliding_window=True, sliding_window=9, layer_types=SLIDING),
    "ministral3": lambda: transformers.Ministral3Config(**SMALL, head_dim=16, rope_parameters=yarn(mscale=1.0, mscale_all_dim=0.5, llama_4_scaling_beta=0.1)),
    "llama_yarn": lambda: transformers.LlamaConfig(**SMALL, rope_parameters=yarn(truncate=False)),
    "gemma": lambda: transformers.GemmaConfig(**SMALL, head_dim=32),
    "gemma2": lambda: transformers.Gemma2Config(**SMALL, head_dim=16, sliding_window=9, query_pre_attn_scalar=24, attn_logit_softcapping=3.0, final_logit_softcapping=2.0),
    "gemma3": lambda: transformers.Gemma3TextConfig(**SMALL, attn_logit_softcapping=0.5, head_dim=16, sliding_window=9, query_pre_attn_scalar=24, layer_types=SLIDING, rope_parameters=TWO_ROPES),
    "phi3": lambda: transformers.Phi3Config(**SMALL, sliding_window=None),
    "phi4_mini": lambda: transformers.Phi3Config(**{**SMALL, "max_position_embeddings": 128}, original_max_position_embeddings=32, tie_word_embeddings=True, rope_parameters=longrope()),
    "phi4_mini_short": lambda: transformers.Phi3Config(**{**SMALL, "max_position_embeddings": 256}, original_max_position_embeddings=64, rope_parameters=longrope(64)),
    "glm": lambda: transformers.GlmConfig(**SMALL, head_dim=16),
    "glm4": lambda: transformers.Glm4Config(**SMALL, head_dim=16),
    "olmo2": lambda: transformers.Olmo2Config(**SMALL),
    "olmo3": lambda: transformers.Olmo3Config(**SMALL, sliding_window=9, layer_types=SLIDING, rope_parameters={**TWO_ROPES, "full_attention": yarn()}),
    "smollm3": lambda: transformers.SmolLM3Config(**SMALL, no_rope_layer_interval=2),
    "granite": lambda: transformers.GraniteConfig(**SMALL, embedding_multiplier=12.0, residual_multiplier=0.22, attention_multiplier=0.1, logits_scaling=8.0),
    "cohere": lambda: transformers.CohereConfig(**SMALL, logit_scale=0.25),
    "cohere2": lambda: transformers.Cohere2Config(**SMALL, logit_scale=0.25, sliding_window=9, layer_types=SLIDING),
    "cohere_qk_norm": lambda: transformers.CohereConfig(**SMALL, logit_scale=0.25, use_qk_norm=True),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(**NEOX, rope_parameters={"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}),
    "gpt_neox_in_turn": lambda: transformers.GPTNeoXConfig(**NEOX, use_parallel_residual=False, tie_word_embeddings=True, attention_bias=False),
    "gpt_neox_20b": lambda: transformers.GPTNeoXConfig(**NEOX, hidden_act="gelu_fast"),
    "starcoder2": lambda: transformers.Starcoder2Config(**SMALL, sliding_window=9),
    "seed_oss": lambda: transformers.SeedOssConfig(**SMALL, head_dim=32, attention_dropout=0.0, residual_dropout=0.0),
    "exaone4": lambda: transformers.Exaone4Config(**SMALL, sliding_window=9, layer_types=SLIDING),
    "exaone4_full": lambda: transformers.Exaone4Config(**SMALL, sliding_window=None, sliding_window_pattern=None, layer_types=["full_attention"] * 3),
    "arcee": lambda: transformers.ArceeConfig(**SMALL, mlp_bias=True),
    "ernie4_5": lambda: transformers.Ernie4_5Config(**SMALL, head_dim=16, use_bias=True),
    "helium": lambda: transformers.HeliumConfig(**SMALL, head_dim=16, attention_bias=True, mlp_bias=True),
    "cwm": lambda: transformers.CwmConfig(**{**SMALL, "num_hidden_layers": 5}, head_dim=16, sliding_window=9, rope_parameters=llama3_rope()),
    "hyperclovax": lambda: transformers.HyperCLOVAXConfig(**SMALL, embedding_multiplier=6.0, residual_multiplier=0.4, attention_multiplier=0.1, logits_scaling=0.25),
    "hyperclovax_norms_before": lambda: transformers.HyperCLOVAXConfig(**SMALL, use_post_norm=False, attention_bias=True, mlp_bias=True),
    "hunyuan_v1_dense": lambda: transformers.HunYuanDenseV1Config(**SMALL, head_dim=32, rope_parameters={"rope_type": "dynamic", "rope_theta": 100.0, "alpha": 50.0, "factor": 1.0}),
    "hunyuan_v1_dense_biases": lambda: transformers.HunYuanDenseV1Config(**SMALL, head_dim=16, attention_bias=True, tie_word_embeddings=True),
    "stablelm": lambda: transformers.StableLmConfig(**SMALL, use_qkv_bias=True, rope_parameters=half_rotates(100.0)),
    "stablelm_parallel": lambda: transformers.StableLmConfig(**SMALL, use_parallel_residual=True),
    "nemotron": lambda: transformers.NemotronConfig(**SMALL, head_dim=24, rope_parameters=half_rotates(100.0)),
    "nemotron_biases": lambda: transformers.NemotronConfig(**SMALL, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    "jais2": lambda: transformers.Jais2Config(**SMALL),
    "mixtral": lambda: transformers.MixtralConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2, sliding_window=9),
    "qwen2_moe": lambda: transformers.Qwen2MoeConfig(**SMALL, num_experts=6, num_experts_per_tok=3, moe_intermediate_size=48, shared_expert_intermediate_size=80),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**SMALL, head_dim=16, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=48, mlp_only_layers=[1], norm_topk_prob=True),
    "olmoe": lambda: transformers.OlmoeConfig(**SMALL, num_experts=6, num_experts_per_tok=2),
    "granitemoe": lambda: transformers.GraniteMoeConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2, residual_multiplier=0.4, attention_multiplier=0.2),
    "mixtral_all": lambda: transformers.MixtralConfig(**SMALL, num_local_experts=4, num_experts_per_tok=4),
    "qwen2_moe_all": lambda: transformers.Qwen2MoeConfig(**SMALL, num_experts=3, num_experts_per_tok=3, moe_intermediate_size=48, shared_expert_intermediate_size=80),
    "granitemoe_all": lambda: transformers.GraniteMoeConfig(**SMALL, num_local_experts=3, num_experts_per_tok=3),
    "glm4_moe": lambda: transformers.Glm4MoeConfig(**SMALL, head_dim=16, n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=48, routed_scaling_factor=1.5, n_group=4, topk_group=2, use_qk_norm=True),
    "glm4_moe_all": lambda: transformers.Glm4MoeConfig(**SMALL, head_dim=16, n_routed_experts=3, num_experts_per_tok=3, moe_intermediate_size=48, n_shared_experts=2, norm_topk_prob=False, attention_bias=True),
    "gpt_oss": lambda: gpt_oss(num_local_experts=4, num_experts_per_tok=2),
    "gpt_oss_all": lambda: gpt_oss(num_local_experts=3, num_experts_per_tok=3),
    "llama4": lambda: llama4(num_local_experts=4, moe_layers=[0, 1], rope_parameters={**llama3_rope(), "high_freq_factor": 1.0}),
    "llama4_all": lambda: llama4(num_local_experts=3, num_experts_per_tok=3, attention_bias=True),
    "llama4_maverick": lambda: llama4(num_local_experts=5, interleave_moe_layer_step=2, use_qk_norm=False, attn_temperature_tuning=False, tie_word_embeddings=True),
    "llama4_layers": lambda: llama4(num_local_experts=1, no_rope_layers=[0, 1, 1], layer_types=["chunked_attention", "full_attention", "chunked_attention"]),
    "mixtral_balanced": lambda: transformers.MixtralConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2, **BALANCED),
    "qwen2_moe_balanced": lambda: transformers.Qwen2MoeConfig(**SMALL, num_experts=6, num_experts_per_tok=3, moe_intermediate_size=48, shared_expert_intermediate_size=80, **BALANCED),
    "qwen3_moe_balanced": lambda: transformers.Qwen3MoeConfig(**SMALL, head_dim=16, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=48, mlp_only_layers=[1], **BALANCED),
    "olmoe_balanced": lambda: transformers.OlmoeConfig(**SMALL, num_experts=6, num_experts_per_tok=2, norm_topk_prob=True, output_router_logits=True),
    "granitemoe_balanced": lambda: transformers.GraniteMoeConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2, residual_multiplier=0.4, **BALANCED),
    "gpt_oss_balanced": lambda: gpt_oss(num_local_experts=4, num_experts_per_tok=2, **BALANCED),
    "glm4_moe_no_balance": lambda: transformers.Glm4MoeConfig(**SMALL, head_dim=16, n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=48, output_router_logits=True),
    "gpt2": lambda: transformers.GPT2Config(**GPT2),
    "gpt2_untied": lambda: transformers.GPT2Config(**GPT2, tie_word_embeddings=False),
    "opt": lambda: transformers.OPTConfig(**OPT),
    "opt_norm_after": lambda: transformers.OPTConfig(**OPT, do_layer_norm_before=False),
    "opt_untied": lambda: transformers.OPTConfig(**OPT, tie_word_embeddings=False),
}


def randomised(config):
    """A model whose every tensor is random, norms and biases included, at bf16 values."""
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 1 or name.endswith("_bias"):
                weight.copy_(torch.randn_like(weight) * 0.1 + (1.0 if name.endswith("weight") else 0.0))
            weight.copy_(weight.bfloat16().float())
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn_like(buffer) * 0.1)
    return model.float().train()


def tokens():
    generator = torch.Generator().manual_seed(8)
    ids = torch.randint(2, VOCAB, (BATCH, LENGTH), generator=generator)  # 1 is OPT's padding
    labels = torch.randint(2, VOCAB, (BATCH, LENGTH), generator=generator)
    labels[1, 5:9] = -100
    return ids, labels


def reference(model, ids, labels):
    """(loss of each token, tensors): gradients of what mean_loss() says by name, and logits [tokens, vocab]."""
    model.zero_grad()
    out = model(input_ids=ids, use_cache=False)
    logits = out.logits.flatten(0, 1)
    losses = torch.nn.functional.cross_entropy(logits.float(), labels.flatten(), reduction="none")
    (losses.sum() / (labels >= 0).sum() + balance(model, out)).backward()
    tensors = {name: weight.grad.float().clone() for name, weight in model.named_parameters()}
    return losses.detach(), {**tensors, "logits": logits.detach().float()}


def balance(model, out):
    """What transformers adds to the loss of the tokens."""
    aux = getattr(out, "aux_loss", None)
    return 0.0 if aux is None else model.config.router_aux_loss_coef * aux


def mean_loss(model, ids, labels, losses):
    mean = losses.sum().item() / (labels >= 0).sum().item()
    if not getattr(model.config, "output_router_logits", False):
        return mean
    with torch.no_grad():
        return mean + float(balance(model, model(input_ids=ids, use_cache=False)))


def as_saved(model, tensors, folder):
    """Gradients under the names and in the shapes of the saved weights: transformers stacks experts in memory, and renames GPT-NeoX's head."""
    if not any(".experts." in name or name.startswith("gpt_neox.") for name in tensors):
        return tensors
    weights = {name: weight.data for name, weight in model.named_parameters()}
    for name, weight in model.named_parameters():
        weight.data = tensors[name].to(weight.dtype)
    model.save_pretrained(folder)
    for name, weight in model.named_parameters():
        weight.data = weights[name]
    saved = {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items() if not name.endswith("e_score_correction_bias")}
    return {**saved, "logits": tensors["logits"]}


def reference_as_saved(model, ids, labels, folder):
    losses, tensors = reference(model, ids, labels)
    return losses, as_saved(model, tensors, folder)


def saved(family, folder, seed):
    """A model of the family with random weights, and the folder where it is."""
    if not PROBE.exists():
        pytest.skip(f"{PROBE} is not built")
    torch.manual_seed(seed)
    model = randomised(CONFIGS[family]())
    model.save_pretrained(folder / "model")
    return model, folder / "model"


def probe(folder, ids, labels, dtype, out, *tiles):
    given = out.with_suffix(".tokens")
    given.write_bytes(ids.numpy().tobytes() + labels.numpy().tobytes())
    command = [PROBE, folder, given, BATCH, LENGTH, dtype, out, *tiles]
    done = fork_server.run(command, timeout=120)
    assert done.returncode == 0, done.stderr
    losses = None if tiles else torch.from_numpy(numpy.fromfile(out / "losses.f64", dtype=numpy.float64))
    return float(done.stdout), losses, load_file(out / "model.safetensors")


def distance(a, b):
    return ((a - b).norm() / b.norm().clamp_min(1e-12)).item()


def luck(tensor):
    """How much further than transformers rounding may be off: of a few numbers, such as a bias of three experts, a lot."""
    return 2e-3 if tensor.numel() >= 8 else 0.1


# A token near the edge between two experts goes to the other one for an error of rounding: in bf16 nothing can be compared. Those
# that call all experts for every token are.
CHOOSES = ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "granitemoe", "glm4_moe", "gpt_oss", "glm4_moe_no_balance", "llama4", "llama4_maverick"]
CHOOSES += [family for family in CONFIGS if family.endswith("_balanced")]


@pytest.mark.parametrize("family", CONFIGS)
def test_parity(family, tmp_path):
    model, folder = saved(family, tmp_path, seed=11)
    ids, labels = tokens()
    exact_losses, exact = reference_as_saved(model, ids, labels, tmp_path / "exact")
    mean, counted = mean_loss(model, ids, labels, exact_losses), (labels >= 0).sum().item()

    loss, losses, ours = probe(folder, ids, labels, "f32", tmp_path / "f32")
    assert ours.keys() == exact.keys()
    assert loss == pytest.approx(mean, rel=1e-5)
    torch.testing.assert_close(losses.float(), exact_losses, rtol=1e-4, atol=1e-4)
    for name, tensor in exact.items():
        if name.endswith("k_proj.bias") and tensor.norm() < 1e-5:
            continue  # softmax does not see it: rounding alone
        assert distance(ours[name], tensor) < 1e-4, name

    if family in CHOOSES:
        return
    bf16_losses, bf16 = reference_as_saved(model.bfloat16(), ids, labels, tmp_path / "exact_bf16")
    loss, losses, ours = probe(folder, ids, labels, "bf16", tmp_path / "bf16")
    assert loss == pytest.approx(bf16_losses.sum().item() / counted, rel=2e-3)
    assert (losses.float() - exact_losses).abs().max() < 2 * (bf16_losses - exact_losses).abs().max() + 0.02
    errors = []
    for name, tensor in exact.items():
        if name.endswith("k_proj.bias") and tensor.norm() < 1e-5:
            continue
        mine, theirs = distance(ours[name], tensor), distance(bf16[name], tensor)
        errors.append((mine, theirs))
        assert mine < 2 * theirs + luck(tensor), f"{name}: transformers is off by {theirs}"
    mine, theirs = (sum(column) / len(errors) for column in zip(*errors))
    print(f"{family}: mean relative error in bf16 {mine:.5f}, transformers {theirs:.5f}")
    assert mine < 1.15 * theirs


def as_published(config, period=None):
    """config.json as versions of transformers before 5 wrote it, which is how most models are published."""
    rope = config.pop("rope_parameters", None) or {"rope_type": "default", "rope_theta": 10000.0}
    if "full_attention" in rope:
        config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    rope = dict(rope)
    config["rope_theta"] = rope.pop("rope_theta")
    if "partial_rotary_factor" in rope:
        config["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    kind = rope.pop("rope_type")
    config["rope_scaling"] = None if kind == "default" else {"type": kind, **rope}
    if period is not None:
        del config["layer_types"]
        config["sliding_window_pattern"] = period
    config["torch_dtype"] = config.pop("dtype")
    return config


@pytest.mark.parametrize("family, period", [("llama3", None), ("llama_linear_rope_tied", None), ("llama_yarn", None), ("mistral_window", None), ("gemma3", 2),
                                            ("phi4_mini", None), ("glm4", None), ("cohere2", 2), ("hunyuan_v1_dense", None), ("mixtral", None), ("llama4", None)])
def test_parity_of_published_configs(family, period, tmp_path):
    model, folder = saved(family, tmp_path, seed=13)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(as_published(config, period)))
    ids, labels = tokens()
    exact_losses, exact = reference_as_saved(model, ids, labels, tmp_path / "exact")
    loss, _, ours = probe(folder, ids, labels, "f32", tmp_path / "f32")
    assert loss == pytest.approx(exact_losses.sum().item() / (labels >= 0).sum().item(), rel=1e-5)
    assert all(distance(ours[name], tensor) < 1e-4 for name, tensor in exact.items())


@pytest.mark.parametrize("family", CONFIGS)
def test_parity_in_tiles(family, tmp_path):
    """The vocabulary in tiles of 48, 48, 48 and 16 rows, blocks as attention and MLP."""
    model, folder = saved(family, tmp_path, seed=12)
    ids, labels = tokens()
    exact_losses, exact = reference_as_saved(model, ids, labels, tmp_path / "exact")
    mean = mean_loss(model, ids, labels, exact_losses)
    _, bf16 = reference_as_saved(model.bfloat16(), ids, labels, tmp_path / "exact_bf16")
    del exact["logits"]
    for dtype, close in [("f32", 1e-5), ("bf16", 2e-3)][: 1 if family in CHOOSES else 2]:
        loss, _, ours = probe(folder, ids, labels, dtype, tmp_path / dtype, 48 * 64)
        assert ours.keys() == exact.keys()
        assert loss == pytest.approx(mean, rel=close)
        for name, tensor in exact.items():
            if name.endswith("k_proj.bias") and tensor.norm() < 1e-5:
                continue
            assert distance(ours[name], tensor) < (1e-4 if dtype == "f32" else 2 * distance(bf16[name], tensor) + luck(tensor)), name
