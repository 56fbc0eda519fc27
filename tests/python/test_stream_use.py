"""How the package is used, and how it is misused: what works gives what plain torch gives, the rest says what to do."""

import copy
import io
import os
import pathlib
import pickle
import re
import types

import pytest
from streaming import LR, UP, PlainLoop, batches, make, masters, roomy, scarce, tierflow, torch, train, transformers

# The optimizer.


def test_groups_have_their_own_lr_and_decay(batch):
    """Decay alone moves what it applies to: with lr * decay = 1, a step leaves nothing of the old weight."""
    plain, streamed = make("llama"), tierflow.wrap(make("llama"), roomy())

    def groups(model):
        decayed = [p for p in model.parameters() if p.dim() > 1]
        return [{"params": decayed, "lr": 2e-3, "weight_decay": 0.1}, {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0}]

    loops = {"matrices": PlainLoop(plain, 2e-3, 0.1), "vectors": PlainLoop(plain, LR, 0.0)}
    opt = tierflow.optim.AdamW(groups(streamed), lr=LR)
    expected = plain(**batch).loss
    expected.backward()
    streamed(**batch).loss.backward()
    opt.step()
    for name, p in plain.named_parameters():
        loops["matrices" if p.dim() > 1 else "vectors"].sums[name] = p.grad.float()
    for loop in loops.values():
        loop.step()
    for name, master in masters(streamed).items():
        loop = loops["matrices" if "norm" not in name else "vectors"]
        assert torch.equal(master.flatten(), loop.master(name)), name


def test_schedulers_set_the_rate_of_the_step_that_follows(batch):
    streamed, plain = tierflow.wrap(make("llama"), roomy()), make("llama")
    loop = PlainLoop(plain, LR)
    opt = tierflow.optim.AdamW(streamed.parameters(), lr=LR)
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: [1.0, 0.5, 0.25, 0.0][step])
    for factor in (1.0, 0.5, 0.25):
        loop.lr = LR * factor
        loop.backward(plain(**batch).loss)
        loop.step()
        streamed(**batch).loss.backward()
        opt.step()
        schedule.step()
        opt.zero_grad()
    assert all(torch.equal(master.flatten(), loop.master(name)) for name, master in masters(streamed).items())


@pytest.mark.parametrize("foreach", [None, True, False])
def test_clip_grad_norm_is_exact(batch, foreach, model):
    plain = make("llama")
    (plain(**batch).loss * 3).backward()
    (model(**batch).loss * 3).backward()
    grads = [p.grad.float() for p in plain.parameters()]
    expected = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g.double()) for g in grads]))
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=foreach)
    assert norm.item() == pytest.approx(expected.item(), rel=1e-12) and norm > 0.5
    scaled = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    assert scaled.item() == pytest.approx(0.5, rel=1e-5)
    factor = 0.5 / (expected.item() + 1e-6)
    torch.testing.assert_close(model.get_parameter(UP).grad + 0, (plain.get_parameter(UP).grad.float() * factor).bfloat16())


def test_a_step_that_is_not_finite_is_skipped_whole(batch, model):
    opt = tierflow.optim.AdamW(model.parameters(), lr=LR)
    before = masters(model)
    hook = model.model.layers[1].register_forward_hook(lambda module, args, out: out * float("inf"))
    model(**batch).loss.backward()
    hook.remove()
    opt.step()
    opt.zero_grad()
    assert tierflow.stats(model)["skipped_steps"] == 1
    assert all(torch.equal(master, before[name]) for name, master in masters(model).items())
    result = tierflow.Trainer(model, opt).step([batch])
    assert not result.skipped and not torch.equal(masters(model)[UP], before[UP])


