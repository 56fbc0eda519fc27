"""Rows of conversations, prompts and completions become the tokens and labels that transformers makes of them."""

import importlib
import json
import sys

import pytest

from rows import CHANGING, CHATS, MARKED, PLAIN, SHORTENING, Probe, Script, base, messages, read_row_file, the_library, tokenizers, with_marks, write_rows  # noqa: F401


@pytest.fixture
def script(base):  # noqa: F811
    return Script(base)


@pytest.fixture
def probe(base, tmp_path):  # noqa: F811
    return Probe(base, tmp_path)


def test_conversations_are_rendered_and_masked_as_by_transformers(base, script, tmp_path):
    path = write_rows(tmp_path / "a.jsonl", [{"messages": messages(chat)} for chat in CHATS])
    script.template = MARKED
    tokenizer = the_library(base, MARKED)
    expected = []
    for chat in CHATS:
        out = tokenizer.apply_chat_template(messages(chat), return_dict=True, return_assistant_tokens_mask=True)
        if any(out["assistant_masks"]):
            expected.append((out["input_ids"], out["assistant_masks"]))
    assert len(expected) == 4
    assert script.rows(path) == expected
    assert script.end["masks"] == ["generation"]
    # Without the mark, by what each turn adds: the same tokens.
    script.template = PLAIN
    assert script.rows(path) == expected
    assert script.end["masks"] == ["contents"]
    # All of them.
    everything = script.rows(path, train_on="all")
    assert [ids for ids, _ in everything] == [tokenizer.apply_chat_template(messages(chat))["input_ids"] for chat in CHATS]
    assert all(all(trained) for _, trained in everything)


def test_beginnings_are_rendered_as_transformers_renders_them(script, tmp_path, monkeypatch):
    """In the quick way, in the library's own, and with a mark: with names of thoughts that transformers knows, fields with names that dicts have methods of, and
    variables of the row's own."""
    thoughts = "{% if m.reasoning_content is defined %}{{ '<' + m.reasoning_content + eos_token + '>' }}{% endif %}{{ style | default('') }}"
    thinks = PLAIN.replace("{{ m.content", "{{ 'a method' if m.items is callable else m.items }}" + thoughts + "{{ m.content")
    rows = [{"messages": messages(chat)} for chat in CHATS]
    for row, name in zip(rows, ("thinking", "reasoning", "reasoning_content")):
        for message in row["messages"]:
            message[name] = message["role"] + "s think"
    rows[-1]["messages"][-1]["items"] = "a field"
    rows += [{**rows[0], "chat_template_kwargs": {"style": " styled"}}, {**rows[1], "tools": [{"type": "function"}]}]
    path = write_rows(tmp_path / "a.jsonl", rows)
    script.template = thinks
    quick = script.rows(path)
    assert len(quick) == 6 and quick[-2] != quick[0] and len(quick[0][0]) > len("user thinks")
    made = script.script.ChatTemplate.__init__

    def of_another_version(self, *arguments):
        made(self, *arguments)
        self.compile = None

    monkeypatch.setattr(script.script.ChatTemplate, "__init__", of_another_version)
    assert script.rows(path) == quick and script.end["masks"] == ["contents"]
    script.template = thinks.replace("{{ m.content + '<|end|>\n' }}", "{% if m.role == 'assistant' %}{% generation %}{{ m.content + '<|end|>\n' }}{% endgeneration %}"
                                     "{% else %}{{ m.content + '<|end|>\n' }}{% endif %}")  # fmt: skip
    assert [ids for ids, _ in script.rows(path)] == [ids for ids, _ in quick] and script.end["masks"] == ["generation"]


def test_a_version_of_transformers_that_does_more_to_messages_is_followed(script, tmp_path, monkeypatch):
    chats = [CHATS[0], CHATS[1], CHATS[4]]
    louder = [[(role, content.upper()) for role, content in chat] for chat in chats]
    path, expected = (write_rows(tmp_path / f"{at}.jsonl", [{"messages": messages(chat)} for chat in some]) for at, some in enumerate((chats, louder)))
    library = importlib.import_module("transformers.utils.chat_template_utils")
    render = library.render_jinja_template

    def loud(conversations, **options):
        return render(conversations=[[{**message, "content": message["content"].upper()} for message in chat] for chat in conversations], **options)

    for script.template in PLAIN, MARKED:
        rows = script.rows(expected)
        with monkeypatch.context() as newer:
            newer.setattr(library, "render_jinja_template", loud)
            assert script.rows(path) == rows != script.rows(expected, train_on="all")


