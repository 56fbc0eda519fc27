"""A teacher's tokens are transformers', learning from them is PyTorch's formula, and every way to compute a run has the same bits."""
import json
import signal
import struct

import pytest
from program import again, changed, needs_torch, on_a_card, run, small, start, steps_of, the_error, wait_until
from rows import base, read_row_file, the_library, transformers, write_rows  # noqa: F401

pytestmark = needs_torch
TOP = 8
ROWS = [{"prompt": "the answer is ", "completion": "what you long for"}, {"prompt": "what ", "completion": "the user and the system long for, and what"},
        {"prompt": "a", "completion": " b c"}, {"prompt": "you ", "completion": "what assistant is it"}, {"prompt": "x y ", "completion": "the the"},
        {"prompt": "is it ", "completion": "you and what long"}]  # fmt: skip


@pytest.fixture(scope="module")
def work(base, tmp_path_factory):  # noqa: F811
    """A teacher and a smaller student with one tokenizer, rows, and the teacher's tokens of them."""
    import torch
    folder = tmp_path_factory.mktemp("distillation")
    tokenizer = the_library(base)
    for seed, (name, hidden, more) in enumerate((("teacher", 96, 0), ("student", 64, 0), ("larger", 64, 40))):
        torch.manual_seed(seed)
        transformers.LlamaForCausalLM(transformers.LlamaConfig(
            vocab_size=len(tokenizer) + more, hidden_size=hidden, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            max_position_embeddings=64, initializer_range=0.15)).to(torch.bfloat16).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    write_rows(folder / "rows.jsonl", ROWS)
    write_rows(folder / "more.jsonl", ROWS * 4)
    run(folder, *teach("rows.jsonl", "rows.tft", "--packing", "none"))
    run(folder, *teach("more.jsonl", "more.tft"))
    return folder


def data_of(rows):
    return ["--data", rows, "--data-cache", "cache", *small("--sequence-length", "32")]


def teach(rows, out, *more, model="teacher"):
    return ["eval", "--model", model, *data_of(rows), "--teacher-out", str(out), "--teacher-top", str(TOP), *more]


def learn(rows, file, *more):
    return ["train", "--model", "student", *data_of(rows), "--distill", str(file), "--lr", "5e-3", "--lr-schedule", "constant", *more]


def without(words, *options):
    return [word for before, word in zip(["", *words], words) if word not in options and before not in options]


def read_teacher_file(path):
    """By its description: for each sequence the ids and log-probabilities of its positions."""
    data = path.read_bytes()
    magic, version, top, width, largest, vocabulary, length, sequences, positions, *_ = struct.unpack_from("<8sIIIIQQQQQQQ", data)
    assert (magic, version, length) == (b"TFTEACH\n", 1, 32)
    befores = [struct.unpack_from("<Q", data, 80 + 16 * at)[0] for at in range(sequences)] + [positions]
    blocks, found = 80 + 16 * sequences, []
    assert len(data) == blocks + positions * top * (width + 2)
    for begin, end in zip(befores, befores[1:]):
        at, count = blocks + begin * top * (width + 2), (end - begin) * top
        ids = struct.unpack_from(f"<{count}{'H' if width == 2 else 'I'}", data, at)
        values = struct.unpack_from(f"<{count}e", data, at + count * width)
        assert not ids or max(ids) <= largest < vocabulary
        found.append(([ids[i : i + top] for i in range(0, count, top)], [values[i : i + top] for i in range(0, count, top)]))
    return found


def sequences(work):
    """Ids and labels of each row, by number."""
    run(work, "data", "prepare", "--model", "student", "--data", "rows.jsonl", "--data-cache", "cache", "--out", "rows.tfd")
    rows, _ = read_row_file(work / "rows.tfd")
    return [([*ids, *[0] * (32 - len(ids))], [*[id if mark else -100 for id, mark in zip(ids[1:], marks[1:])], *[-100] * (33 - len(ids))]) for ids, marks in rows]


def test_the_tokens_are_the_teachers(work):
    import torch
    model = transformers.LlamaForCausalLM.from_pretrained(work / "teacher", dtype=torch.float32)
    found, rows = read_teacher_file(work / "rows.tft"), sequences(work)
    assert len(found) == len(rows) == len(ROWS)
    for (ids, values), (tokens, labels) in zip(found, rows):
        log_p = model(torch.tensor([tokens])).logits[0].log_softmax(-1)[torch.tensor(labels) >= 0]
        assert len(ids) == len(log_p)
        theirs = log_p.topk(TOP).values
        assert torch.tensor(values).sub(theirs).abs().max() < 0.06  # bf16's logits
        assert torch.tensor(values).sub(log_p.gather(1, torch.tensor(ids))).abs().max() < 0.06
        assert (torch.tensor(values).diff(dim=1) <= 0).all()


