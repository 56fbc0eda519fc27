"""Modules of one's own, frozen parameters and adapters."""

import pytest
from streaming import PlainLoop, batches, make, masters, roomy, scarce, tierflow, torch, train

nn = torch.nn
LR = 1e-3


class Node(nn.Module):
    """A hand-written recursive module: each block runs its child and then itself again, on a tuple and a keyword."""

    def __init__(self, width, depth):
        super().__init__()
        self.mix = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.child = Node(width, depth - 1) if depth else None

    def forward(self, pair, *, scale):
        x, residual = pair
        if self.child is not None:
            x, residual = self.child((x, residual), scale=scale)["pair"]
        return {"pair": (torch.tanh(self.mix(self.norm(x))) * scale, residual + x), "note": "kept"}


class Tree(nn.Module):
    """Blocks of different sizes; one is called twice; a parameter of its own, and one that two modules share."""

    def __init__(self, width=16):
        super().__init__()
        self.embed = nn.Embedding(32, width)
        self.start = nn.Parameter(torch.randn(width) * 0.1)
        self.nodes = nn.ModuleList(Node(width, depth) for depth in (0, 1, 2))
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, 32, bias=False)
        self.nodes[2].mix.weight = self.nodes[0].mix.weight
        self.register_buffer("scale", torch.tensor(0.5, dtype=torch.bfloat16))
        self.order = (0, 1, 1, 2)

    def forward(self, ids):
        pair = (self.embed(ids) + self.start, torch.zeros(1, dtype=torch.bfloat16))
        for index in self.order:
            out = self.nodes[index](pair, scale=self.scale)
            assert out["note"] == "kept"
            pair = out["pair"]
        hidden, _ = self.rnn(pair[0] + pair[1])
        return nn.functional.cross_entropy(self.head(hidden).float().flatten(0, 1), ids.flatten())


def tree():
    torch.manual_seed(4)
    return Tree().bfloat16()


def inputs(count):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 32, (2, 10), generator=generator) for _ in range(count)]


def test_recursive_module_matches_plain_torch(tmp_path):
    """One micro-batch: gradients of what several calls share add up in another order than in autograd, so to rounding."""
    plain, streamed = tree(), tierflow.wrap(tree(), scarce(tmp_path / "store"))
    loop, opt = PlainLoop(plain, LR), tierflow.optim.AdamW(streamed.parameters(), lr=LR)
    for ids in inputs(3):
        expected, loss = plain(ids), streamed(ids)
        torch.testing.assert_close(loss, expected, rtol=1e-3, atol=1e-3)
        loop.backward(expected)
        loss.backward()
        for name, p in streamed.named_parameters():
            torch.testing.assert_close(p.grad + 0, loop.sums[name].bfloat16(), rtol=0.05, atol=2e-3, msg=lambda m, name=name: f"{name}: {m}")
        loop.step()
        opt.step()
        opt.zero_grad()
    assert set(masters(streamed)) == {name for name, _ in plain.named_parameters()}


def test_recursive_module_layer_major_equals_the_loop(tmp_path):
    runs = []
    for plan in (roomy(), scarce(tmp_path / "store")):
        for trainer in (False, True):
            model = tierflow.wrap(tree(), plan)
            opt = tierflow.optim.AdamW(model.parameters(), lr=LR)
            layer_major = tierflow.Trainer(model, opt, loss=lambda m, ids: m(ids), clip=None)
            for step in range(2):
                data = inputs(6)[3 * step : 3 * step + 3]
                if trainer:
                    layer_major.backward(data)
                else:
                    for ids in data:
                        (model(ids) / 3).backward()
                opt.step()
                opt.zero_grad()
            runs.append((trainer, masters(model)))
    for trainer, weights in runs[1:]:
        for name, master in runs[0][1].items():
            if trainer:  # what is used several times adds up in another order
                torch.testing.assert_close(weights[name], master, rtol=1e-2, atol=3e-3)
            else:
                assert torch.equal(weights[name], master), name
    assert all(torch.equal(runs[1][1][name], runs[3][1][name]) for name in runs[1][1])


def test_a_changed_order_gives_the_same_result(tmp_path):
    weights = []
    for plan in (roomy(), scarce(tmp_path / "store")):
        model = tierflow.wrap(tree(), plan)
        opt = tierflow.optim.AdamW(model.parameters(), lr=LR)
        for step, ids in enumerate(inputs(5)):
            model.order = ((0, 1, 1, 2), (2, 0, 1), (1, 2))[step % 3]
            model(ids).backward()
            opt.step()
            opt.zero_grad()
        weights.append(masters(model))
        assert tierflow.stats(model)["departures"] > 0
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_dropout_has_the_same_bits_in_the_recomputation():
    """A block that returns its own mask: were the recomputed one another, the gradient would not be that of the loss."""

    class Dropping(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.5)) for _ in range(3))

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return x.float().square().mean()

    def grads(model):
        torch.manual_seed(9)
        loss = model(torch.ones(4, 32, dtype=torch.bfloat16))
        after = torch.rand(3)
        loss.backward()
        return loss.item(), [p.grad + 0 for p in model.parameters()], after

    torch.manual_seed(0)
    plain = Dropping().bfloat16()
    torch.manual_seed(0)
    streamed = tierflow.wrap(Dropping().bfloat16(), roomy())
    expected, seen = grads(plain), grads(streamed)
    assert seen[0] == expected[0] and torch.equal(seen[2], expected[2])
    assert all(torch.equal(a, b) for a, b in zip(seen[1], expected[1], strict=True))