SPOKEN = "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
GLUED = "{% for m in messages %}{{ m.role + ' ' + m.content }}{% endfor %}{% if add_generation_prompt %}assistant {% endif %}"


def marked(template):
    return template.replace("m.content", "'' }}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}{{ ''")


ACCENTED = GLUED.replace("' '", "'e'").replace("assistant {", "assistante{")  # with an accent that an answer begins with it is another letter
EDGES = {"named": PLAIN, "spoken": SPOKEN, "glued": GLUED, "accented": ACCENTED}


@pytest.mark.parametrize("template", [*EDGES.values(), *map(marked, EDGES.values())], ids=[*EDGES, *(f"{name}-marked" for name in EDGES)])
@pytest.mark.parametrize("normalizer", [None, "NFC"])
def test_edges_are_the_same_by_names_and_by_characters(template, normalizer, script, tmp_path, monkeypatch):
    odd = ["<|end|>", "<|start|>assistant\n", "</s><s>", " <|end|> x", "é€😀", "\n\n", "  a", "answer", "<|end|><|end|>", "<|sta", "rt|>", "", " ", "e", "\u0301e\u0301"]  # the last goes together with what is before it
    chats = [*CHATS, *([("user", a), ("assistant", b), ("user", "q" + b), ("assistant", a + b)] for a in odd for b in odd)]
    path = write_rows(tmp_path / "a.jsonl", [{"messages": messages(chat)} for chat in chats])
    script.template = template
    preparer, again, load = script.script.Preparer, [], script.script.load_tokenizer

    def loaded(folder):
        tokenizer = load(folder)
        tokenizer.backend_tokenizer.normalizer = normalizer and getattr(tokenizers.normalizers, normalizer)()
        return tokenizer

    monkeypatch.setattr(script.script, "load_tokenizer", loaded)
    edges = preparer.edges

    def counted(self, task, encoding, ids):
        before = self.encoded_again
        try:
            return edges(self, task, encoding, ids)
        finally:
            again.append(self.encoded_again > before)

    monkeypatch.setattr(preparer, "edges", counted)
    rows = script.rows(path, skip=True)
    skipped, encoded_again = script.skipped, sum(again)
    monkeypatch.setattr(script.script.NamedTokens, "of", lambda tokenizer: None)
    assert script.rows(path, skip=True) == rows and script.skipped == skipped
    assert len(rows) > 20 and (len(skipped) > 20) == ("{% generation" not in template) and 20 < encoded_again < 0.9 * len(chats)


def test_where_most_texts_are_tokenised_twice_they_are_so_no_more(script, tmp_path, monkeypatch):
    script.template = marked(GLUED)
    path = write_rows(tmp_path / "a.jsonl", [{"messages": messages([("user", "q"), ("assistant", "answer")])}] * 1100)
    encode, asked = script.script.Preparer.edges, []
    monkeypatch.setattr(script.script.Preparer, "edges", lambda self, task, encoding, ids: asked.append(encoding is None) or encode(self, task, encoding, ids))
    assert len(script.rows(path)) == 1100 and asked == [True] * 512 + [False] * 588


def test_tokenizers_whose_tokens_stand_for_no_certain_bytes_are_known(base, script):
    named, pre = script.script.NamedTokens, tokenizers.pre_tokenizers
    assert named({"<a>": 7, "<a>b": 8}).tokens_at("<a>bc<a>", [8, 5, 7], [4], lambda piece: [8]) == [1]  # the longest
    # A cut within a token that begins with another one.
    assert named({"<a>": 7, "<a>b": 8}).tokens_at("x<a>b y <a> z", [1, 8, 2, 7, 3], [1, 4], lambda piece: {"x": [1], "x<a>": [1, 7]}[piece]) is None
    assert named.of(the_library(base)).ids == {"<s>": 0, "</s>": 1, "<|start|>": 2, "<|end|>": 3}

    def changed(change):
        tokenizer = the_library(base)
        change(tokenizer.backend_tokenizer)
        return named.of(tokenizer)

    assert changed(lambda backend: setattr(backend, "normalizer", tokenizers.normalizers.NFC())) is not None
    assert changed(lambda backend: setattr(backend, "normalizer", tokenizers.normalizers.NFKC())) is None
    assert changed(lambda backend: setattr(backend, "pre_tokenizer", pre.Whitespace())) is None
    assert changed(lambda backend: setattr(backend, "model", tokenizers.models.Unigram())) is None
    assert changed(lambda backend: setattr(backend, "model", tokenizers.models.BPE({"a": 0}, []))) is None  # not every byte
    assert changed(lambda backend: backend.add_tokens([tokenizers.AddedToken("new", lstrip=True, normalized=False)])) is None
    assert changed(lambda backend: backend.add_tokens([tokenizers.AddedToken("new", normalized=False)])) is not None
    split = pre.Sequence([pre.Split(tokenizers.Regex(" "), "isolated"), pre.ByteLevel(add_prefix_space=False, use_regex=False)])
    assert changed(lambda backend: setattr(backend, "pre_tokenizer", split)) is not None


