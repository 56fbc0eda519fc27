"""What modules are called with: containers that they fill, tensors that they change in place, objects that nobody looks into. Gradients are plain torch's, or the call is refused."""

import collections
import dataclasses

import pytest
from stacks import Stack, as_plain, inputs, nn, once, refused, stack
from streaming import GROUPED, batches, roomy, tierflow, torch, transformers


@dataclasses.dataclass
class Pair:
    x: torch.Tensor
    note: object = None


class Bag(collections.UserDict):
    pass


def test_objects_that_hide_gradients_are_refused():
    taken = lambda b, pair: pair.x + torch.tanh(b.linear(pair.x))  # noqa: E731
    with pytest.raises(tierflow.UsageError, match=r"blocks.0 is called with a test_stream_inputs.Pair, .*register_pytree_node"):
        model = tierflow.wrap(stack(taken), roomy())
        model.blocks[0](Pair(torch.zeros(1, 16, dtype=torch.bfloat16, requires_grad=True)))
    for gives in (lambda b, x: Pair(None, [b.linear(x)]), lambda b, x: (x, Bag(y=b.linear(x)))):
        with pytest.raises(tierflow.UsageError, match=r"blocks.0 puts what it computes into a test_stream_inputs.(Pair|Bag), where gradients would be lost"):
            tierflow.wrap(stack(gives), roomy())(*inputs())
    model = tierflow.wrap(stack(lambda b, x, bag: [bag.update(y=torch.tanh(b.linear(x))), x][1], rest=lambda: (Bag(),)), roomy())
    with pytest.raises(tierflow.UsageError, match="blocks.0 puts what it computes into a test_stream_inputs.Bag"):
        model(*inputs())
    with torch.no_grad():
        model(*inputs())


def test_objects_that_hide_no_gradient_go_through():
    def does(block, x, pair):
        return x + torch.tanh(block.linear(x)) * pair.x

    as_plain(lambda: stack(does, rest=lambda: (Pair(torch.full((), 0.5, dtype=torch.bfloat16), slice(3)),)), once)
    model = tierflow.wrap(stack(lambda b, pair: pair.x + torch.tanh(b.linear(pair.x))), roomy())
    model.blocks[0](Pair(*inputs())).sum().backward()


@pytest.mark.parametrize("trainer", [False, True], ids=["loop", "trainer"])
@pytest.mark.parametrize("kind", ["list", "dict", "nested", "deque"])
def test_containers_that_blocks_fill(kind, trainer):
    def does(block, x, kept):
        y = torch.tanh(block.linear(x))
        if kind == "dict":
            kept["sum"] = kept.get("sum", 0) + y
            kept.pop("start", None)
            return x + kept["sum"]
        into = kept["inner"] if kind == "nested" else kept
        into.append(y)
        return x + sum(into)

    made = {"list": list, "dict": lambda: {"start": 1}, "nested": lambda: {"inner": []}, "deque": lambda: collections.deque(maxlen=2)}[kind]

    def end(x, kept):
        assert "start" not in kept
        return x + (kept["sum"] if kind == "dict" else sum(kept["inner"] if kind == "nested" else kept))

    def backward(model):
        if trainer and hasattr(model, "_tierflow"):
            return tierflow.Trainer(model, tierflow.optim.AdamW(model.parameters()), loss=lambda m, x: m(x)).backward(inputs())
        return once(model)

    plain, streamed = as_plain(lambda: stack(does, rest=lambda: (made(),), end=end), backward, steps=2)
    with torch.no_grad():
        assert plain(*inputs()).item() == streamed(*inputs()).item()


IN_PLACE = {
    "relu": (lambda b, x: b.linear(torch.relu_(x)), {}),
    "then used": (lambda b, x: b.linear(x.mul_(1.5)) + x, {}),
    "returned": (lambda b, x: x.mul_(0.5).add_(torch.tanh(b.linear(x.clone()))), {}),
    "between": (None, {"between": torch.relu_}),
    "mask": (lambda b, x, mask: x + torch.tanh(b.linear(x)) * mask.mul_(0.5).clone(), {"rest": lambda: (torch.ones(4, 16, dtype=torch.bfloat16),)}),
    "a view": (lambda b, x: b.linear(x[:, :8].relu_().repeat(1, 2)) + x, {}),
    "of the caller": (lambda b, x: b.linear(x.relu_()), {"between": lambda x: x * 1.5, "end": lambda x: x}),
}


