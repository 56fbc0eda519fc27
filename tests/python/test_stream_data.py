"""tierflow.data: prepared rows in Python are the program's sequences, as transformers' models take them."""

import copy
import json
import pickle
import subprocess
import sys

import pytest
from rows import CHATS, PLAIN, Probe, base, messages, the_library, write_rows  # noqa: F401
from streaming import BUILD, roomy, tierflow, torch, transformers
from test_models import CONFIGS, OPT, SMALL, randomised
from test_stream_durable import scheduled
from tierflow.isolation import watch

LENGTH, VOCAB = 64, 400


@pytest.fixture(scope="module")
def prepared(base, tmp_path_factory):  # noqa: F811
    folder = tmp_path_factory.mktemp("prepared")
    tokenizer = the_library(base, PLAIN)
    transformers.LlamaConfig(vocab_size=VOCAB).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    chats = [chat for chat in CHATS if chat is not CHATS[2]] * 3
    for name, some in ("chats", chats), ("others", chats[1:]):
        rows = write_rows(folder / f"{name}.jsonl", [{"messages": messages(chat)} for chat in some])
        out = folder / "rows.tfd" if name == "chats" else folder / "other" / "rows.tfd"
        out.parent.mkdir(exist_ok=True)
        subprocess.run([BUILD / "tierflow", "data", "prepare", "--model", folder / "model", "--data", rows, "--out", out, "--python", sys.executable,
                        "--data-cache", folder / "cache"], check=True, capture_output=True)  # fmt: skip
    return folder / "rows.tfd"


def rows_of(prepared, **more):
    return tierflow.data.Rows(prepared, vocab_size=VOCAB, sequence_length=LENGTH, **more)


@pytest.mark.parametrize("packing", ["bfd", "none", "concat"])
def test_rows_are_the_programs(prepared, base, tmp_path, packing):  # noqa: F811
    expected = Probe(base, tmp_path).sequences(prepared, sequence_length=LENGTH, packing=packing, seed=5, held_out=0)
    rows = rows_of(prepared, packing=packing, seed=5)
    assert len(rows) == len(expected) > 2
    for row, (ids, labels, positions) in zip(rows, expected, strict=True):
        assert row["input_ids"].tolist() == ids
        assert row["labels"].tolist() == [-100, *labels[:-1]]
        assert row["position_ids"].tolist() == positions if packing == "bfd" else "position_ids" not in row
    # Of a folder, and beside rows that are held out, in batches.
    assert len(rows_of(prepared.parent)) > 0
    split = rows_of(prepared, packing=packing, held_out=0.5)
    assert 0 < len(split.held_out()) < len(rows) and len(split) + len(split.held_out()) == len(rows)
    seen = sorted(row["input_ids"].tolist() for part in (split, split.held_out()) for row in part)
    assert seen == sorted(row["input_ids"].tolist() for row in rows)
    batch = next(iter(torch.utils.data.DataLoader(rows, 2)))
    assert all(value.shape == (2, LENGTH) and value.dtype == torch.int64 for value in batch.values())


def test_packed_rows_do_not_see_each_other(prepared):
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=LENGTH))

    def documents(row):
        starts = [*torch.nonzero(row["position_ids"] == 0).flatten().tolist(), LENGTH]
        return starts, sum((row["labels"][begin + 1 : end] >= 0).any().item() for begin, end in zip(starts, starts[1:]))

    packed = next(row for row in rows_of(prepared) if documents(row)[1] > 1)  # the last of these zeros may be padding
    starts, _ = documents(packed)
    sums = counted = 0
    with torch.no_grad():
        together = model(**{name: value[None] for name, value in packed.items()}, use_cache=False).loss
        for begin, end in zip(starts, starts[1:]):
            labels = packed["labels"][begin:end]
            count = (labels[1:] >= 0).sum().item()
            if count:
                sums += model(input_ids=packed["input_ids"][None, begin:end], labels=labels[None]).loss * count
            counted += count
    assert counted == (packed["labels"] >= 0).sum() and together == pytest.approx((sums / counted).item(), rel=1e-5)


def together(config):
    """Two documents in a sequence, and how far the logits of the second are from those it has alone."""
    torch.manual_seed(1)
    model = randomised(config).eval()
    documents = torch.randint(3, 160, (2, 9))
    packed = {"input_ids": documents.reshape(1, -1), "position_ids": torch.arange(9).repeat(2)[None], "use_cache": False}
    with torch.no_grad():
        apart = (model(**packed).logits[0, 9:] - model(input_ids=documents[1:], use_cache=False).logits[0]).abs().max()
    return model, packed, apart


