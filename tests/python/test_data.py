"""Text through the C++ side gives the tokens that the tokenizers library gives."""

import json
import random
import subprocess
import sys

import pytest

from conftest import BUILD

tokenizers = pytest.importorskip("tokenizers")


def read_tokens(tokenizer, path):
    probe = BUILD / "core_probe"
    if not probe.exists():
        pytest.skip(f"{probe} is not built")
    done = subprocess.run([probe, "tokens", tokenizer, sys.executable, path], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return [int(line) for line in done.stdout.split()]


@pytest.fixture(scope="module")
def text():
    generator = random.Random(1)
    words = ["".join(generator.choices("abcdefgh éü€😀", k=generator.randint(1, 9))).strip() for _ in range(300)]
    return "\n".join(" ".join(generator.choices(words, k=12)) for _ in range(2000))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory, text):
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=500, special_tokens=["<s>", "</s>"], initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    model.train_from_iterator([text[:20000]], trainer)
    model.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    folder = tmp_path_factory.mktemp("tokenizer")
    model.save(str(folder / "tokenizer.json"))
    return model, folder


def test_documents_are_tokenised_as_by_the_library(tokenizer, text, tmp_path):
    model, folder = tokenizer
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    documents = [*text.split("\n")[:100], "ended</s>", "and another"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": document}) + "\n" for document in documents))
    expected = [id for document in documents for id in [*model.encode(document.removesuffix("</s>")).ids, 1]]
    assert expected[0] == 0
    assert read_tokens(folder / "tokenizer.json", tmp_path / "a.jsonl") == expected


def test_a_long_text_is_cut_only_between_lines(tokenizer, text, tmp_path):
    model, folder = tokenizer
    (folder / "tokenizer_config.json").unlink(missing_ok=True)
    long = "\n".join([text] * 12)
    assert len(long.encode()) > 2 << 20
    (tmp_path / "a.txt").write_text(long)
    begin, *ids = read_tokens(folder / "tokenizer.json", tmp_path / "a.txt")
    decoder = tokenizers.decoders.ByteLevel()
    assert decoder.decode([model.id_to_token(id) for id in ids]) == long and begin == 0