@pytest.mark.parametrize("trainer", [False, True])
def test_frozen_parameters_stay(trainer, tmp_path):
    model = make("llama")
    for name, p in model.named_parameters():
        p.requires_grad = "layers.2" in name and "norm" not in name
    before = {name: p.detach().float().clone() for name, p in model.named_parameters()}
    model = tierflow.wrap(model, scarce(tmp_path / "store"))
    train(model, "llama", opt=tierflow.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LR), trainer=trainer)
    for name, p in model.named_parameters():
        assert torch.equal(p.master(), before[name]) != p.requires_grad, name


def test_freezing_after_wrapping_and_thawing_what_has_no_state():
    model = tierflow.wrap(make("llama"), roomy())
    model.model.layers[0].requires_grad_(False)
    before = masters(model)
    train(model, "llama", steps=1)
    assert torch.equal(masters(model)["model.layers.0.mlp.up_proj.weight"], before["model.layers.0.mlp.up_proj.weight"])
    assert not torch.equal(masters(model)["model.layers.1.mlp.up_proj.weight"], before["model.layers.1.mlp.up_proj.weight"])
    frozen = tierflow.wrap(make("llama"), roomy(trainable=False))
    frozen.model.layers[1].requires_grad_(True)
    with pytest.raises(tierflow.UsageError, match="has no optimizer state"):
        frozen(**batches("llama", 1)[0]).loss.backward()


@pytest.mark.parametrize("trainer", [False, True])
def test_lora_over_a_frozen_streamed_base(trainer, tmp_path):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM")

    def adapted(base):
        torch.manual_seed(5)
        return peft.get_peft_model(base, config).train()

    plain = adapted(make("llama"))
    plan = scarce(tmp_path / "store", trainable=False)
    plan.budget = tierflow.Budget(device="250KiB", host="200KiB", storage=[tmp_path / "store"], activations=0.0)
    streamed = adapted(tierflow.wrap(make("llama"), plan))
    expected = train(plain, "llama", opt=torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=LR, weight_decay=0.0))
    seen = train(streamed, "llama", opt=tierflow.optim.AdamW([p for p in streamed.parameters() if p.requires_grad], lr=LR), trainer=trainer)
    torch.testing.assert_close(torch.tensor(seen), torch.tensor(expected), rtol=1e-5, atol=1e-5)
    adapters = {name: p for name, p in streamed.named_parameters() if p.requires_grad}
    assert len(adapters) == 12 and all("lora" in name for name in adapters)
    for name, p in plain.named_parameters():
        if p.requires_grad:
            torch.testing.assert_close(adapters[name].detach(), p.detach(), rtol=1e-5, atol=1e-6)
    written = tierflow.stats(streamed)["lanes"]["disk_write"]["bytes"]
    assert written == 0 and tierflow.stats(streamed)["lanes"]["disk_read"]["bytes"] > 0
    streamed.save_pretrained(tmp_path / "adapter")
    assert (tmp_path / "adapter" / "adapter_model.safetensors").stat().st_size < 100_000


@pytest.mark.parametrize("precision", ["int8", "nf4", "nf4-double"])
def test_a_frozen_base_in_fewer_bytes_has_the_bits_of_its_values(precision, tmp_path):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM")

    def small(**options):
        plan = scarce(tmp_path / "store", trainable=False, **options)
        plan.budget = tierflow.Budget(device="300KiB", host="190KiB", storage=[tmp_path / "store"], activations=0.0)
        return plan

    def trained(base, trainer):
        torch.manual_seed(5)
        model = peft.get_peft_model(base, config).train()
        own = {name: p for name, p in model.named_parameters() if p.requires_grad}
        seen = train(model, "llama", opt=tierflow.optim.AdamW(own.values(), lr=LR), trainer=trainer)
        return seen, {name: p.detach() for name, p in own.items()}, tierflow.stats(model)["lanes"]["upload"]["bytes"]

    plain, results = dict(make("llama").named_parameters()), {}
    for trainer in False, True:
        stored = tierflow.wrap(make("llama"), small(base_precision=precision))
        values = make("llama")
        for name, p in values.named_parameters():
            p.data.copy_(stored.get_parameter(name))
            linear = "layers" in name and name.endswith("_proj.weight")
            assert torch.equal(p, plain[name]) != linear, name  # the head and the embedding stay as they are
            if precision == "nf4" and linear and p.shape[1] % 64 == 0:  # otherwise their kernel for the CPU begins blocks anew in each row
                assert torch.equal(p, in_nf4(plain[name])), name
            assert torch.equal(stored.get_parameter(name).master(), p.float())
        results[trainer] = trained(stored, trainer)
        dense = trained(tierflow.wrap(values, small()), trainer)
        assert results[trainer][0] == dense[0]
        for name, value in dense[1].items():
            assert torch.equal(results[trainer][1][name], value), name
        assert 0 < results[trainer][2] < 0.75 * dense[2]