def torch_course(work, alpha, ce_alpha, temperature, steps=4):
    """Loss, both parts and norm of each step, in fp32 with torch's AdamW, from the file's tokens."""
    import torch
    model = transformers.LlamaForCausalLM.from_pretrained(work / "student", dtype=torch.float32)
    ids, labels = (torch.tensor(part) for part in zip(*sequences(work)))
    counts, file = labels >= 0, read_teacher_file(work / "rows.tft")
    teacher_ids = torch.tensor([row for named, _ in file for row in named])
    teacher = torch.tensor([row for _, values in file for row in values])
    optimizer, records = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0), []
    for _ in range(steps):
        logits = model(ids).logits[counts]
        ce = torch.nn.functional.cross_entropy(logits, labels[counts])
        q = (teacher / temperature).softmax(-1)
        student = (logits / temperature).log_softmax(-1).gather(1, teacher_ids)
        kd = temperature**2 * torch.nn.functional.kl_div(student, q, reduction="none").sum(1).mean()
        loss = ce_alpha * ce + alpha * kd
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        records.append((loss.item(), ce.item(), kd.item(), norm.item()))
    return records


@pytest.mark.parametrize("weights", [(), (0.6, 0.3, 2.0)])
def test_learning_is_pytorchs(work, tmp_path, weights):
    options = [word for name, value in zip(("--kd-alpha", "--kd-ce-alpha", "--kd-temperature"), weights) for word in (name, str(value))]
    log = tmp_path / "log.json"
    # Three rows a micro-batch and two of these.
    run(work, *changed(learn("rows.jsonl", "rows.tft", "--packing", "none", "--held-out", "0", "--steps", "4", "--micro-batches", "2", *options), {"--micro-batch": "3"}),
        "--precision", "fp32-master+adam32", "--log-json", log, "--out", tmp_path / "out")
    ours = [(step["loss"], step["ce_loss"], step["kd_loss"], step["grad_norm"]) for step in steps_of(log)]
    theirs = torch_course(work, *(weights or (0.9, 0.1, 1.0)))
    for at, (found, expected) in enumerate(zip(ours, theirs, strict=True)):
        assert found[:3] == pytest.approx(expected[:3], rel=2e-2), at
        assert found[3] == pytest.approx(expected[3], rel=5e-2), at
    assert ours[-1][2] < ours[0][2]


def result(folder):
    return next((folder / name).read_bytes() for name in ("adapter_model.safetensors", "model.safetensors") if (folder / name).exists())


ADAPTED = ["--method", "lora", "--lora-rank", "4", "--base-precision", "nf4"]


@pytest.mark.parametrize("more", [ADAPTED, ["--kd-temperature", "2", "--clip", "none"]])
def test_streamed_it_has_the_same_bits(work, tmp_path, more):
    words = learn("more.jsonl", "more.tft", "--held-out", "0.2", "--steps", "3", "--micro-batches", "2", *more)
    streamed = [*changed(words, {"--host-memory": "300KiB" if more == ADAPTED else "500KiB"}), "--storage", str(tmp_path / "store")]
    logs = []
    for name, options in ("resident", words), ("streamed", streamed):
        run(work, *options, "--out", tmp_path / name, "--log-json", tmp_path / f"{name}.json")
        records = [json.loads(line) for line in (tmp_path / f"{name}.json").read_text().splitlines()]
        kept = "loss", "ce_loss", "kd_loss", "grad_norm", "held_out_loss"
        logs.append([{key: record[key] for key in kept if key in record} for record in records if "step" in record])
    assert logs[0] == logs[1] and len(logs[0]) == 5
    assert result(tmp_path / "resident") == result(tmp_path / "streamed")
    # What is held out is measured by cross-entropy alone, as without a teacher.
    held_out = [record["held_out_loss"] for record in logs[0] if "held_out_loss" in record]
    plain = without(words, "--distill", "--kd-temperature")
    run(work, *plain, "--out", tmp_path / "plain", "--log-json", tmp_path / "plain.json")
    first = next(record["held_out_loss"] for record in map(json.loads, (tmp_path / "plain.json").read_text().splitlines()) if "held_out_loss" in record)
    assert held_out[0] == first and held_out[1] != held_out[0]


def test_a_streamed_teacher_writes_the_same_bytes(work, tmp_path):
    said = run(work, *changed(teach("more.jsonl", tmp_path / "again.tft", "--json"), {"--host-memory": "300KiB"}), "--storage", tmp_path / "store").stderr
    assert (tmp_path / "again.tft").read_bytes() == (work / "more.tft").read_bytes()
    assert f"{TOP} at each of " in said and f" positions, {4 * TOP} bytes a position" in said