RECURRENT = {"mamba": lambda: transformers.MambaConfig(vocab_size=160, hidden_size=32, num_hidden_layers=2, state_size=4, pad_token_id=None),
             "lfm2": lambda: transformers.Lfm2Config(**SMALL, layer_types=["conv", "full_attention", "conv"])}  # fmt: skip


@pytest.mark.parametrize("family", [name for name in CONFIGS if not name.endswith(("_all", "_tied", "_untied"))] + list(RECURRENT))
def test_families_that_do_not_keep_documents_apart_are_known(family):
    model, packed, apart = together({**CONFIGS, **RECURRENT}[family]())
    watch(model)
    if apart < 1e-4 or family.startswith("llama4"):  # which counts its chunks from the row's begin; documents do not see each other
        model(**packed)
    else:
        assert family.partition("_")[0] in ("opt", "gpt", "mamba", "lfm2") and family != "gpt2"
        with pytest.raises(tierflow.UsageError, match='give it one a sequence, tierflow.data.Rows\\(packing="none"\\)'):
            model(**packed)
        model(**packed | {"position_ids": torch.arange(18)[None]})  # one document


def test_streamed_models_refuse_what_would_cross(prepared):
    row = next(row for row in rows_of(prepared) if (row["position_ids"] == 0).sum() > 1)
    row = {name: value[None] for name, value in row.items()}
    for config, ones in (transformers.OPTConfig(**OPT | {"vocab_size": VOCAB}), {}), (transformers.LlamaConfig(**SMALL | {"vocab_size": VOCAB}), {"attention_mask": torch.ones_like(row["input_ids"])}):
        model = tierflow.wrap(transformers.AutoModelForCausalLM.from_config(config).bfloat16(), roomy(trainable=False))
        with pytest.raises(tierflow.UsageError, match="put several documents into a sequence, and (OPT|Llama)DecoderLayer of transformers lets them see each other"):
            model(**row, **ones)
        loss = model(**{name: value[None] for name, value in rows_of(prepared, packing="none")[0].items()}, **ones).loss
        assert torch.isfinite(loss)
        tierflow.close(model)
    # Padded rows have such positions, and a mask.
    model = tierflow.wrap(transformers.LlamaForCausalLM(config).bfloat16(), roomy(trainable=False))
    mask = torch.tensor([[0, 0, 1, 1, 1, 1]])
    model(input_ids=mask + 5, attention_mask=mask, position_ids=torch.tensor([[1, 1, 0, 1, 2, 3]]))
    model(**row)
    tierflow.close(model)


def test_an_epoch_has_the_sequences_that_the_one_before_left_of_a_mixture(prepared, tmp_path):
    small = tmp_path / "small.tfd"
    (tmp_path / "small.jsonl").write_text("".join((prepared.parent / "chats.jsonl").read_text().splitlines(True)[:1]))
    subprocess.run([BUILD / "tierflow", "data", "prepare", "--model", prepared.parent / "model", "--data", tmp_path / "small.jsonl", "--out", small,
                    "--python", sys.executable, "--data-cache", tmp_path / "cache"], check=True, capture_output=True)  # fmt: skip
    mixed = rows_of([small, prepared], weights=[1, 1], packing="none")
    every = rows_of(prepared, packing="none")
    alone, seen = {tuple(row["input_ids"].tolist()) for row in every}, set()
    for epoch in range(len(every) + 1):
        mixed.set_epoch(epoch)
        seen |= {tuple(row["input_ids"].tolist()) for row in mixed}
    mixed.set_epoch(0)
    assert not alone <= {tuple(row["input_ids"].tolist()) for row in mixed} and alone <= seen
    with pytest.raises(tierflow.UsageError, match="counted from 0"):
        mixed.set_epoch(-1)


def equal_rows(one, other):
    pairs = zip(one, other, strict=True)
    return all(a.keys() == b.keys() and all(torch.equal(value, b[name]) for name, value in a.items()) for a, b in pairs)


