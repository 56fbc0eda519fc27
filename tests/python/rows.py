"""Rows of conversations for the tests: a small tokenizer, templates, and what the script and the C++ side make of rows."""

import importlib.util
import io
import json
import struct
import subprocess
import sys

import pytest

from conftest import BUILD, ROOT

tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

# Header and content apart, the end of a turn marked; with and without the mark of what the assistant writes.
PLAIN = (
    "{{ bos_token }}{% for m in messages %}{{ '<|start|>' + m.role + '\n' }}{{ m.content + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)
MARKED = PLAIN.replace(
    "{{ m.content + '<|end|>\n' }}",
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content + '<|end|>\n' }}{% endgeneration %}{% else %}{{ m.content + '<|end|>\n' }}{% endif %}",
)
# Whose earlier turns are written otherwise than the last one, as those of Qwen3 (only the last has a block of thoughts), gpt-oss (the last ends otherwise) and
# GLM-4.5 (earlier ones lose their thoughts; each turn has a block of them).
THINKING = PLAIN.replace("{{ m.content +", "{% if m.role == 'assistant' and loop.last %}{{ '[think]\n[/think]\n\n' }}{% endif %}{{ m.content +")
RETURNING = PLAIN.replace("m.content + '<|end|>\n'", "m.content + ('</s>' if loop.last and not add_generation_prompt and m.role == 'assistant' else '<|end|>')")
FORGETFUL = PLAIN.replace(
    "{{ m.content +",
    "{% set parts = m.content.split('</think>') %}{% if m.role == 'assistant' %}{{ parts[0] + '</think>' if loop.last and parts | length > 1 else '<think></think>' }}{% endif %}"
    "{{ '\n' + parts[-1].strip() +",
)
# Cuts earlier answers at their third letter: no mark behind them stays, and what was rendered before is no beginning of the whole.
SHORTENING = PLAIN.replace("m.content +", "(m.content if loop.last or m.role != 'assistant' else m.content[:3]) +")
CHANGING = {"thinking": THINKING, "returning": RETURNING, "forgetful": FORGETFUL}


def with_marks(template):
    """The template with the mark of what the assistant writes, from behind the header on."""
    header = "{{ '<|start|>' + m.role + '\n' }}"
    begin, middle, end = template.partition(header)[0], template.partition(header)[2].partition("{% endfor %}")[0], template.partition("{% endfor %}")[2]
    return f"{begin}{header}{{% if m.role == 'assistant' %}}{{% generation %}}{middle}{{% endgeneration %}}{{% else %}}{middle}{{% endif %}}{{% endfor %}}{end}"


CHATS = [
    [("user", "What is 2 + 2?"), ("assistant", "It is 4.")],
    [("system", "You are brief."), ("user", "héllo 😀"), ("assistant", "bonjour 😀"), ("user", "again\n\n"), ("assistant", "\nencore é€")],
    [("user", "no answer")],
    [("user", "a  b"), ("assistant", "  c "), ("assistant", ""), ("user", "d")],
    [("system", "x"), ("user", "long " * 40), ("assistant", "answer " * 30)],
]


def messages(turns):
    return [{"role": role, "content": content} for role, content in turns]


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    """A folder with a byte-level tokenizer that begins texts with <s>."""
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<s>", "</s>", "<|start|>", "<|end|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
    )
    text = [content for chat in CHATS for _, content in chat] + ["assistant\nuser\nsystem\n the answer is what you long for"] * 9
    model.train_from_iterator(text, trainer)
    model.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    folder = tmp_path_factory.mktemp("model")
    transformers.PreTrainedTokenizerFast(tokenizer_object=model, bos_token="<s>", eos_token="</s>").save_pretrained(folder)
    return folder


def the_library(base, template=None):
    tokenizer = transformers.AutoTokenizer.from_pretrained(base)
    tokenizer.chat_template = template
    return tokenizer


def load_script():
    spec = importlib.util.spec_from_file_location("prepare_rows", ROOT / "bindings/tierflow/prepare_rows.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


class Script:
    """The script in this process: what it sends of the rows of a file."""

    script = load_script()

    def __init__(self, base):
        self.base, self.template = base, None

    def frames(self, path, format="messages", train_on="assistant", skip=False, tokenizer=True):
        job = {"folder": str(self.base) if tokenizer else None, "template": self.template, "train_on": train_on, "field": "text", "skip": skip,
               "files": [{"path": str(path), "format": format}]}
        sent = io.BytesIO()
        try:
            self.script.prepare(job, sent)
        except self.script.Refusal as refusal:
            self.script.send_json(sent, "F", {"where": refusal.args[0], "why": refusal.args[1]})
        data, at = sent.getvalue(), 0
        while at < len(data):
            kind, size = struct.unpack_from("<BI", data, at)
            yield chr(kind), data[at + 5 : at + 5 + size]
            at += 5 + size

    def rows(self, path, **options):
        """Each row's ids and which of them are trained on, those that have any."""
        found, self.skipped = [], []
        for kind, payload in self.frames(path, **options):
            if kind == "R":
                _, count = struct.unpack_from("<QI", payload)
                words = struct.unpack_from(f"<{(len(payload) - 12) // 4}I", payload, 12)
                at = count
                for length in words[:count]:
                    found.append(([word & 0x7FFFFFFF for word in words[at : at + length]], [word >> 31 for word in words[at : at + length]]))
                    at += length
            elif kind == "S":
                self.skipped.append(json.loads(payload))
            elif kind == "E":
                self.end = json.loads(payload)
            else:
                raise AssertionError(payload)
        return [row for row in found if any(row[1][1:])]

    def refusal(self, path, **options):
        *_, (kind, payload) = self.frames(path, **options)
        assert kind == "F"
        failure = json.loads(payload)
        return f"{failure['where']} {failure['why']}"


class Probe:
    """The C++ side: sequences in the order of an epoch."""

    def __init__(self, base, folder):
        self.base, self.folder, self.template = base, folder, None
        self.cache = folder / "rows"

    def run(self, path, ok=True, **options):
        probe = BUILD / "core_probe"
        if not probe.exists():
            pytest.skip(f"{probe} is not built")
        if self.template is not None:
            (self.folder / "template.jinja").write_text(self.template, encoding="utf-8")
            options["chat_template"] = str(self.folder / "template.jinja")
        paths = [str(p) for p in (path if isinstance(path, list) else [path])]
        options = {"paths": paths, "python": sys.executable, "row_cache": str(self.cache), "cache": str(self.folder / "cache"),
                   "sequence_length": 512, "packing": "none", "tokenizer": str(self.base / "tokenizer.json"), **options}
        done = subprocess.run([probe, "sequences", json.dumps(options)], capture_output=True, text=True, timeout=120)
        assert not ok or done.returncode == 0, done.stderr
        return done

    def sequences(self, path, **options):
        return [json.loads(line) for line in self.run(path, **options).stdout.splitlines()]


def read_row_file(path):
    """By its description: each row's ids and marks, and the notes."""
    data = path.read_bytes()
    magic, version, _, count, tokens, _, _, notes, _ = struct.unpack_from("<8sIIQQQQQQ", data)
    assert (magic, version, len(data)) == (b"TFDROWS\n", 1, 64 + 4 * (count + tokens) + notes)
    words = struct.unpack_from(f"<{count + tokens}I", data, 64)
    found, at = [], 0
    while at < len(words):
        row = words[at + 1 : at + 1 + words[at]]
        found.append(([word & 0x7FFFFFFF for word in row], [word >> 31 for word in row]))
        at += 1 + words[at]
    assert len(found) == count
    return found, json.loads(data[len(data) - notes :])