def test_dropped_gradients_leave_no_trace(batch):
    runs = []
    for extra in (False, True):
        model = tierflow.wrap(make("llama"), roomy())
        opt = tierflow.optim.AdamW(model.parameters(), lr=LR)
        if extra:
            model(**batches("llama", 2)[1]).loss.backward()
            model.zero_grad()
            assert model.get_parameter(UP).grad is None
        model(**batch).loss.backward()
        opt.step()
        runs.append(masters(model))
    assert all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])


def test_gradients_are_never_stale(batch, model):
    opt = tierflow.optim.AdamW(model.parameters(), lr=LR)
    p = model.get_parameter(UP)
    assert p.grad is None
    model(**batch).loss.backward()
    gradient = p.grad
    once = gradient + 0
    model(**batch).loss.backward()
    torch.testing.assert_close(p.grad + 0, once * 2)
    with pytest.raises(tierflow.UsageError, match="scaled in place"):
        torch.nn.utils.clip_grad_value_([p], 1e-9)
    with pytest.raises(tierflow.UsageError, match="comes from backward"):
        p.grad = torch.ones_like(once)
    opt.step()
    with pytest.raises(tierflow.UsageError, match="was applied by step"):
        gradient + 0
    with pytest.raises(tierflow.UsageError, match="without zero_grad"):
        model(**batch).loss.backward()
    opt.zero_grad()
    model(**batch).loss.backward()
    with pytest.raises(tierflow.UsageError, match="dropped by zero_grad"):
        gradient + 0
    assert not torch.equal(p.grad + 0, once)


def test_state_dict_of_the_optimizer(batch, model, caplog):
    opt = tierflow.optim.AdamW(model.parameters(), lr=LR)
    train(model, "llama", opt=opt)
    saved = copy.deepcopy(opt.state_dict())
    saved["param_groups"][0]["lr"] = 7e-5
    opt.load_state_dict(saved)
    assert opt.param_groups[0]["lr"] == 7e-5 and not caplog.records
    fresh = tierflow.wrap(make("llama"), roomy())
    other = tierflow.optim.AdamW(fresh.parameters(), lr=LR)
    other.load_state_dict(saved)
    assert "moments are not part of a state_dict" in caplog.text
    assert other.param_groups[0]["lr"] == 7e-5 and not any(state.get("step") for state in other.state.values())


def test_one_gradient_dropped_alone(batch, model):
    """Sums are kept by unit: the next backward would add to what was dropped, so it raises."""
    opt, p = tierflow.optim.AdamW(model.parameters(), lr=LR), model.get_parameter(UP)
    model(**batch).loss.backward()
    p.grad = None
    assert p.grad is None and model.get_parameter("model.layers.0.mlp.down_proj.weight").grad is not None
    with pytest.raises(tierflow.UsageError, match="dropped alone"):
        model(**batch).loss.backward()
    opt.zero_grad()
    model(**batch).loss.backward()
    p.grad = None
    before = masters(model)[UP]
    opt.step()
    opt.zero_grad()
    assert torch.equal(masters(model)[UP], before)
    model(**batch).loss.backward()
    opt.step()
    assert not torch.equal(masters(model)[UP], before)


def test_a_gradient_that_no_optimizer_takes_is_said(batch, model, caplog):
    opt = tierflow.optim.AdamW([model.get_parameter(UP)], lr=LR)
    before = masters(model)
    for _ in range(2):
        model(**batch).loss.backward()
        opt.step()
        opt.zero_grad()
    assert len(caplog.records) == 1 and "is not in this optimizer" in caplog.text
    assert [name for name, master in masters(model).items() if not torch.equal(master, before[name])] == [UP]


# Parameters outside of their module's turn.


