"""What the tests of the Python package share: small models, and the plain loop that they are compared with."""

import ctypes
import os
import pathlib

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
BUILD = pathlib.Path(os.environ.get("TIERFLOW_BUILD", pathlib.Path(__file__).parents[2] / "build"))
if not list((BUILD / "python" / "tierflow").glob("_native*.so")):
    pytest.skip("the Python package is not built", allow_module_level=True)
import tierflow  # noqa: E402

torch.set_num_threads(1)  # small tensors; teams of threads would wait for a busy machine

VOCAB, LENGTH = 160, 24
LR = 1e-3
UP = "model.layers.0.mlp.up_proj.weight"
TEXT = dict(vocab_size=VOCAB, hidden_size=64, intermediate_size=112, num_hidden_layers=3, num_attention_heads=4, max_position_embeddings=64,
            initializer_range=0.08, pad_token_id=None, bos_token_id=1, eos_token_id=2)  # fmt: skip
GROUPED = dict(TEXT, num_key_value_heads=2)
GPT2 = dict(vocab_size=VOCAB, n_embd=64, n_layer=3, n_head=4, n_positions=64, initializer_range=0.08, bos_token_id=1, eos_token_id=2,
            embd_pdrop=0.0, resid_pdrop=0.0, attn_pdrop=0.0)  # fmt: skip
OPT = dict(vocab_size=VOCAB, hidden_size=64, ffn_dim=112, num_hidden_layers=3, num_attention_heads=4, max_position_embeddings=64, word_embed_proj_dim=64,
           dropout=0.0, attention_dropout=0.0, init_std=0.08, pad_token_id=1)  # fmt: skip
NO_DROPOUT = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)

MODELS = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**GROUPED)),
    "mistral": lambda: transformers.MistralForCausalLM(transformers.MistralConfig(**GROUPED, sliding_window=8)),
    "qwen2": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**GROUPED)),
    "qwen3": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**GROUPED, head_dim=16)),
    "gpt2": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2, tie_word_embeddings=False)),
    "opt": lambda: transformers.OPTForCausalLM(transformers.OPTConfig(**OPT, tie_word_embeddings=False)),
    "bert": lambda: transformers.BertForSequenceClassification(transformers.BertConfig(**TEXT, **NO_DROPOUT)),
    "vit": lambda: transformers.ViTForImageClassification(
        transformers.ViTConfig(
            hidden_size=64, intermediate_size=112, num_hidden_layers=3, num_attention_heads=4, image_size=32, patch_size=8, num_labels=3, **NO_DROPOUT
        )
    ),
}