def test_workers_that_are_no_forks_open_the_rows_again(prepared, tmp_path, monkeypatch):
    file = tmp_path / "own.tfd"
    file.write_bytes(prepared.read_bytes())
    monkeypatch.chdir(tmp_path)
    rows = rows_of("own.tfd", held_out=0.3, packing="none", seed=3)
    rows.set_epoch(2)
    monkeypatch.chdir("/")  # a worker may be elsewhere
    for each in rows, rows.held_out():
        again = pickle.loads(pickle.dumps(each))
        assert equal_rows(again, each) and again.fingerprint == each.fingerprint
        assert equal_rows(copy.deepcopy(each), each)
    loaded = list(torch.utils.data.DataLoader(rows, None, num_workers=1, multiprocessing_context="spawn"))
    assert len(loaded) > 2 and equal_rows(loaded, rows)
    sent = pickle.dumps(rows)
    file.write_bytes((prepared.parent / "other" / "rows.tfd").read_bytes())
    with pytest.raises(tierflow.InputError, match="own.tfd: the rows there are others than those that were opened"):
        pickle.loads(sent)


def program(*arguments):
    return subprocess.run([BUILD / "tierflow", *map(str, arguments)], check=True, capture_output=True, text=True).stdout


def test_rows_are_prepared_as_by_the_program(prepared, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "kept"))
    model, chats = prepared.parent / "model", prepared.parent / "chats.jsonl"
    heard = []
    rows = tierflow.data.prepare(model, chats, tmp_path / "rows.tfd", sequence_length=LENGTH, progress=lambda *told: heard.append(told))
    assert (tmp_path / "rows.tfd").read_bytes() == prepared.read_bytes()
    assert {phase for phase, _, _ in heard} == {"reading data", "preparing data"} and all(done <= total for _, done, total in heard)
    assert equal_rows(rows, rows_of(prepared)) and rows.fingerprint == rows_of(prepared).fingerprint
    # Without a file of its own it is the cache's, which is where the program's is.
    assert equal_rows(tierflow.data.prepare(str(model), [str(chats)], sequence_length=LENGTH), rows)
    (kept,) = (tmp_path / "kept" / "tierflow" / "data").iterdir()
    assert kept.read_bytes() == prepared.read_bytes()
    # What became of them, and how they look.
    common = "--model", model, "--data", chats, "--sequence-length", LENGTH, "--python", "/nonexistent"
    said = json.loads(program("data", "prepare", *common, "--json"))
    assert rows.summaries == [{**said[0], "data": [str(tmp_path / "rows.tfd")], "prepared": str(tmp_path / "rows.tfd")}]
    assert said[0]["examples"] == 12 and said[0]["masks"] == "contents"
    preview = program("data", "preview", "2", *common[:-1], sys.executable)
    assert rows.preview(2) == preview and "=== sequence 2: " in preview
    assert "{+It is 4.<|end|>" in rows.preview(100) and "--- next document" in rows.preview(100)
    assert rows_of(prepared).preview(2, tokenizer=model) == preview
    with pytest.raises(tierflow.UsageError, match="preview\\(tokenizer='path/to/model'\\)"):
        rows_of(prepared).preview()


def test_what_prepare_is_told_is_used(prepared, tmp_path):
    model = prepared.parent / "model"
    path = write_rows(tmp_path / "a.jsonl", [{"messages": messages(CHATS[0])}, {"messages": [{"role": "bot", "content": "x"}]}])
    how = {"cache": tmp_path / "cache", "sequence_length": LENGTH}
    with pytest.raises(tierflow.InputError, match="a.jsonl:2.*roles are"):
        tierflow.data.prepare(model, path, **how)
    rows = tierflow.data.prepare(model, path, on_bad_row="skip", train_on="all", packing="none", **how)
    assert rows.summaries[0]["bad_rows"] == 1 and rows.summaries[0]["train_on"] == "all" and (rows[0]["labels"] >= 0).sum() == 20
    template = "{% for m in messages %}{{ m.role + ': ' + m.content + '</s>' }}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    (tmp_path / "own.jinja").write_text(template)
    for given in template, tmp_path / "own.jinja":
        own = tierflow.data.prepare(model, path, on_bad_row="skip", chat_template=given, packing="none", **how)
        assert own.preview(1).partition("\n")[2].startswith("user: What is 2 + 2?</s>assistant: {+It is 4.</s>+}")
    assert pickle.loads(pickle.dumps(own)).preview(1) == own.preview(1)
    mixed = tierflow.data.prepare(model, [prepared, path], weights=[1, 3], on_bad_row="skip", **how)
    assert [round(one["share"], 2) for one in mixed.summaries] == [0.25, 0.75]
    (tmp_path / "a.txt").write_text("text " * 400)
    for wrong, words in [
        ({"train_on": "user"}, 'trained on is "user"; there are assistant, all'),
        ({"format": "chats"}, 'format is "chats"; there are auto, text, messages'),
        ({"on_bad_row": "warn"}, "there are error, skip"),
        ({"out": tmp_path / "a.jsonl"}, "ends in .tfd"),
        ({"files": tmp_path / "a.txt"}, "a.txt holds text, which has no rows"),
        ({"files": [prepared, path], "weights": [1, 1], "out": tmp_path / "b.tfd", "on_bad_row": "skip"}, "b.tfd.*holds one dataset: leave out the weights"),
    ]:
        with pytest.raises(tierflow.UsageError, match=words):
            tierflow.data.prepare(model, **{"files": path, **how, **wrong})
    with pytest.raises(KeyboardInterrupt):  # what progress raises ends it

        def stopped(*_):
            raise KeyboardInterrupt

        tierflow.data.prepare(model, write_rows(tmp_path / "c.jsonl", [{"messages": messages(CHATS[1])}]), progress=stopped, **how)