@pytest.mark.parametrize("small", [False, True])
def test_parameters_can_be_read_and_written(small, tmp_path):
    model, plain = tierflow.wrap(make("llama"), scarce(tmp_path / "store") if small else roomy()), make("llama")
    p, q = model.get_parameter(UP), plain.get_parameter(UP)
    assert p.sum().item() == q.sum().item() and p.shape == q.shape and p.dtype == q.dtype and isinstance(p, torch.nn.Parameter)
    assert torch.equal(p + 0, q) and torch.equal(p.detach().cpu() + 0, q) and p.detach().float().numpy().sum() == q.detach().float().numpy().sum()
    with torch.no_grad():
        p.mul_(3).add_(1)
    torch.testing.assert_close(p.master(), q.detach().float() * 3 + 1, rtol=0, atol=1e-6)
    p.data = q.detach() * 2
    assert torch.equal(p + 0, q * 2)
    p.data.copy_(q)
    torch.nn.init.ones_(model.get_parameter("model.layers.1.mlp.up_proj.weight"))
    torch.nn.init.ones_(plain.get_parameter("model.layers.1.mlp.up_proj.weight"))
    batch = batches("llama", 1)[0]
    assert model(**batch).loss.item() == plain(**batch).loss.item()
    model.load_state_dict(make("llama").state_dict())
    assert model(**batch).loss.item() == make("llama")(**batch).loss.item()


def test_updates_are_there_when_a_parameter_is_read(batch, model):
    opt = tierflow.optim.AdamW(model.parameters(), lr=LR)
    before = model.get_parameter(UP) + 0
    model(**batch).loss.backward()
    opt.step()
    assert not torch.equal(model.get_parameter(UP) + 0, before)


def test_state_dict_streams_and_saves(model):
    state = model.state_dict()
    assert all(type(value).__name__ == "StreamedParameter" for name, value in state.items())
    stream = io.BytesIO()
    torch.save(state, stream)
    stream.seek(0)
    loaded = torch.load(stream)
    assert all(torch.equal(loaded[name], p) for name, p in make("llama").named_parameters())


def test_a_copy_of_a_state_dict_is_in_memory(model, batch):
    best = copy.deepcopy(model.state_dict())
    train(model, "llama")
    assert all(torch.equal(best[name], p) for name, p in make("llama").named_parameters())
    model.load_state_dict(best)
    assert model(**batch).loss.item() == make("llama")(**batch).loss.item()


def test_sharing_a_weight_after_loading_says_when_to(model, batch):
    model.lm_head.weight = model.model.embed_tokens.weight
    with pytest.raises(tierflow.UsageError, match=r"lm_head.*before tierflow.wrap"):
        model(**batch)


def test_save_pretrained_gives_a_model_that_transformers_loads(batch, tmp_path):
    model = tierflow.wrap(make("llama"), scarce(tmp_path / "store"))
    train(model, "llama")
    model.save_pretrained(tmp_path / "out", max_shard_size="200KB")
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    assert all(torch.equal(p, model.get_parameter(name) + 0) for name, p in again.named_parameters())
    reloaded = tierflow.load(tmp_path / "out", roomy())
    assert reloaded(**batch).loss.item() == again(**batch).loss.item()


def test_generate(model, batch):
    prompt = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"], "max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.eval().generate(**prompt), make("llama").eval().generate(**prompt))


# What cannot be, and says so.