def test_a_student_that_is_its_teacher_has_nothing_to_learn(work, tmp_path):
    log = tmp_path / "log.json"
    tokens = json.loads((work / "student/config.json").read_text())["vocab_size"]
    run(work, *changed(teach("rows.jsonl", tmp_path / "all.tft", model="student"), {"--teacher-top": str(tokens)}))
    run(work, *learn("rows.jsonl", tmp_path / "all.tft", "--steps", "1", "--kd-ce-alpha", "0", "--held-out", "0"), "--out", tmp_path / "out", "--log-json", log)
    (step,) = steps_of(log)
    assert 0 <= step["kd_loss"] < 1e-5 and step["loss"] == pytest.approx(0.9 * step["kd_loss"]) and step["ce_loss"] > 1


def test_killed_it_goes_on_with_its_teacher(work, tmp_path):
    def words(out, *more):
        return [*learn("more.jsonl", "more.tft", "--held-out", "0", "--steps", "30", *ADAPTED), "--out", str(tmp_path / out), *more]
    run(work, *words("whole"))
    log = tmp_path / "log.json"
    stored = changed(words("out", "--storage", str(tmp_path / "store"), "--durability", "step", "--log-json", str(log)), {"--host-memory": "300KiB"})
    training = start(work, *stored, delay_ms=10)
    wait_until(lambda: log.exists() and log.read_text().count('"kd_loss"') > 5)
    training.send_signal(signal.SIGKILL)
    training.communicate()
    assert training.returncode == -signal.SIGKILL
    run(work, *teach("more.jsonl", tmp_path / "other.tft", model="student"))
    plain = without(stored, "--distill")
    for other, why in ((changed(stored, {"--distill": str(tmp_path / "other.tft")}), "had another file of --distill"),
                       ([*stored, "--kd-alpha", "0.5"], "had --kd-alpha 0.9, not 0.5"), (plain, "had --distill")):  # fmt: skip
        refused = again(work, *other)
        assert refused.returncode == 2 and why in the_error(refused.stderr)
    done = again(work, *stored)
    assert done.returncode == 0, done.stderr
    assert result(tmp_path / "out") == result(tmp_path / "whole")


def test_what_does_not_fit_is_refused(work, tmp_path):
    def refused(words, code=2):
        done = run(work, *words, "--out", tmp_path / "out", ok=False) if words[0] == "train" else run(work, *words, ok=False)
        assert done.returncode == code, done.stderr
        return the_error(done.stderr)
    def learnt(file="more.tft", rows="more.jsonl", *more):
        return learn(rows, file, "--steps", "1", *more)
    assert "is of other data than --data" in refused(learnt("rows.tft"))
    for options in (["--packing", "none"], ["--train-on", "all"]):
        assert "prepared otherwise" in refused(learnt("more.tft", "more.jsonl", *options))
    assert "was made with --sequence-length 32, not 16" in refused(changed(learnt(), {"--sequence-length": "16"}))
    whole = (work / "more.tft").read_bytes()
    (tmp_path / "cut.tft").write_bytes(whole[:-1])
    assert "is damaged: it has" in refused(learnt(tmp_path / "cut.tft"), 6)
    (tmp_path / "changed.tft").write_bytes(whole[:-400] + bytes([whole[-400] ^ 1]) + whole[-399:])
    epoch = changed(learn("more.jsonl", tmp_path / "changed.tft", "--epochs", "1", "--held-out", "0"), {"--micro-batch": "1"})
    assert "does not have its checksum" in refused(epoch, 6)
    assert "holds no tokens of a teacher" in refused(learnt("rows.jsonl"), 3)
    for options, why in ((["--loss", "dpo"], "--distill is for --loss cross-entropy"), (["--kd-temperature", "0"], "--kd-temperature must be above 0"),
                         (["--kd-alpha", "0"], "--kd-alpha must be above 0")):  # fmt: skip
        assert why in refused(learnt("more.tft", "more.jsonl", *options))
    plain = without(learnt(), "--distill")
    assert "are for --distill" in refused([*plain, "--kd-ce-alpha", "0.5"])
    taught = teach("more.jsonl", tmp_path / "none.tft")
    assert "has a vocabulary of" in refused(changed(taught, {"--teacher-top": "60000"}))
    assert "leave --max-sequences and --per-document out" in refused([*taught, "--max-sequences", "1"])
    assert "--teacher-top is for --teacher-out" in refused(without(taught, "--teacher-out"))
    assert not (tmp_path / "none.tft").exists()
    # A teacher with a larger vocabulary is taken where it names no token beyond the student's.
    run(work, *teach("more.jsonl", tmp_path / "larger.tft", model="larger"))
    assert "its teacher had another tokenizer" in refused(learnt(tmp_path / "larger.tft"))


def test_a_plan_counts_the_teachers_tokens(work):
    def workspace(*options):
        asked = ["plan", "--model", "student", *small("--sequence-length", "32", "--micro-batches", "3"), "--json", *options]
        return json.loads(run(work, *on_a_card(asked)).stdout)["device"]["workspace"]
    assert workspace("--distill", work / "more.tft") - workspace() == 3 * 2 * 32 * TOP * 6  # micro-batches of two rows; 6 bytes a token