def in_nf4(weight):
    """Its nearest values of bitsandbytes' NF4."""
    functional = pytest.importorskip("bitsandbytes.functional")
    codes, state = functional.quantize_4bit(weight.detach(), quant_type="nf4", compress_statistics=False)
    return functional.dequantize_4bit(codes, state)


def test_what_is_stored_in_fewer_bytes_is_not_written(tmp_path):
    with pytest.raises(tierflow.UsageError, match="plan with trainable=False"):
        tierflow.wrap(make("llama"), roomy(base_precision="nf4"))
    with pytest.raises(tierflow.UsageError, match="'nf5'"):
        roomy(base_precision="nf5", trainable=False)
    model = tierflow.wrap(make("llama"), roomy(base_precision="nf4", trainable=False))
    up = "model.layers.0.mlp.up_proj.weight"
    with torch.no_grad(), pytest.raises(tierflow.UsageError, match=f"{up} is stored as nf4, which is not written"):
        model.get_parameter(up).mul_(2)
    with pytest.raises(tierflow.UsageError, match="is stored as nf4, which is not saved"):
        tierflow.save(model, tmp_path / "saved")
    head = torch.nn.Parameter(torch.zeros(3))
    model.register_parameter("own", head)
    tierflow.save_checkpoint(model, tierflow.optim.AdamW([head]), tmp_path / "checkpoint")
    for other in "int8", "bf16":
        model = tierflow.wrap(make("llama"), roomy(base_precision=other, trainable=False))
        model.register_parameter("own", torch.nn.Parameter(torch.zeros(3)))
        with pytest.raises(tierflow.InputError, match="another base_precision"):
            tierflow.load_checkpoint(model, tierflow.optim.AdamW([model.own]), tmp_path / "checkpoint")
    sizes = [tierflow.plan(make("llama"), tierflow.Budget(device="64MiB", host="128MiB"), trainable=False, base_precision=each).estimate["state_bytes"] for each in ("bf16", "int8", "nf4")]
    assert sizes[0] > 1.4 * sizes[1] > 1.6 * sizes[2]


def test_init_empty_takes_no_memory_and_loads_from_a_folder(tmp_path):
    made = tree()
    from safetensors.torch import save_file

    (tmp_path / "weights").mkdir()
    state = {name: p.detach().clone() for name, p in made.named_parameters()}
    save_file(state, tmp_path / "weights" / "model.safetensors")
    with tierflow.init_empty():
        empty = Tree()
    assert all(p.is_meta for p in empty.parameters()) and not empty.scale.is_meta
    with pytest.raises(tierflow.InputError, match="has no values"):
        tierflow.wrap(empty, roomy())
    with tierflow.init_empty():
        empty = Tree()
    streamed = tierflow.wrap(empty, roomy(), checkpoint=tmp_path / "weights")
    assert streamed(inputs(1)[0]).item() == made(inputs(1)[0]).item()
    tierflow.save(streamed, tmp_path / "out")
    from safetensors.torch import load_file

    saved = load_file(tmp_path / "out" / "model.safetensors")
    assert {name: tuple(t.shape) for name, t in saved.items() if name != "scale"} == {name: tuple(t.shape) for name, t in state.items()}
    assert all(torch.equal(saved[name], t) for name, t in state.items())


def test_layer_major_when_another_module_comes_last():
    """The module that came last in the step before is expected to do so again; one step it does not, one step it is not there."""

    class Tail(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Dropout(0.0)) for _ in range(4))
            self.count = 3

        def forward(self, x):
            for block in list(self.blocks)[: self.count]:
                x = block(x)
            return x.float().square().mean()

    runs = []
    for trainer in (False, True):
        torch.manual_seed(0)
        model = tierflow.wrap(Tail().bfloat16(), roomy())
        opt = tierflow.optim.AdamW(model.parameters(), lr=LR)
        layer_major = tierflow.Trainer(model, opt, loss=lambda m, x: m(x))
        for count in (3, 3, 4, 4, 2, 2):
            model.count = count
            data = [torch.randn(4, 32, generator=torch.Generator().manual_seed(i)).bfloat16() for i in range(2)]
            if trainer:
                layer_major.backward(data)
            else:
                for x in data:
                    (model(x) / 2).backward()
            opt.step()
            opt.zero_grad()
        runs.append(masters(model))
    assert all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])