def test_a_mark_inside_a_token_takes_all_of_it(base, script, tmp_path):
    template = "{% for m in messages %}{{ m.role + ' an' }}{% generation %}{{ 'sw' + m.content + ' an' }}{% endgeneration %}{{ 'swer' }}{% endfor %}"
    tokenizer = the_library(base, template)
    out = tokenizer.apply_chat_template(messages([("assistant", "er x")]), return_dict=True, return_assistant_tokens_mask=True)
    begins, ends = (tokenizer(text)["input_ids"][-1] for text in ("an answer", "x answer"))
    assert begins in out["input_ids"] and ends in out["input_ids"]  # "answer" is one token
    script.template = template
    path = write_rows(tmp_path / "a.jsonl", [{"messages": messages([("assistant", "er x")])}])
    assert script.rows(path) == [(out["input_ids"], out["assistant_masks"])]


TALKS = [
    *CHATS,
    [("user", "q"), ("assistant", "<think>x</think>a"), ("user", "r"), ("assistant", "<think>y</think>\n\nb")],
    [("system", "s"), ("user", "q <|end|>\n<|start|>assistant\n"), ("assistant", "<|start|>assistant\na\n\n"), ("user", "\n q"), ("assistant", " b\n"), ("user", ""), ("assistant", "")],
]


@pytest.mark.parametrize("shape", CHANGING)
def test_turns_that_others_change_are_found(shape, base, script, tmp_path):
    """What a template with the mark gives, of the same rows."""
    path = write_rows(tmp_path / "a.jsonl", [{"messages": messages(chat)} for chat in TALKS])
    marked = with_marks(CHANGING[shape])
    tokenizer, expected = the_library(base, marked), []
    for chat in TALKS:
        out = tokenizer.apply_chat_template(messages(chat), return_dict=True, return_assistant_tokens_mask=True)
        expected += [(out["input_ids"], out["assistant_masks"])] if any(out["assistant_masks"]) else []
    assert len(expected) == len(TALKS) - 1
    script.template = marked
    assert script.rows(path) == expected and script.end["masks"] == ["generation"]
    script.template = CHANGING[shape]
    assert script.rows(path) == expected and script.end["masks"] == ["contents"]


@pytest.mark.parametrize("template", ["named", "spoken", "glued", "accented"])
def test_turns_are_the_same_by_contents_and_by_prefixes(template, script, tmp_path, monkeypatch):
    odd = ["<|end|>", "assistant: ", "user", "\n\n", "  a", "a \n", "", " ", "\ue0f01\ue0f1", "{}"]
    chats = [*TALKS, *([("user", a), ("assistant", b), ("user", "q" + b), ("assistant", a + b), ("user", b)] for a in odd for b in odd)]
    path = write_rows(tmp_path / "a.jsonl", [{"messages": messages(chat)} for chat in chats])
    script.template = EDGES[template]
    rows = script.rows(path, skip=True)
    skipped = script.skipped
    assert script.end["masks"] == ["contents", "prefixes"]  # these of the rows that have the mark of our own
    monkeypatch.setattr(script.script.TurnFinder, "spans", lambda self, conversations, *_: [None] * len(conversations))
    assert script.rows(path, skip=True) == rows and script.skipped == skipped
    assert script.end["masks"] == ["prefixes"] and len(rows) + len(skipped) > 0.9 * len(chats)


