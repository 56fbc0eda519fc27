"""Arguments that cannot be: each gets one line that names it, before anything is touched."""

import math
import os

import pytest
from streaming import batches, make, masters, roomy, tierflow, torch

SIZES = {"device": "64MiB", "host": "64MiB"}


@pytest.mark.parametrize(
    "given, text",
    [
        ({"device": -1}, "-1 is no size"),
        ({"device": 2**80}, "is no size"),
        ({"device": "9" * 400 + "GiB"}, "is no size"),
        ({"device": 1e9}, "1000000000.0 is no size"),
        ({"host": None}, "None is no size"),
        ({"host": True}, "True is no size"),
        ({"activations": "a"}, "activations=...\\) is a share"),
        ({"activations": math.nan}, "activations=...\\) is a share"),
        ({"durable": "yes", "storage": ["s"]}, "durable=...\\) is True or a number of steps"),
        ({"durable": 1.5, "storage": ["s"]}, "durable=...\\) is True or a number of steps"),
        ({"storage": [""]}, "'' names no folder"),
        ({"storage": None}, "storage is a list of folders"),
        ({"storage": [3]}, "storage is a list of folders"),
        ({"storage": ["s", "./s/"]}, "names a folder twice"),
        ({"storage": [__file__]}, "names folders, and this is a file"),
    ],
)  # fmt: skip
def test_a_budget_names_what_it_cannot_take(given, text):
    with pytest.raises(tierflow.UsageError, match=text):
        tierflow.Budget(**{**SIZES, **given})


def test_a_budget_takes_what_it_took():
    assert tierflow.Budget(1 << 20, "1.5 GB", "s", durable=3) == tierflow.Budget("1MiB", 1_500_000_000, ["s"], durable=3)


@pytest.mark.parametrize(
    "call, text",
    [
        (lambda m: tierflow.plan(m, tierflow.Budget(**SIZES), micro_batches=0), "micro_batches is an integer, at least 1, not 0"),
        (lambda m: tierflow.plan(m, tierflow.Budget(**SIZES), micro_batches=-1), "at least 1, not -1"),
        (lambda m: tierflow.plan(m, tierflow.Budget(**SIZES), micro_batches=1.5), "at least 1, not 1.5"),
        (lambda m: tierflow.plan(m, 3), "budget is a tierflow.Budget, not 3"),
        (lambda m: tierflow.plan(m, tierflow.Budget(**SIZES), seed=-1), "seed takes an integer, 0 or more, not -1"),
        (lambda m: tierflow.plan(m, tierflow.Budget(**SIZES), precision=8), "precision takes a text, not 8"),
        (lambda m: tierflow.plan(m, tierflow.Budget(**SIZES), extra={"chunks": 1}), 'an option is unknown: "chunks"; there are device'),
        (lambda m: tierflow.wrap(m, "plan"), "plan is what tierflow.plan"),
    ],
)  # fmt: skip
def test_a_plan_names_what_it_cannot_take(call, text):
    with pytest.raises(tierflow.UsageError, match=text):
        call(torch.nn.Linear(2, 2))


def test_a_module_without_parameters_is_refused():
    for call in tierflow.plan, tierflow.wrap:
        with pytest.raises(tierflow.UsageError, match="has no parameters"):
            call(torch.nn.ReLU(), tierflow.Budget(**SIZES))


@pytest.mark.parametrize("clip", [-1, 0, 0.0, math.nan, "1"])
def test_a_norm_to_clip_to_is_above_0(clip, model, batch):
    opt, before = tierflow.optim.AdamW(model.parameters(), lr=1e-3), masters(model)
    with pytest.raises(tierflow.UsageError, match="clip is a number above 0, or None"):
        tierflow.Trainer(model, opt, clip=clip).step([batch])
    assert all(torch.equal(master, before[name]) for name, master in masters(model).items())


def test_a_state_that_this_process_holds_says_so(tmp_path):
    plan = roomy(allow_any_filesystem=True)
    plan.budget = tierflow.Budget(**SIZES, storage=[tmp_path / "store"], durable=True)
    first = tierflow.wrap(make("llama"), plan)
    opt = tierflow.optim.AdamW(first.parameters(), lr=1e-3)
    tierflow.resume(first, opt)
    with pytest.raises(tierflow.LockedError, match=r"state.tfv: this process holds it: first give it back with tierflow.close") as error:
        tierflow.wrap(make("llama"), plan)
    assert str(os.getpid()) not in str(error.value)
    first(**batches("llama", 1)[0]).loss.backward()  # and nothing is lost
    opt.step()
    tierflow.close(first)
    again = tierflow.wrap(make("llama"), plan)
    assert tierflow.resume(again, tierflow.optim.AdamW(again.parameters(), lr=1e-3)) == 1
    tierflow.close(again)