@pytest.mark.parametrize(
    "misuse, text",
    [
        (lambda m: copy.deepcopy(m), "cannot be copied"),
        (lambda m: pickle.dumps(m), "cannot be pickled"),
        (lambda m: m.load_state_dict(make("llama").state_dict(), assign=True), "leave out assign"),
        (lambda m: m.model.layers[0].load_state_dict(make("llama").model.layers[0].state_dict(), assign=True), "leave out assign"),
        (lambda m: m.save_pretrained("/nowhere", push_to_hub=True), "upload the folder"),
        (lambda m: m.half(), "stays in torch.bfloat16"),
        (lambda m: m.float(), "leave out .to"),
        (lambda m: m.to("meta"), "tierflow.close"),
        (lambda m: m.model.layers[0].to_empty(device="cpu"), "leave out .to"),
        (lambda m: setattr(m.get_parameter(UP), "data", torch.ones(3, dtype=torch.bfloat16)), "keeps its shape"),
        (lambda m: tierflow.wrap(m, roomy()), "streams already"),
        (lambda m: tierflow.Trainer(m, tierflow.optim.AdamW(m.parameters())).step([]), "at least one micro-batch"),
        (lambda m: tierflow.Trainer(m, tierflow.optim.AdamW(m.parameters())).step([{"input_ids": torch.ones(1, 4, dtype=torch.long)}]), "labels"),
        (lambda m: tierflow.plan(m, tierflow.Budget("1MiB", "1KiB", ["/tmp"])), "the smallest that works is"),
        (lambda m: tierflow.Budget("12 parsecs", 1), "is no size"),
        (lambda m: tierflow.wrap(torch.nn.Linear(2, 2), roomy(blocks=["Absent"])), "no module of such a class"),
        (lambda m: tierflow.wrap(torch.nn.Linear(2, 2), roomy(precision="fp8")), "fp8 is unknown"),
        (lambda m: tierflow.wrap(torch.nn.Sequential(torch.nn.Embedding(4, 2, sparse=True)), roomy()), "^0 has sparse gradients, .*make it with sparse=False"),
        (lambda m: tierflow.plan(torch.nn.EmbeddingBag(4, 2, sparse=True), tierflow.Budget("1MiB", "1MiB")), "the embedding has sparse gradients"),
        (lambda m: tierflow.load("/nowhere", roomy()), "/nowhere: there is no such folder; a model is a folder with config.json"),
        (lambda m: tierflow.load("/tmp", roomy()), "/tmp: has no config.json: a model is a folder with config.json"),
    ],
)  # fmt: skip
def test_misuse_raises_what_to_do(misuse, text, model):
    with pytest.raises(tierflow.Error, match=text):
        misuse(model)


def test_a_frozen_embedding_may_say_that_its_gradients_are_sparse():
    embedding = torch.nn.Embedding(4, 2, sparse=True).requires_grad_(False)
    model = tierflow.wrap(torch.nn.Sequential(embedding, torch.nn.Linear(2, 1)), roomy())
    model(torch.tensor([0, 3])).sum().backward()
    assert model[1].weight.grad.norm() > 0


@pytest.mark.parametrize("activations", [0.0, 0.5, 0.95])
@pytest.mark.parametrize("embedding", [1000, 200_000])
def test_the_smallest_budgets_are_named_at_once(embedding, activations, tmp_path):
    """And they work, and nothing smaller does: for a module with an embedding much larger than its blocks as well."""
    with tierflow.init_empty():
        module = torch.nn.ModuleDict({"embed": torch.nn.Embedding(embedding, 64), "blocks": torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(3))})
    given = [1 << 10, 1 << 10]
    with pytest.raises(tierflow.UsageError) as error:
        tierflow.plan(module, tierflow.Budget(*given, [tmp_path], activations))
    found = re.findall(r"Budget\((\w+)=\.\.\.\) of 1KiB is too small: the smallest that works is (\d+[KM]iB)", str(error.value))
    assert [name for name, _ in found] == ["device", "host"]
    least = [tierflow.Budget(size, 0).device for _, size in found]
    tierflow.plan(module, tierflow.Budget(*least, [tmp_path], activations))
    for tier, bytes_ in enumerate(least):
        less = list(least)
        less[tier] -= 1 << 10 if bytes_ < 16 << 20 else 1 << 20
        with pytest.raises(tierflow.UsageError, match="the smallest that works is"):
            tierflow.plan(module, tierflow.Budget(*less, [tmp_path], activations))


@pytest.mark.parametrize("move", [lambda m: m.to("meta"), lambda m: m.to_empty(device="meta"), lambda m: m.double()])
def test_a_move_that_is_refused_changes_nothing(move, model, batch):
    expected = model(**batch).loss.item()
    with pytest.raises(tierflow.UsageError):
        move(model)
    assert all(buffer.device.type == "cpu" and buffer.dtype != torch.float64 for buffer in model.buffers())
    assert model(**batch).loss.item() == expected


