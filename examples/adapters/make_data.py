"""Writes into a folder what the examples of adapters train on: make_data.py FOLDER. The same files each time.

sentences.jsonl  plain text about measured things, for a base model of its own
chats.jsonl      364 questions, which unit the quantity of a thing has, and their answers
held-out.jsonl   20 more, about other pairs of quantity and thing
dialogues.jsonl  conversations with a system message and two such questions; dialogues-held-out.jsonl: other pairs
pairs.jsonl      the questions of chats.jsonl with two answers: one word, chosen, and the sentence, rejected
units.csv        the pairs of chats.jsonl as a table
tokenizer/       a small tokenizer with a chat template
"""

import csv
import itertools
import json
import pathlib
import random
import sys

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

UNITS = {
    "length": "metres", "mass": "kilograms", "age": "years", "temperature": "kelvin", "current": "amperes", "force": "newtons",
    "energy": "joules", "power": "watts", "pressure": "pascals", "frequency": "hertz", "voltage": "volts", "resistance": "ohms",
    "charge": "coulombs", "angle": "degrees", "volume": "litres", "price": "euros",
}  # fmt: skip
THINGS = "anchor balloon battery bell box bridge bucket cable candle clock door engine kettle kite lamp mirror motor pump rope ship spring stove truck wheel".split()

# The end of a turn is the end of a text, which the base knows. Only what stands between `generation` and `endgeneration` is trained on.
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ 'Answer:' }}{% generation %}{{ ' ' + m.content + eos_token }}{% endgeneration %}{{ '\n' }}"
    "{% elif m.role == 'user' %}{{ 'Question: ' + m.content + '\n' }}{% else %}{{ m.content + '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Answer:' }}{% endif %}"
)


def sentence(pick):
    """Some plain text: no question with its answer."""
    quantity, thing = pick.choice(list(UNITS)), pick.choice(THINGS)
    unit, number = UNITS[quantity], pick.randint(2, 99)
    return pick.choice([
        f"The {quantity} of the {thing} is {number} {unit}.",
        f"The {thing} has a {quantity} of {number} {unit}, and the {pick.choice(THINGS)} has a {quantity} of {pick.randint(2, 99)} {unit}.",
        f"We measured the {quantity} of the {thing} in {unit}. The {quantity} of the {thing} was {number} {unit}.",
        f"Question: Which {quantity} does the {thing} have? Nobody knows the {quantity} of the {thing}.",
        f"A {quantity} is measured in {unit}. So the {quantity} of the {thing} is measured in {unit}.",
    ])  # fmt: skip


def chat(quantity, thing):
    return {"messages": [
        {"role": "user", "content": f"Which unit does the {quantity} of the {thing} have?"},
        {"role": "assistant", "content": f"{UNITS[quantity].capitalize()}: the {quantity} is measured in {UNITS[quantity]}."},
    ]}  # fmt: skip


def dialogue(first, second):
    return {"messages": [{"role": "system", "content": "The units are measured."}, *chat(*first)["messages"], *chat(*second)["messages"]]}


def preference(quantity, thing):
    question, answer = chat(quantity, thing)["messages"]
    return {"prompt": [question], "chosen": [{"role": "assistant", "content": f"{UNITS[quantity].capitalize()}."}], "rejected": [answer]}


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_tokenizer(texts, folder):
    model = tokenizers.Tokenizer(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    model.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=512, special_tokens=["<end>", "<pad>"], initial_alphabet=alphabet, show_progress=False))
    made = PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<end>", pad_token="<pad>")
    made.chat_template = TEMPLATE
    made.save_pretrained(folder, save_jinja_files=False)


def main(folder):
    folder.mkdir(parents=True, exist_ok=True)
    pick = random.Random(1)
    texts = [sentence(pick) for _ in range(20000)]
    pairs = list(itertools.product(UNITS, THINGS))
    pick.shuffle(pairs)
    write(folder / "sentences.jsonl", [{"text": text} for text in texts])
    for name, some in (("held-out", pairs[:20]), ("chats", pairs[20:384])):
        write(folder / f"{name}.jsonl", [chat(*pair) for pair in some])
    for name, some in (("dialogues-held-out", pairs[:20]), ("dialogues", pairs[20:384])):
        write(folder / f"{name}.jsonl", [dialogue(*two) for two in zip(some, some[1:])])
    write(folder / "pairs.jsonl", [preference(*pair) for pair in pairs[20:384]])
    with open(folder / "units.csv", "w", newline="") as table:
        csv.writer(table).writerows([("quantity", "thing", "unit"), *((quantity, thing, UNITS[quantity]) for quantity, thing in pairs[20:384])])
    make_tokenizer(texts, folder / "tokenizer")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