SLIDES = dict(sliding_window=8, layer_types=["sliding_attention", "full_attention", "sliding_attention"])
NEOX = dict(TEXT, hidden_act="gelu", rotary_pct=0.5)
PHI3 = dict(GROUPED, partial_rotary_factor=0.5)
# Dense decoders whose layers fused_layers=True knows beside those of MODELS.
DENSE = {
    "gemma": lambda: transformers.GemmaForCausalLM(transformers.GemmaConfig(**GROUPED, head_dim=16)),
    "gemma2": lambda: transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**GROUPED, head_dim=16, query_pre_attn_scalar=24, **SLIDES)),
    "gemma3": lambda: transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**GROUPED, head_dim=16, query_pre_attn_scalar=24, **SLIDES)),
    "phi3": lambda: transformers.Phi3ForCausalLM(transformers.Phi3Config(**PHI3)),
    "glm": lambda: transformers.GlmForCausalLM(transformers.GlmConfig(**GROUPED, head_dim=16)),
    "glm4": lambda: transformers.Glm4ForCausalLM(transformers.Glm4Config(**GROUPED, head_dim=16)),
    "olmo2": lambda: transformers.Olmo2ForCausalLM(transformers.Olmo2Config(**GROUPED)),
    "olmo3": lambda: transformers.Olmo3ForCausalLM(transformers.Olmo3Config(**GROUPED, **SLIDES)),
    "smollm3": lambda: transformers.SmolLM3ForCausalLM(transformers.SmolLM3Config(**GROUPED, no_rope_layer_interval=2)),
    "granite": lambda: transformers.GraniteForCausalLM(
        transformers.GraniteConfig(**GROUPED, residual_multiplier=0.22, attention_multiplier=0.3, embedding_multiplier=2.0, logits_scaling=2.0)
    ),
    "cohere": lambda: transformers.CohereForCausalLM(transformers.CohereConfig(**GROUPED, use_qk_norm=True)),
    "cohere2": lambda: transformers.Cohere2ForCausalLM(transformers.Cohere2Config(**GROUPED, **SLIDES)),
    "gpt_neox": lambda: transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**NEOX)),
    "gpt_neox_in_turn": lambda: transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**NEOX, use_parallel_residual=False)),
    "starcoder2": lambda: transformers.Starcoder2ForCausalLM(
        transformers.Starcoder2Config(**GROUPED, residual_dropout=0.0, embedding_dropout=0.0, attention_dropout=0.0)
    ),
    "seed_oss": lambda: transformers.SeedOssForCausalLM(transformers.SeedOssConfig(**GROUPED, head_dim=16, residual_dropout=0.0, attention_dropout=0.0)),
    "exaone4": lambda: transformers.Exaone4ForCausalLM(transformers.Exaone4Config(**GROUPED, **SLIDES)),
    "arcee": lambda: transformers.ArceeForCausalLM(transformers.ArceeConfig(**GROUPED, mlp_bias=True)),
    "ernie4_5": lambda: transformers.Ernie4_5ForCausalLM(transformers.Ernie4_5Config(**GROUPED, head_dim=16, use_bias=True)),
    "helium": lambda: transformers.HeliumForCausalLM(transformers.HeliumConfig(**GROUPED, head_dim=16)),
    "cwm": lambda: transformers.CwmForCausalLM(transformers.CwmConfig(**GROUPED, head_dim=16, **SLIDES)),
    "hyperclovax": lambda: transformers.HyperCLOVAXForCausalLM(transformers.HyperCLOVAXConfig(**GROUPED, residual_multiplier=0.4, logits_scaling=0.5)),
    "hunyuan_v1_dense": lambda: transformers.HunYuanDenseV1ForCausalLM(transformers.HunYuanDenseV1Config(**GROUPED, head_dim=16)),
    "stablelm": lambda: transformers.StableLmForCausalLM(transformers.StableLmConfig(**GROUPED, use_qkv_bias=True)),
    # Its norms begin as twice what others are, so larger weights round more than the tests allow.
    "nemotron": lambda: transformers.NemotronForCausalLM(transformers.NemotronConfig(**{**GROUPED, "initializer_range": 0.04})),
    "jais2": lambda: transformers.Jais2ForCausalLM(transformers.Jais2Config(**GROUPED)),
}


def make(family):
    """The model in bf16, in train mode. The same weights each time."""
    torch.manual_seed(11)
    return {**MODELS, **DENSE}[family]().bfloat16().train()


def batches(family, count, rows=2):
    generator = torch.Generator().manual_seed(3)
    made = []
    for _ in range(count):
        if family == "vit":
            pixels = torch.randn(rows, 3, 32, 32, generator=generator).bfloat16()
            made.append({"pixel_values": pixels, "labels": torch.randint(0, 3, (rows,), generator=generator)})
            continue
        ids = torch.randint(3, VOCAB, (rows, LENGTH), generator=generator)
        labels = torch.randint(0, 2, (rows,), generator=generator) if family == "bert" else ids
        made.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels})
    return made


def roomy(**options):
    """Everything in memory."""
    return tierflow.Plan(tierflow.Budget(device="64MiB", host="128MiB"), **{"precision": "fp32-master+adam32", **options})


def scarce(folder, **options):
    """Budgets far below the state, with delays and poison on the device."""
    folder.mkdir(exist_ok=True)
    extra = {"chaos_seed": 5, "chunk_elements": 65536}
    budget = tierflow.Budget(device="600KiB", host="1MiB", storage=[folder], activations=0.0)
    return tierflow.Plan(budget, allow_any_filesystem=True, **{"precision": "fp32-master+adam32", "extra": extra, **options})