def test_one_more_rendering_a_row_finds_its_turns(script, tmp_path, monkeypatch):
    rendered = []
    quickly = script.script.ChatTemplate.quickly
    monkeypatch.setattr(script.script.ChatTemplate, "quickly", lambda self, source, conversations, asks: rendered.append(sum(len(counts) for _, counts in conversations)) or quickly(self, source, conversations, asks))
    path = write_rows(tmp_path / "a.jsonl", [{"messages": messages(CHATS[1])}] * 40)
    script.template = CHANGING["thinking"]
    assert len(script.rows(path)) == 40
    assert sum(rendered) == 2 * 40 + 3  # and once what the template writes around an answer


def test_calls_of_tools_are_found(script, tmp_path):
    """Where the assistant only calls a tool, or says something before; and where what is called looks like the end of the turn, the turn is not guessed."""
    script.template = PLAIN.replace("{{ m.content + '<|end|>\n' }}", "{% if m.role == 'assistant' and loop.last %}[think]{% endif %}{{ m.content or '' }}{% if m.tool_calls %}"
                                    "{% if m.content %}{{ '\n' }}{% endif %}{{ '<call>' + m.tool_calls[0].function.name + m.tool_calls[0].function.arguments + '</call>' }}{% endif %}{{ '<|end|>\n' }}")  # fmt: skip

    def row(content, arguments):
        call = {"type": "function", "function": {"name": "look", "arguments": arguments}}
        return {"messages": [*messages([("user", "q")]), {"role": "assistant", "content": content, "tool_calls": [call]}, *messages([("tool", "t"), ("assistant", "a")])]}

    rows = script.rows(write_rows(tmp_path / "a.jsonl", [row("", "{}"), row("so", "{}"), row("", "<|end|>\n"), row(None, "{}")]), skip=True)
    assert ["a.jsonl:3" in bad["where"] and "message 1" in bad["why"] for bad in script.skipped] == [True]
    tokenizer = script.script.load_tokenizer(str(script.base))
    trained = [tokenizer.decode([id for id, counts in zip(*row) if counts]) for row in rows]
    assert trained == [f"{said}<call>look{{}}</call><|end|>\n[think]a<|end|>\n" for said in ("", "so\n", "")]


def test_a_template_that_shortens_is_refused_where_it_does(base, script, tmp_path):
    fine = {"messages": messages([("user", "q"), ("assistant", "what you long for")])}
    bad = {"messages": messages([("user", "q"), ("assistant", "what you long for"), ("user", "r"), ("assistant", "b")])}
    path = write_rows(tmp_path / "a.jsonl", [fine, bad, fine])
    script.template = SHORTENING
    tokenizer = the_library(base, script.template)
    first, whole = (tokenizer.apply_chat_template(bad["messages"][:n])["input_ids"] for n in (2, 4))
    place = next(i for i, (a, b) in enumerate(zip(first, whole)) if a != b)
    line = script.refusal(path)
    assert f"{path}:2" in line and "message 1" in line and f"token {place} " in line and "{% generation %}" in line
    assert len(script.rows(path, skip=True)) == 2
    assert [bad["where"] for bad in script.skipped] == [f"{path}:2"]


def test_a_token_that_spans_the_turns_edge_is_refused(base, script, tmp_path):
    script.template = "{% for m in messages %}{{ m.role + ' ' + m.content }}{% endfor %}{% if add_generation_prompt %}assistant an{% endif %}"
    path = write_rows(tmp_path / "a.jsonl", [{"messages": messages([("user", "q "), ("assistant", "answer")])}])
    assert f"{path}:1" in script.refusal(path)


FORMATS = {
    "messages": {"messages": messages(CHATS[1])},
    "conversations": {"conversations": messages(CHATS[1])},
    "sharegpt": {"conversations": [{"from": "human", "value": "héllo 😀"}, {"from": "gpt", "value": "bonjour 😀"},
                                   {"from": "human", "value": "again\n\n"}, {"from": "gpt", "value": "\nencore é€"}], "system": "You are brief."},
    "alpaca": {"instruction": "again\n", "input": "", "output": "\nencore é€", "system": "You are brief.", "history": [["héllo 😀", "bonjour 😀"]]},
    "parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": "What is "}, {"type": "text", "text": "2 + 2?"}]},
                           {"role": "assistant", "content": "It is 4.", "tool_calls": None}]},
}