@pytest.mark.parametrize("trainer", [False, True], ids=["loop", "trainer"])
@pytest.mark.parametrize("case", IN_PLACE)
def test_tensors_that_change_in_place(case, trainer):
    does, options = IN_PLACE[case]

    def backward(model):
        if trainer and hasattr(model, "_tierflow"):
            return tierflow.Trainer(model, tierflow.optim.AdamW(model.parameters()), loss=lambda m, x: m(x)).backward(inputs())
        return once(model)

    as_plain(lambda: stack(does, **options), backward, steps=3)


def test_the_caller_has_what_a_block_made_of_its_input():
    class Twice(Stack):
        def forward(self, x):
            x = self.start(x)
            for block in self.blocks:
                x = block(x) + x
            return self.head(x).float().square().mean()

    def makes():
        torch.manual_seed(0)
        return Twice(lambda b, x: b.linear(torch.relu_(x))).bfloat16()

    as_plain(makes, once, steps=2)


def test_writes_that_cannot_be_replayed_are_refused():
    refused("writes what it computes into an input that has no gradient", lambda: stack(lambda b, x, into: x + into.add_(b.linear(x)), rest=lambda: (torch.zeros(4, 16, dtype=torch.bfloat16),)))
    refused("two of its inputs share memory", lambda: stack(lambda b, x, y: torch.tanh(b.linear(x.mul_(2))), rest=lambda: (1,)), lambda m: m.blocks[0](*[m.start(*inputs())] * 2))

    def later(block, x):
        block.calls += 1
        return b if (b := block.linear(x.relu_() if block.calls > 1 else x)) is not None else x

    model = tierflow.wrap(stack(later), roomy())
    once(model)
    with pytest.raises(tierflow.UsageError, match="blocks.0 changed an input in place, which it did not in its first call"):
        once(model)


def test_results_that_are_views_may_be_changed_in_place():
    def add(x):
        x += 1
        return x

    as_plain(lambda: stack(lambda b, x: torch.tanh(b.linear(x)).t().contiguous().t(), between=add), once)


@pytest.mark.parametrize("family", ["Gemma3n", "Gemma4"])
@pytest.mark.parametrize("trainer", [False, True], ids=["loop", "trainer"])
def test_keys_that_layers_share_have_their_gradients(family, trainer):
    layers = dict(num_hidden_layers=4, layer_types=["sliding_attention", "full_attention"] * 2, sliding_window=8, num_kv_shared_layers=2)
    config = dict(GROUPED, **layers, head_dim=16, vocab_size_per_layer_input=160, hidden_size_per_layer_input=8) | layers
    config.update({"laurel_rank": 8, "activation_sparsity_pattern": [0.0] * 4} if family == "Gemma3n" else {})

    def made():
        torch.manual_seed(0)
        return getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}TextConfig")(**config)).bfloat16().train()

    plain, streamed = made(), tierflow.wrap(made(), roomy())
    (batch,) = batches("llama", 1)
    expected = plain(**batch).loss
    expected.backward()
    if trainer:
        assert tierflow.Trainer(streamed, tierflow.optim.AdamW(streamed.parameters()), clip=None).backward([batch]) == expected.item()
    else:
        streamed(**batch).loss.backward()
    for name, p in plain.named_parameters():
        if p.grad is not None:
            found = streamed.get_parameter(name).grad
            assert (found - p.grad).norm() <= 0.02 * p.grad.norm(), name


def test_a_streamed_parameter_is_an_argument_of_another_module():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.norm, self.head = nn.Embedding(8, 16), nn.LayerNorm(16), nn.Linear(16, 1)

        def forward(self, ids):
            return self.head(self.table(ids) + self.norm(self.table.weight)[ids] + self.norm(self.table.weight[:2]).sum(0)).float().square().mean()

    def made():
        torch.manual_seed(0)
        return Net().bfloat16()

    def backward(model):
        loss = model(torch.tensor([1, 5, 1]))
        loss.backward()
        return loss.item()

    _, streamed = as_plain(made, backward)
    with torch.no_grad():
        assert streamed.norm(streamed.table.weight).shape == (8, 16)
