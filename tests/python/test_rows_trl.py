"""Rows give the ids and labels that TRL's SFTTrainer trains on, packed as it packs them."""

import pytest

from rows import CHATS, MARKED, Probe, base, messages, the_library, transformers, write_rows  # noqa: F401

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

LENGTH = 24


def theirs(base, rows, template, tmp_path, **config):
    """Their (ids, labels), labels where the tokens stand."""
    tokenizer = the_library(base, template)
    tokenizer.pad_token = "<s>"
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1))
    arguments = trl.SFTConfig(output_dir=str(tmp_path / "trl"), report_to=[], use_cpu=True, bf16=False, max_length=LENGTH, **config)
    trainer = trl.SFTTrainer(model=model, args=arguments, train_dataset=datasets.Dataset.from_list(rows), processing_class=tokenizer)
    return list(trainer.train_dataset)


def shifted(sequence, ends):
    """Their labels as ours: the token that each position predicts, none across the end of a document."""
    labels = [*sequence["labels"][1:], -100]
    return [-100 if at + 1 in ends else label for at, label in enumerate(labels)]


ROWS = {
    "messages": ([{"messages": messages(chat)} for chat in CHATS if chat is not CHATS[2]], {"assistant_only_loss": True}),
    "all": ([{"messages": messages(chat)} for chat in CHATS], {}),
    "strings": ([{"prompt": "the answer is ", "completion": "what you long for"}, {"prompt": "a", "completion": "b</s>"},
                 {"prompt": "long " * 30, "completion": "cut away"}, {"prompt": "user", "completion": "\n and"}], {}),
    "conversational": ([{"prompt": messages(chat[:-1]), "completion": messages(chat[-1:])} for chat in (CHATS[0], CHATS[1], CHATS[4])], {}),
    "text": ([{"text": "the answer"}, {"text": "what</s>"}, {"text": "long " * 30}], {}),
}


@pytest.mark.parametrize("kind", ROWS)
def test_rows_are_trls(base, tmp_path, kind):  # noqa: F811
    rows, config = ROWS[kind]
    probe = Probe(base, tmp_path)
    probe.template = MARKED
    path = write_rows(tmp_path / "a.jsonl", rows)
    expected = theirs(base, rows, MARKED, tmp_path, **config)
    found = probe.sequences(path, sequence_length=LENGTH, train_on="all" if kind == "all" else "assistant")
    assert len(found) == len(expected)
    remaining = [(row["input_ids"], shifted(row, set())) for row in expected]
    for ids, labels, _ in found:
        match = next(row for row in remaining if ids[: len(row[0])] == row[0] and labels[: len(row[0])] == row[1])
        remaining.remove(match)
        assert set(labels[len(match[0]):]) <= {-100}
