"""Moments of streamed parameters have one place: whose they are, and that a gradient's factor is applied to all of its sum."""

import pytest
from streaming import LR, UP, make, masters, roomy, scarce, tierflow, torch, train


def same(a, b):
    return all(torch.equal(a[name], b[name]) for name in b)


@pytest.mark.parametrize("precision", ["fp32-master+adam32", "fp32-master+adam8", "bf16-sr+adam8"])
def test_a_new_optimizer_begins_without_moments(precision, tmp_path):
    """As where a notebook's cell runs a second time: the weights are put back, and the optimizer is made again."""
    expected = train(plain := tierflow.wrap(make("llama"), roomy(precision=precision)), "llama")
    model = tierflow.wrap(make("llama"), scarce(tmp_path / "store", precision=precision))
    first = tierflow.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, "llama", opt=first)
    model.load_state_dict(make("llama").state_dict())
    assert train(model, "llama") == expected
    assert same(masters(model), masters(plain)) or precision == "bf16-sr+adam8"  # whose rounding goes on drawing
    with pytest.raises(tierflow.UsageError, match="another optimizer has trained .* make a new one, whose moments begin at zero"):
        train(model, "llama", opt=first)


def test_an_optimizer_takes_anothers_place_with_its_state_dict():
    """The run is that of one optimizer; a state_dict whose counts are not those of the moments leaves them alone."""
    models = [tierflow.wrap(make("llama"), roomy()) for _ in range(2)]
    first = [tierflow.optim.AdamW(model.parameters(), lr=1e-3) for model in models]
    for model, opt in zip(models, first, strict=True):
        train(model, "llama", opt=opt)
    second = tierflow.optim.AdamW(models[1].parameters(), lr=1e-3)
    second.load_state_dict(first[1].state_dict())
    expected, found = (train(model, "llama", opt=opt) for model, opt in zip(models, (first[0], second), strict=True))
    assert found == expected and same(masters(models[1]), masters(models[0]))
    third = tierflow.optim.AdamW(models[1].parameters(), lr=1e-3)
    third.load_state_dict(first[1].state_dict())
    assert second.state[models[1].get_parameter(UP)]["step"] == 6 and not third.state[models[1].get_parameter(UP)]


def test_a_gradient_that_was_scaled_is_not_added_to(batch, model):
    opt, parameters = tierflow.optim.AdamW(model.parameters(), lr=LR), list(model.parameters())
    model(**batch).loss.backward()
    torch.nn.utils.clip_grad_norm_(parameters, float("inf"))  # to log the norm: scales by one
    model(**batch).loss.backward()
    torch.nn.utils.clip_grad_norm_(parameters, 1e-3)
    with pytest.raises(tierflow.UsageError, match=r"the gradient of .* was scaled or clipped, and a backward\(\) adds to it: .* after the last backward\(\) of a step"):
        model(**batch).loss.backward()
    opt.zero_grad()
    model(**batch).loss.backward()
    opt.step()
    opt.zero_grad()


def test_a_gradient_that_was_scaled_is_not_added_to_from_outside(model):
    p = model.get_parameter(UP)
    (p * 2).sum().backward()
    p.grad.mul_(0.5)
    with pytest.raises(tierflow.UsageError, match=f"the gradient of {UP} was scaled"):
        (p * 2).sum().backward()
