"""How a durable run may end and what of it another one takes up: exits without close(), steps that were broken off, writes between steps, and scripts that compute otherwise."""

import pytest
from streaming import batches, masters, tierflow, torch
from test_stream_durable import LARGE, gpt2, plan_of
from test_stream_durable import made as made  # a fixture: two steps, the second of them not committed yet


def step(model, opt):
    model(**batches("gpt2", 3)[2]).loss.backward()
    opt.step()
    opt.zero_grad()


def ends():
    """What the end of the interpreter does with a model that nobody closed."""
    tierflow.engine._close_all()


def test_a_script_that_ends_without_close_leaves_its_last_step_out(made):
    model, _, begin = made
    before = tierflow.model.engine_of(model)
    ends()
    with pytest.raises(tierflow.UsageError, match="was closed"):
        before.native.memory()
    assert begin()[2] == 1


def test_what_is_written_between_steps_is_no_part_of_the_step_before(made):
    model, opt, begin = made
    expected = masters(model)
    with torch.no_grad():
        model.transformer.wte.weight.fill_(0.5)
    ends()
    model, opt, done = begin()
    assert done == 2 and all(torch.equal(values, expected[name]) for name, values in masters(model).items())
    with torch.no_grad():
        model.transformer.wte.weight.fill_(0.5)
    step(model, opt)
    tierflow.close(model)
    model, _, done = begin()
    assert done == 3 and (masters(model)["transformer.wte.weight"] - 0.5).abs().max() < 0.01


class Failing:
    """A streamer whose updates fail."""

    def __init__(self, native):
        self.native = native

    def __getattr__(self, name):
        return getattr(self.native, name)

    def step(self, updates):
        raise ZeroDivisionError


@pytest.mark.parametrize("where", ["updates", "ordinary parameters", "what lies beside"])
def test_a_step_that_was_broken_off_is_neither_gone_on_with_nor_committed(where, made, monkeypatch):
    model, opt, begin = made
    expected, engine = masters(model), tierflow.model.engine_of(model)
    if where == "updates":
        monkeypatch.setattr(engine, "native", Failing(engine.native))
    elif where == "ordinary parameters":
        monkeypatch.setattr(opt, "_step_ordinary", lambda group: 1 / 0)
    else:
        monkeypatch.setattr("tierflow.durable.state_of", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        step(model, opt)
    monkeypatch.undo()
    with pytest.raises(tierflow.UsageError, match="an optimizer step was interrupted half-way: start the script again"):
        opt.step()
    tierflow.close(model)
    model, _, done = begin()
    assert done == 2 and all(torch.equal(values, expected[name]) for name, values in masters(model).items())


def test_another_way_to_compute_is_another_run(made, tmp_path):
    model, _, begin = made
    tierflow.close(model)
    eager = gpt2()
    eager.set_attn_implementation("eager")
    plan = plan_of([tmp_path / "a"], size=LARGE)
    for what, other in {
        "attention": lambda: begin(model=eager),
        "blocks": lambda: begin(plan=plan_of([tmp_path / "a"], size=LARGE, blocks=["GPT2Block"])),
        "configuration": lambda: begin(model=gpt2(layer_norm_epsilon=1e-3)),
        "fused_layers": lambda: tierflow.wrap(gpt2(), plan, fused_layers=True),
    }.items():
        with pytest.raises(tierflow.UsageError, match=f"the run whose state is here had another {what}: "):
            other()
    assert begin()[2] == 2