def test_a_run_goes_on_with_the_rows_that_it_began_with(prepared, tmp_path):
    first = rows_of(prepared, seed=3)
    others = [rows_of(prepared, seed=4), rows_of(prepared, seed=3, packing="none"), rows_of(prepared, seed=3, held_out=0.3),
              rows_of(prepared, seed=3, held_out=0.3).held_out(), rows_of(prepared.parent / "other" / "rows.tfd", seed=3),
              tierflow.data.Rows(prepared, vocab_size=VOCAB, sequence_length=LENGTH // 2, seed=3)]  # fmt: skip
    assert len({rows.fingerprint for rows in [first, *others]}) == 1 + len(others)
    no_schedules = lambda opt: []  # noqa: E731
    scheduled(tmp_path, no_schedules, data=first)
    scheduled(tmp_path, no_schedules, data=rows_of(prepared, seed=3))
    for rows in others:
        with pytest.raises(tierflow.UsageError, match=f"was begun with data='{first.fingerprint}', not '{rows.fingerprint}'"):
            scheduled(tmp_path, no_schedules, data=rows)


def test_what_cannot_be_read_is_refused(prepared, tmp_path):
    with pytest.raises(tierflow.UsageError, match='packing is "bdf"; there are auto, bfd, none, concat'):
        rows_of(prepared, packing="bdf")
    with pytest.raises(tierflow.UsageError, match="chats.jsonl is no file of prepared rows: tierflow data prepare"):
        rows_of(prepared.parent / "chats.jsonl")
    with pytest.raises(tierflow.InputError, match="holds no .tfd file"):
        rows_of(tmp_path)
    with pytest.raises(tierflow.InputError, match="rows.tfd.*vocabulary"):
        tierflow.data.Rows(prepared, vocab_size=200, sequence_length=LENGTH)
    rows = rows_of(prepared)
    with pytest.raises(IndexError, match=f"there are {len(rows)} sequences"):
        rows[len(rows)]


def test_a_preview_shows_the_epoch_and_takes_what_moves_a_cursor_away(prepared, tmp_path):
    chats = [[("user", f"number {n}\x1b[2J"), ("assistant", f"\x07it is {n}")] for n in range(4)]
    path = write_rows(tmp_path / "odd.jsonl", [{"messages": messages(chat)} for chat in chats])
    rows = tierflow.data.prepare(prepared.parent / "model", [path, prepared], weights=[1, 1], cache=tmp_path / "cache", sequence_length=LENGTH, packing="none", seed=3)
    shown = {}
    for epoch in 0, 1:
        rows.set_epoch(epoch)
        shown[epoch] = rows.preview(100)
        assert shown[epoch].count("=== sequence ") == len(rows) and not tierflow.data.CONTROL.search(shown[epoch].replace("\n", ""))
        for number, row in enumerate(rows, 1):
            first_line = shown[epoch].partition(f"=== sequence {number}: ")[2].partition("\n")[0]
            assert first_line.endswith(f" tokens, {(row['labels'] >= 0).sum()} trained")
    assert shown[0] != shown[1] and "?[2J" in shown[0] + shown[1]


def test_prepared_rows_have_the_seed_that_is_given(prepared, tmp_path):
    how = {"cache": tmp_path / "cache", "sequence_length": LENGTH, "packing": "none"}
    path = prepared.parent / "chats.jsonl"
    orders = [[row["input_ids"].tolist() for row in tierflow.data.prepare(prepared.parent / "model", path, seed=seed, **how)] for seed in (0, 5)]
    assert orders[1] == [row["input_ids"].tolist() for row in rows_of(prepared, seed=5, packing="none")]
    assert orders[0] != orders[1] and sorted(orders[0]) == sorted(orders[1])