def test_every_format_comes_to_the_same_conversation(script, tmp_path):
    script.template = MARKED
    both = script.rows(write_rows(tmp_path / "a.jsonl", [FORMATS["messages"]]))
    for name in ("conversations", "sharegpt"):
        assert script.rows(write_rows(tmp_path / "b.jsonl", [FORMATS[name]]), format="sharegpt") == both, name
    alpaca = [*CHATS[1]]
    alpaca[3] = ("user", "again\n")
    assert script.rows(write_rows(tmp_path / "b.jsonl", [FORMATS["alpaca"]]), format="alpaca") == script.rows(
        write_rows(tmp_path / "a.jsonl", [{"messages": messages(alpaca)}]))
    question = write_rows(tmp_path / "b.jsonl", [{"instruction": "a", "input": "b", "output": "c"}])
    assert script.rows(question, format="alpaca") == script.rows(write_rows(tmp_path / "a.jsonl", [{"messages": messages([("user", "a\nb"), ("assistant", "c")])}]))
    assert script.rows(write_rows(tmp_path / "b.jsonl", [FORMATS["parts"]])) == script.rows(
        write_rows(tmp_path / "a.jsonl", [{"messages": messages(CHATS[0])}]))


def test_token_ids_are_taken_as_they_are(script, tmp_path):
    rows = [{"input_ids": [5, 6, 7]}, {"input_ids": [5, 6, 7, 8], "labels": [-100, -100, 7, 8], "attention_mask": [0, 1, 1, 1]}]
    path = write_rows(tmp_path / "a.jsonl", rows)
    assert script.rows(path, format="tokens", tokenizer=False) == [([5, 6, 7], [1, 1, 1]), ([6, 7, 8], [0, 1, 1])]
    for row, words in [({"input_ids": [5, "x"]}, "whole numbers"), ({"input_ids": [1, 2], "labels": [1]}, "as long as input_ids, 2"),
                       ({"input_ids": [1, 2], "labels": [2, 3]}, "label 2 where input_ids has 1"), ({"input_ids": [-1, 2]}, "below 0")]:
        path = write_rows(tmp_path / "b.jsonl", [{"input_ids": [1, 2]}, row])
        line = script.refusal(path, format="tokens", tokenizer=False)
        assert f"{path}:2" in line and words in line


BAD = [
    ({"messages": [{"role": "bot", "content": "x"}]}, "roles are system, developer, user, assistant, tool"),
    ({"messages": [{"role": "user"}]}, "no content"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "no text"),
    ({"messages": []}, "no message"),
    ({"messages": "hello"}, "no message"),
    ({"messages": [7]}, "no object"),
    ({"conversations": [{"from": "bot", "value": "x"}]}, "no message"),  # in a file of messages
    ({"messages": [{"from": "bot", "value": "x"}]}, "known are system, human"),
    ({"messages": messages([("assistant", "x")])}, "begins with the assistant"),
    ({"messages": messages(CHATS[0]), "tools": "{"}, '"tools" that are no JSON'),
    ("{", "no JSON"),
    ("[1]", "no JSON object"),
]


@pytest.mark.parametrize("row, words", BAD, ids=[words for _, words in BAD])
def test_a_bad_row_names_file_and_line(script, tmp_path, row, words):
    path = tmp_path / "a.jsonl"
    good = json.dumps({"messages": messages(CHATS[0])})
    path.write_text(good + "\n\n" + (row if isinstance(row, str) else json.dumps(row)) + "\n" + good)
    script.template = PLAIN
    line = script.refusal(path)
    assert f"{path}:3" in line and words in line
    assert len(script.rows(path, skip=True)) == 2


def test_what_lacks_a_tokenizer_or_a_template_says_so(base, script, tmp_path):
    path = write_rows(tmp_path / "a.jsonl", [{"messages": messages(CHATS[0])}])
    for train_on in "assistant", "all":
        line = script.refusal(path, train_on=train_on)
        assert "has a tokenizer without a chat template: name one with --chat-template" in line and f"{path}:1" not in line
    assert "--tokenizer" in script.refusal(path, tokenizer=False)
    script.template = "{% for %}"
    assert "place of its own is no template" in script.refusal(path)
    script.template = "{{ raise_exception('roles must alternate') }}"
    line = script.refusal(path)
    assert f"{path}:1" in line and "roles must alternate" in line