def frozen(tmp_path, precision):
    """Of a base for adapters, with as little room as that."""
    plan = scarce(tmp_path / "store", trainable=False, base_precision=precision)
    plan.budget = tierflow.Budget(device="1MiB", host="64KiB", storage=[tmp_path / "store"], activations=0.0)
    plan.extra = {"chaos_seed": 5, "chunk_elements": 4096}
    return plan


def masters(model):
    return {name: p.master() for name, p in model.named_parameters() if hasattr(p, "master")}


def _pointer(array):
    return ctypes.c_void_p(array.ctypes.data)


def _aligned(n, dtype):
    raw = np.zeros(n * np.dtype(dtype).itemsize + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + n * np.dtype(dtype).itemsize].view(dtype)


class PlainLoop:
    """Everything resident, plain autograd: bf16 weights, gradients of each backward added up in fp32 and rounded to bf16, AdamW of ours on fp32 states."""

    def __init__(self, model, lr, weight_decay=0.0):
        library = next((p for p in BUILD.rglob("libtierflow_optim_c.so")), None)
        if library is None:
            pytest.skip("libtierflow_optim_c.so is not built")
        self.optim, self.model, self.lr, self.weight_decay, self.steps = ctypes.CDLL(str(library)), model, lr, weight_decay, 0
        self.state = {}
        for name, p in model.named_parameters():
            n = p.numel()
            hi, lo, m, v = _aligned(n, np.uint16), _aligned(n, np.uint16), _aligned(n, np.float32), _aligned(n, np.float32)
            hi[:] = p.detach().contiguous().view(torch.int16).numpy().reshape(-1).view(np.uint16)
            self.state[name] = (hi, lo, m, v)
        self.sums = {}

    def backward(self, loss):
        loss.backward()
        for name, p in self.model.named_parameters():
            if p.grad is not None:
                self.sums[name] = self.sums[name] + p.grad.float() if name in self.sums else p.grad.float()
                p.grad = None

    def step(self):
        self.steps += 1
        for name, p in self.model.named_parameters():
            if name not in self.sums:
                continue
            hi, lo, m, v = self.state[name]
            gradient = _aligned(p.numel(), np.uint16)
            gradient[:] = self.sums[name].bfloat16().contiguous().view(torch.int16).numpy().reshape(-1).view(np.uint16)
            floats = [ctypes.c_float(x) for x in (self.lr, 0.9, 0.999, 1e-8, self.weight_decay, 0.0)]
            status = self.optim.optim_adamw(_pointer(gradient), _pointer(hi), _pointer(lo), _pointer(m), None, _pointer(v), None,
                                            ctypes.c_size_t(p.numel()), ctypes.c_int64(self.steps), *floats)  # fmt: skip
            assert status == 0
            p.data.copy_(torch.from_numpy(hi.view(np.int16).copy()).view(torch.bfloat16).view(p.shape))
        self.sums = {}

    def master(self, name):
        hi, lo, _, _ = self.state[name]
        out = np.zeros(hi.size, np.float32)
        self.optim.optim_join(_pointer(hi), _pointer(lo), _pointer(out), ctypes.c_size_t(hi.size))
        return torch.from_numpy(out)


def train(model, family, steps=3, passes=2, lr=1e-3, trainer=False, clip=None, opt=None, **options):
    """Losses and norms of a free or layer-major loop."""
    opt = opt or tierflow.optim.AdamW(model.parameters(), lr=lr, **options)
    data = batches(family, steps * passes)
    layer_major = tierflow.Trainer(model, opt, clip=clip) if trainer else None
    seen = []
    for step in range(steps):
        own = data[step * passes : (step + 1) * passes]
        if trainer:
            result = layer_major.step(own)
            seen.append((result.loss, result.grad_norm))
            continue
        total = 0.0
        for batch in own:
            loss = model(**batch).loss
            (loss / passes).backward()
            total += loss.item()
        parameters = [p for group in opt.param_groups for p in group["params"]]
        norm = torch.nn.utils.clip_grad_norm_(parameters, float("inf") if clip is None else clip)
        opt.step()
        opt.zero_grad()
        seen.append((total / passes, norm.item()))
    return seen
