"""Rows give the ids and labels that TRL's SFTTrainer trains on, packed as it packs them."""

import sys
from importlib import resources

import pytest
import torch
from program import needs_torch, run, small, steps_of
from rows import CHANGING, CHATS, MARKED, Probe, Script, base, messages, the_library, tokenizers, transformers, with_marks, write_rows  # noqa: F401

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


@pytest.mark.parametrize("shape", CHANGING)
def test_turns_without_a_mark_are_trls_with_one(shape, base, tmp_path):  # noqa: F811
    """Theirs of a template that marks the turns, ours of the same template without marks."""
    rows, config = ROWS["messages"]
    probe = Probe(base, tmp_path)
    probe.template = CHANGING[shape]
    expected = theirs(base, rows, with_marks(CHANGING[shape]), tmp_path, **config)
    found = probe.sequences(write_rows(tmp_path / "a.jsonl", rows), sequence_length=LENGTH)
    cut = [(row["input_ids"], shifted(row, set())) for row in expected]
    assert sorted((ids[: len(own)], labels[: len(own)]) for (ids, labels, _), (own, _) in zip(sorted(found), sorted(cut))) == sorted(cut)


# Templates as models come with them, and the same with TRL's marks.
STOCK = ["cohere", "gemma", "gemma3", "gptoss", "lfm2", "llama3", "phi3", "phi3_5", "qwen2_5", "qwen3_instruct_2507"]
AHEAD = {"gptoss": "<|start|>assistant", "qwen2_5": "<|im_start|>assistant\n"}  # the words that ask for an answer, of which these marks take some
TALK = messages([("user", "héllo 😀"), ("assistant", "bonjour 😀"), ("user", "again\n\n"), ("assistant", "encore é€"), ("user", "more"), ("assistant", "no")])


NAMED = ["<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<start_of_turn>", "<end_of_turn>", "<|assistant|>", "<|user|>",
         "<|message|>", "<|channel|>", "<|return|>", "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|CHATBOT_TOKEN|>", "<|endoftext|>"]  # fmt: skip


@pytest.fixture(scope="module")
def named(base, tmp_path_factory):  # noqa: F811
    """The small tokenizer with the tokens of these templates, and with ends of lines apart, as those of their models have them."""
    tokenizer, parts = the_library(base), tokenizers.pre_tokenizers
    lines = parts.Split(tokenizers.Regex("[\r\n]+"), "isolated")
    tokenizer.backend_tokenizer.pre_tokenizer = parts.Sequence([lines, parts.ByteLevel(add_prefix_space=False)])
    tokenizer.add_special_tokens({"additional_special_tokens": NAMED})
    tokenizer.save_pretrained(folder := tmp_path_factory.mktemp("named"))
    return folder


def stock(name):
    return (resources.files("trl") / "chat_templates" / f"{name}.jinja").read_text()


@pytest.mark.parametrize("name", STOCK)
def test_stock_templates_give_what_trls_marks_give(name, named, tmp_path):
    script = Script(named)
    path = write_rows(tmp_path / "a.jsonl", [{"messages": TALK}, {"messages": TALK[:4]}, {"messages": TALK[:2]}])
    script.template = stock(f"{name}_training")
    expected = script.rows(path)
    assert script.end["masks"] == ["generation"]
    if name in AHEAD:
        asks = the_library(named)(AHEAD[name], add_special_tokens=False)["input_ids"]
        for ids, trained in expected:
            for at in [at for at in range(len(ids)) if ids[at : at + len(asks)] == asks]:
                trained[at : at + len(asks)] = [0] * len(asks)
    script.template = stock(name)
    assert script.rows(path) == expected and len(expected) == 3
    assert script.end["masks"] == ["contents"]


@pytest.mark.parametrize("name, last, others", [("qwen3", "<think>\n\n</think>\n\n{}<|im_end|>\n", "{}<|im_end|>\n"), ("glm4moe", "\n<think></think>\n{}", "\n<think></think>\n{}")])
def test_stock_templates_that_change_earlier_turns_are_taken(name, last, others, named, tmp_path):
    script = Script(named)
    script.template = stock(name)
    rows = script.rows(write_rows(tmp_path / "a.jsonl", [{"messages": TALK}]))
    tokenizer = the_library(named, script.template)
    assert rows[0][0] == tokenizer.apply_chat_template(TALK)["input_ids"]
    answers = [message["content"] for message in TALK[1::2]]
    wanted = "".join([*map(others.format, answers[:-1]), last.format(answers[-1])])
    assert tokenizer.decode([id for id, counts in zip(*rows[0]) if counts]) == wanted
    assert script.end["masks"] == ["contents"]