def test_the_program_keeps_what_it_prepared(probe, tmp_path):
    path = write_rows(tmp_path / "a.jsonl", [{"messages": messages(chat)} for chat in CHATS])
    script = Script(probe.base)
    script.template = probe.template = PLAIN
    expected = script.rows(path)

    def files(**options):
        probe.run(path, **options)
        assert {file.suffix for file in probe.cache.iterdir()} == {".tfd"}
        return {file: file.stat().st_mtime_ns for file in probe.cache.iterdir()}

    first = files()
    (file,) = first
    rows, notes = read_row_file(file)
    assert rows == expected
    assert notes == {"files": [{"path": str(path), "format": "messages"}], "train_on": "assistant", "masks": ["contents"], "untrained": 1,
                     "skipped": 0, "first_skipped": "", "merged": 0}
    # What does not change rows finds them, without Python.
    assert files(python="/nonexistent", sequence_length=64, seed=5, packing="concat", skip=False) == first
    assert len(files(train_on="all")) == 2
    path.write_text(path.read_text() + json.dumps({"messages": messages(CHATS[0])}))
    assert len(files()) == 3
    path.write_text(path.read_text()[: -len(json.dumps({"messages": messages(CHATS[0])}))])
    assert len(files(python="/nonexistent")) == 3
    # A damaged header: prepared again. Damaged rows: refused.
    data = file.read_bytes()
    file.write_bytes(data[:20] + b"\xff" + data[21:])
    files()
    assert file.read_bytes() == data
    file.write_bytes(data[:70] + b"\xff" + data[71:])
    done = probe.run(path, ok=False)
    assert done.returncode == 6 and str(file) in done.stderr and "damaged" in done.stderr


def test_rows_are_prepared_without_loading_torch(probe, tmp_path):
    """With it transformers takes three times as long to load."""
    loaded = tmp_path / "loaded"
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -X importtime "$@" 2> {loaded}\n')
    python.chmod(0o755)
    probe.template = PLAIN
    probe.run(write_rows(tmp_path / "a.jsonl", [{"messages": messages(chat)} for chat in CHATS]), python=str(python))
    said = loaded.read_text().splitlines()
    names = {line.rsplit("|", 1)[1].strip() for line in said if line.startswith("import time:")}
    assert "transformers" in names and not {"torch", "torch._C", "torch.nn"} & names
    assert all(line.startswith("import time:") for line in said), "nothing is said of it"


def test_without_a_folder_rows_are_kept_where_the_program_keeps_them(probe, tmp_path, monkeypatch):
    probe.template = PLAIN
    path = write_rows(tmp_path / "a.jsonl", [{"messages": messages(CHATS[0])}])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "kept"))
    assert len(probe.sequences(path, row_cache="")) == 1
    assert [file.suffix for file in (tmp_path / "kept" / "tierflow" / "data").iterdir()] == [".tfd"]
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME")
    line = probe.run(path, ok=False, row_cache="").stderr
    assert "there is no folder to keep prepared data in, as neither XDG_CACHE_HOME nor HOME names one" in line


def test_the_first_row_tells_the_format(probe, tmp_path):
    probe.template = MARKED
    rows = [FORMATS["messages"], FORMATS["sharegpt"], {"instruction": "a", "output": "b"}, {"prompt": "a", "completion": "b"},
            {"input_ids": [5, 6]}, {"text": "a b", "messages": []}]
    formats = ["messages", "sharegpt", "alpaca", "prompt-completion", "tokens", "text"]
    paths = [write_rows(tmp_path / f"{at}.jsonl", [row]) for at, row in enumerate(rows)]
    probe.run(paths)
    (file,) = probe.cache.iterdir()
    assert [made_of["format"] for made_of in read_row_file(file)[1]["files"]] == formats


def test_one_line_tells_what_is_wrong(probe, tmp_path):
    probe.template = PLAIN
    path = write_rows(tmp_path / "a.jsonl", [FORMATS["messages"], {"messages": [{"role": "bot", "content": "x"}]}])
    done = probe.run(path, ok=False)
    assert (done.returncode, len(done.stderr.splitlines())) == (3, 1)
    assert f"{path}:2" in done.stderr and "assistant" in done.stderr
    assert len(probe.sequences(path, skip=True)) == 1
    done = probe.run(write_rows(tmp_path / "b.jsonl", [{"question": "x", "answer": "y"}]), ok=False, packing="auto")
    assert done.returncode == 3 and "no row of a known format" in done.stderr and "messages" in done.stderr
    (tmp_path / "c.txt").write_text("text")
    assert "--data-weights" in probe.run([path, tmp_path / "c.txt"], ok=False, packing="auto").stderr
    done = probe.run(path, ok=False, python="/nonexistent")
    assert done.returncode == 4 and "transformers" in done.stderr