def test_moves_that_change_nothing_work(model, batch):
    expected = model(**batch).loss.item()
    assert model.to("cpu").bfloat16().to(torch.bfloat16)(**batch).loss.item() == expected


def test_checkpointing_of_transformers_is_left_out(model):
    for name in ("gradient_checkpointing_enable", "activation_checkpointing_enable"):
        getattr(model, name, lambda: None)()
    assert not any(getattr(module, "gradient_checkpointing", False) for module in model.modules())


def test_a_model_that_is_not_the_checkpoints(model, tmp_path):
    model.save_pretrained(tmp_path / "out")
    config = transformers.AutoConfig.from_pretrained(tmp_path / "out")
    config.num_hidden_layers = 4
    config.save_pretrained(tmp_path / "out")
    with pytest.raises(tierflow.InputError, match="has no model.layers.3"):
        tierflow.load(tmp_path / "out", roomy())


def test_reading_another_modules_weight_inside_of_a_turn(model, batch):
    mlp = model.model.layers[0].mlp
    original = mlp.forward
    mlp.forward = lambda x: original(x) + model.get_parameter("model.layers.1.mlp.up_proj.weight").sum()
    with pytest.raises(tierflow.UsageError, match="while another module runs"):
        model(**batch)
    mlp.forward = original
    assert model(**batch).loss.item() == make("llama")(**batch).loss.item()


def test_files_have_no_names_and_go_with_the_model(tmp_path):
    def files():
        links = [pathlib.Path("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
        return [link for link in links if str(tmp_path / "store") in os.path.realpath(link)]

    first = tierflow.wrap(make("llama"), scarce(tmp_path / "store"))
    model = tierflow.wrap(make("llama"), scarce(tmp_path / "store"))  # the same folder serves both
    assert len(files()) >= 2 and not list((tmp_path / "store").iterdir())
    tierflow.close(first)
    model(**batches("llama", 1)[0])
    tierflow.close(model)
    assert not files()
    with pytest.raises(tierflow.UsageError, match="was closed"):
        model(**batches("llama", 1)[0])




def test_a_model_on_a_card_stays_where_trainers_move_it_to():
    device = tierflow.engine.torch_device("cuda")
    assert device == torch.device("cuda", 0) != torch.device("cuda")
    elsewhere = torch.device("xla", device.index)  # of a kind for which torch asks no driver
    parameter = tierflow.parameter.StreamedParameter.make(types.SimpleNamespace(device=elsewhere), 0, 0, "weight", (2, 3))
    assert parameter.to(elsewhere) is parameter


def test_buffers_go_to_the_device_that_computes():
    first, second = torch.nn.BatchNorm1d(2), torch.nn.BatchNorm1d(2)
    second.running_var = first.running_var
    first.register_buffer("none", None)
    both = torch.nn.Sequential(first, second)
    tierflow.units.move_buffers(both, torch.device("cpu"))
    assert second.running_var is first.running_var and first.running_var.device.type == "cpu"
    tierflow.units.move_buffers(both, torch.device("meta"))
    assert all(buffer.device.type == "meta" for buffer in both.buffers())
    assert first.num_batches_tracked.dtype == torch.int64 and second.running_var is first.running_var


def test_the_attention_of_a_module_is_not_cudnns_on_a_card(model, batch):
    engine = tierflow.model.engine_of(model)
    found, attention = [], model.model.layers[0].self_attn
    attention.register_forward_pre_hook(lambda *_: found.append(torch.backends.cuda.cudnn_sdp_enabled()))
    for device in ("cpu", "cuda"):
        engine.device = tierflow.engine.torch_device(device)
        with torch.no_grad():
            model.eval()(**batch)
    assert found == [True, False] and torch.backends.cuda.cudnn_sdp_enabled()