@needs_torch
def test_the_loss_of_an_accumulated_step_is_trls(base, tmp_path):  # noqa: F811
    """Rows of 2 to 40 trained tokens, one a micro-batch: the sum of all their losses by the number of all their tokens, no mean of means."""
    chats = [[("user", "say it"), ("assistant", "a " * n + "b" * (n % 3))] for n in (1, 19, 2, 12)]
    rows = write_rows(tmp_path / "a.jsonl", [{"messages": messages(chat)} for chat in chats])
    (tmp_path / "template.jinja").write_text(MARKED)
    tokenizer = the_library(base, MARKED)
    tokenizer.pad_token = "<s>"
    torch.manual_seed(2)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=128)).bfloat16()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6)  # so that tokens differ in their losses
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")

    arguments = trl.SFTConfig(
        output_dir=str(tmp_path / "trl"), report_to=[], use_cpu=True, bf16=False, max_length=64, assistant_only_loss=True, per_device_train_batch_size=1,
        gradient_accumulation_steps=4, max_steps=1, logging_steps=1, save_strategy="no", gradient_checkpointing=False)
    data = datasets.Dataset.from_list([{"messages": messages(chat)} for chat in chats])
    trainer = trl.SFTTrainer(model=model.float(), args=arguments, train_dataset=data, processing_class=tokenizer)
    alone = []
    with torch.no_grad():
        for row in trainer.train_dataset:
            labels = torch.tensor([label if mask else -100 for label, mask in zip(row["input_ids"], row["assistant_masks"])]) if "assistant_masks" in row else torch.tensor(row["labels"])
            alone.append(model(input_ids=torch.tensor([row["input_ids"]]), labels=labels[None]).loss.item())
    trainer.train()
    (theirs,) = [record["loss"] for record in trainer.state.log_history if "loss" in record]

    run(tmp_path, "train", "--model", "model", "--data", rows, "--chat-template", "template.jinja", "--python", sys.executable, "--packing", "none", "--held-out", "0",
        "--steps", "1", "--micro-batches", "4", "--out", "out", *small("--sequence-length", "64", "--micro-batch", "1", "--log-json", "log.json"))
    (ours,) = [record["loss"] for record in steps_of(tmp_path / "log.json")]
    assert ours == pytest.approx(theirs, rel=2e-3)
    assert abs(sum(alone) / 4 - theirs) > 0.01 * theirs


def test_packing_is_trls(base, tmp_path):  # noqa: F811
    rows, config = ROWS["messages"]
    rows = [{"messages": messages([("user", "a " * (n % 7)), ("assistant", "b " * (n * n % 11))])} for n in range(1, 40)] + rows[:-1]
    # Packing, they keep a row that is cut before its first trained token, such as the last; without packing they drop it, as we do.
    expected = theirs(base, rows, MARKED, tmp_path, packing=True, packing_strategy="bfd", **config)
    probe = Probe(base, tmp_path)
    probe.template = MARKED
    found = probe.sequences(write_rows(tmp_path / "a.jsonl", rows), sequence_length=LENGTH, packing="bfd")
    documents = []
    for ids, _, positions in found:
        starts = [at for at, position in enumerate(positions) if position == 0] + [LENGTH]
        lengths = [end - begin for begin, end in zip(starts, starts[1:])]
        documents.append(lengths[:-1] if ids[starts[-2]] == 0 and set(ids[starts[-2] :]) == {0} else lengths)
    assert sorted(documents) == sorted(row["seq_lengths"] for row in expected)
    # The labels of a row that is packed are those that it has alone.
    alone = {tuple(ids[: len(ids)]): labels for ids, labels, _ in probe.sequences(tmp_path / "a.jsonl", sequence_length=LENGTH)}
    for ids, labels, positions in found:
        at = 0
        for length in (end for end in documents[found.index([ids, labels, positions])]):
            key = tuple(ids[at : at + length] + [0] * (LENGTH - length))
            assert alone[key][:length] == labels[at : at + length]
            at += length


def test_concatenation_is_trls(base, tmp_path):  # noqa: F811
    rows, config = ROWS["all"]
    expected = theirs(base, rows, MARKED, tmp_path, packing=True, packing_strategy="wrapped", **config)
    probe = Probe(base, tmp_path)
    probe.template = MARKED
    found = probe.sequences(write_rows(tmp_path / "a.jsonl", rows), sequence_length=LENGTH, packing="concat", train_on="all")
    whole = [(row["input_ids"], shifted(row, set())) for row in expected if len(row["input_ids"]) == LENGTH]
    assert sorted((ids, labels) for ids, labels, _ in found) == sorted(whole)
