"""tierflow.load() of a class whose head the folder does not have: classifiers and reward models over a language model."""

import logging

import pytest
import safetensors.torch
from streaming import GROUPED, LENGTH, LR, VOCAB, make, roomy, scarce, tierflow, torch, transformers

LABELS = 3
Classifier = transformers.AutoModelForSequenceClassification


@pytest.fixture
def folder(tmp_path):
    make("llama").to(torch.bfloat16).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def config_of(folder):
    config = transformers.AutoConfig.from_pretrained(folder, num_labels=LABELS)
    config.pad_token_id = 0
    return config


def loaded(folder, plan, seed=7):
    torch.manual_seed(seed)
    return tierflow.load(folder, plan, model_class=Classifier, config=config_of(folder))


def batch():
    generator = torch.Generator().manual_seed(3)
    return {"input_ids": torch.randint(3, VOCAB, (4, LENGTH), generator=generator), "labels": torch.randint(0, LABELS, (4,), generator=generator)}


def trained(model, steps=4):
    optimizer = tierflow.optim.AdamW(model.parameters(), lr=10 * LR)
    losses = []
    for _ in range(steps):
        loss = model(**batch()).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_a_new_head_begins_as_transformers_makes_it(folder, caplog):
    torch.manual_seed(7)
    theirs = Classifier.from_pretrained(folder, config=config_of(folder), dtype=torch.bfloat16)
    with caplog.at_level(logging.WARNING, "tierflow"):
        ours = loaded(folder, roomy())
    assert [record.message for record in caplog.records if record.name == "tierflow"] == [f"score.weight: not in {folder}; its first values are random, as those of from_pretrained()"]
    assert torch.equal(ours.score.weight + 0, theirs.score.weight) and ours.score.weight.requires_grad
    expected, found = theirs(**batch()), ours(**batch())
    torch.testing.assert_close(found.logits, expected.logits, rtol=0.02, atol=0.02)
    expected.loss.backward()
    found.loss.backward()
    torch.testing.assert_close(ours.score.weight.grad + 0, theirs.score.weight.grad, rtol=0.05, atol=0.01)
    tierflow.close(ours)


def test_it_trains_under_every_budget_and_is_saved(folder, tmp_path):
    roomily, scarcely = (loaded(folder, plan).train() for plan in (roomy(), scarce(tmp_path / "store")))
    losses = trained(roomily)
    assert trained(scarcely) == losses and losses[-1] < losses[0]
    tierflow.close(roomily)
    scarcely.eval().save_pretrained(tmp_path / "saved")
    again = Classifier.from_pretrained(tmp_path / "saved", dtype=torch.bfloat16).eval()
    assert again.config.num_labels == LABELS and torch.equal(again.score.weight, scarcely.score.weight + 0)
    again.config.pad_token_id = 0
    torch.testing.assert_close(scarcely(**batch()).logits, again(**batch()).logits, rtol=0.02, atol=0.02)
    tierflow.close(scarcely)


@pytest.mark.parametrize("trainable", [True, False])
def test_a_run_goes_on_with_the_head_that_it_began_with(folder, tmp_path, trainable):
    budget = tierflow.Budget(device="64MiB", host="128MiB", storage=[tmp_path / "store"], durable=True)
    (tmp_path / "store").mkdir()
    heads = []
    for seed in (7, 8):
        model = loaded(folder, tierflow.Plan(budget, trainable=trainable, allow_any_filesystem=True), seed)
        model.own = torch.nn.Parameter(torch.zeros(1))  # what trains beside a frozen base
        optimizer = tierflow.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LR)
        tierflow.resume(model, optimizer)
        heads.append(model.score.weight + 0)
        loss = model(**batch()).loss + model.own.sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        heads.append(model.score.weight + 0)
        tierflow.close(model)
    assert torch.equal(heads[1], heads[2]) and torch.equal(heads[0], heads[1]) == (not trainable)


class Scaled(transformers.LlamaForCausalLM):
    """With a parameter in no module but the model."""

    def __init__(self, config):
        super().__init__(config)
        self.scale = torch.nn.Parameter(torch.full((4,), 3.0))


def test_a_parameter_of_the_model_alone_is_as_the_folder_has_it(tmp_path, caplog):
    Scaled(transformers.LlamaConfig(**GROUPED)).to(torch.bfloat16).save_pretrained(tmp_path / "scaled")
    model = tierflow.load(tmp_path / "scaled", roomy(), model_class=Scaled)
    assert (model.scale + 0).tolist() == [3.0] * 4 and "first values are random" not in caplog.text
    tierflow.close(model)


def test_what_belongs_to_the_model_itself_may_not_lack(folder):
    file = folder / "model.safetensors"
    stored = safetensors.torch.load_file(file)
    lacking = {name: value for name, value in stored.items() if name != "model.layers.1.mlp.up_proj.weight"}
    safetensors.torch.save_file(lacking, file, {"format": "pt"})
    with pytest.raises(tierflow.InputError, match="has no model.layers.1.mlp.up_proj.weight"):
        loaded(folder, roomy())
    lacking = {name: value for name, value in stored.items() if name != "lm_head.weight"}
    safetensors.torch.save_file(lacking, file, {"format": "pt"})
    with pytest.raises(tierflow.InputError, match=r"has no lm_head.weight: another model's weights\?.*model_class="):
        tierflow.load(folder, roomy())


def test_a_head_of_another_size_is_no_new_one(folder):
    config = transformers.LlamaConfig(**{**GROUPED, "vocab_size": VOCAB + 16})
    with pytest.raises(tierflow.InputError, match="has the shape"):
        tierflow.load(folder, roomy(), model_class=transformers.AutoModelForCausalLM, config=config)
