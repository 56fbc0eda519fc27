"""`tierflow generate`: what a model answers, beside transformers."""
import errno
import json
import os
import re
import signal

import pytest
import torch
import transformers
from program import BUILD, config, needs_torch, run, start, the_error
from rows import PLAIN, SHORTENING, base, messages, the_library, write_rows  # noqa: F401
from test_models import CHOOSES, CONFIGS, randomised

pytestmark = needs_torch

SMALL = ["--device", "cpu", "--device-memory", "64MiB", "--host-memory", "64MiB"]
STREAMED = ["--device", "cpu", "--device-memory", "6MiB", "--host-memory", "3MiB", "--storage", "state"]
PROMPTS = ["Once upon a time", "a", "The quick brown fox jumps; and then it"]


def saved(family, folder, eos=None):
    torch.manual_seed(7)
    made = CONFIGS[family]()
    made.vocab_size = 256  # bytes
    made.eos_token_id = eos
    model = randomised(made).bfloat16()
    model.generation_config = transformers.GenerationConfig(eos_token_id=eos)
    model.save_pretrained(folder)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="eager").eval()


def generated(work, *words):
    done = run(work, "generate", "--model", "model", "--json", *words)
    return {line["prompt"]: line for line in map(json.loads, done.stdout.splitlines())}


def prompts_file(work, prompts=PROMPTS):
    (work / "prompts.txt").write_text("\n".join(prompts) + "\n")
    return ["--prompts", "prompts.txt"]


def worst_choice(model, prompt, tokens):
    """By how much a more likely token was passed over, at most, in the logits of transformers."""
    ids = torch.tensor([[*prompt.encode(), *tokens]])
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, len(prompt.encode()) - 1 : -1].float()
    chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    return ((logits.max(1).values - chosen) / logits.std(1)).max().item()


@pytest.mark.parametrize("family", ["llama3", "qwen2_tied", "gemma2", "gemma3", "mistral_window", "ministral3", "cohere2", "gpt2", "opt", "mixtral", "qwen2_moe", "glm4_moe", "gpt_oss", "llama4"])
def test_the_most_likely_tokens_are_those_of_transformers(family, work):
    model = saved(family, work / "model")
    found = generated(work, *prompts_file(work), "--max-new-tokens", "20", *SMALL)
    assert sorted(found) == [1, 2, 3]
    for number, prompt in enumerate(PROMPTS, 1):
        assert len(found[number]["tokens"]) == 20 and found[number]["finish_reason"] == "length"
        close = 0.3 if family in CHOOSES else 0.1  # in bf16 a token near the edge between two experts may go to the other one
        assert worst_choice(model, prompt, found[number]["tokens"]) < close, family


def test_storage_budgets_and_engine_do_not_change_a_token(work):
    (work / "config.json").write_text(json.dumps(config(hidden=128, layers=4)))
    run(work, "init", "--config", "config.json", "--out", "model")
    draws = [*prompts_file(work), "--max-new-tokens", "12", "--temperature", "1", "--seed", "4"]
    found = generated(work, *draws, *SMALL)
    assert generated(work, *draws, *STREAMED, "--log-json", "log.json") == found
    assert generated(work, *draws, *STREAMED, "--engine", "threads") == found
    summary = json.loads((work / "log.json").read_text().splitlines()[-1])["generation"]
    assert summary["tokens"] == sum(len(line["tokens"]) for line in found.values()) and summary["tokens_per_s"] > 0
    assert not [*work.glob("state/*")], "the storage folder is left empty"


def test_weights_that_have_room_on_the_device_are_read_once(work):
    (work / "config.json").write_text(json.dumps(config(hidden=128, layers=12)))
    run(work, "init", "--config", "config.json", "--out", "model")
    words = ["--prompt", "Once", "--max-new-tokens", "12", "--device", "cpu", "--host-memory", "1MiB", "--storage", "state"]
    refused = run(work, "generate", "--model", "model", *words, "--device-memory", "1MiB", ok=False)
    smallest = int(re.search(r"smallest that works is (\d+)KiB", the_error(refused.stderr))[1])
    weights = os.path.getsize(work / "model" / "model.safetensors")
    found, read = [], []
    for more in 0, 2 * weights // 3:
        done = run(work, "generate", "--model", "model", "--json", *words, "--device-memory", f"{smallest + more // 1024}KiB", "--log-json", "log.json")
        stay = int(re.search(r"; device: .*, (\d+)% of the weights stay there; host: ", done.stderr)[1])
        summary = json.loads((work / "log.json").read_text().splitlines()[-1])["generation"]
        (work / "log.json").unlink()
        assert (stay == 0) == (more == 0) and summary["passes"] == 12
        found.append(json.loads(done.stdout)["tokens"])
        read.append(summary["bytes_read"])
        passing = (1 - stay / 100) * weights
        assert read[-1] < weights + 11 * 1.1 * passing, stay
    assert found[0] == found[1] and read[1] < 0.7 * read[0]


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_of_a_mixture_the_chosen_experts_are_read(family, work):
    saved(family, work / "model")
    short = ["--prompt", "a", "--max-new-tokens", "12"]
    found = generated(work, *short, *SMALL)
    streamed = ["300KiB" if word == "3MiB" else word for word in STREAMED]
    done = run(work, "generate", "--model", "model", "--json", *short, *streamed, "--log-json", "log.json", env={"XDG_CACHE_HOME": str(work / "cache")})
    assert json.loads(done.stdout) == found[1]
    assert " parameters; device: " in done.stderr  # no precision of training
    assert re.search(r" tokens in [\d.]+ s, [\d.]+ a second; [\w ]+ was busy \d+% of it; ", done.stderr)
    assert re.search(r"a pass took \d+% of the experts: \d+% of these were on the device, \d+% in RAM, \d+% were read", done.stderr)
    summary = json.loads((work / "log.json").read_text().splitlines()[-1])["generation"]
    assert summary["limit_tokens_per_s"] is None and 0 < summary["slowest_lane_busy"]
    experts = summary["experts"]
    assert summary["passes"] == 12 and summary["bytes_read"] > 0
    assert experts["chosen"] == experts["needed"] < experts["all"] and experts["read"] <= experts["fetched"] <= experts["needed"]


def test_a_sequence_does_not_depend_on_those_beside_it(work):
    saved("llama3", work / "model")
    words = ["--max-new-tokens", "16", "--temperature", "0.9", "--seed", "2", *SMALL]
    together = generated(work, *prompts_file(work), *words)
    in_pairs = generated(work, *prompts_file(work), *words, "--batch", "2")
    assert together == in_pairs
    assert generated(work, *prompts_file(work), *words[:-len(SMALL) - 1], "3", *SMALL) != together, "another seed, other draws"


def test_a_long_prompt_is_computed_in_pieces(work):
    model = saved("llama3", work / "model")
    found = generated(work, *prompts_file(work), "--max-new-tokens", "16", "--sequence-length", "16", *SMALL)
    for number, prompt in enumerate(PROMPTS, 1):
        assert worst_choice(model, prompt, found[number]["tokens"]) < 0.1


def test_keys_and_values_go_to_storage_where_memory_is_short(work):
    (work / "config.json").write_text(json.dumps(config(hidden=128, layers=6, max_position_embeddings=512)))
    run(work, "init", "--config", "config.json", "--out", "model")
    words = [*prompts_file(work, [f"{number} " * 20 for number in range(12)]), "--max-new-tokens", "40", "--device", "cpu", "--device-memory", "64MiB"]
    expected = generated(work, *words, "--host-memory", "64MiB")
    for host, storage in ("64MiB", False), ("1400KiB", True), ("700KiB", True):
        log = work / f"{host}.json"
        found = generated(work, *words, "--host-memory", host, "--storage", "state", "--log-json", log)
        use = json.loads(log.read_text().splitlines()[-1])["generation"]["keys_and_values"]
        assert found == expected and use["host_bytes"] > 0
        assert (use["storage_bytes"] > 0) == (use["bytes_read"] > 0) == (use["bytes_written"] > 0) == storage
        assert not list((work / "state").glob("*"))
    done = run(work, "generate", "--model", "model", *words, "--host-memory", "100KiB", "--storage", "state", ok=False)
    assert done.returncode == 2 and "keys and values" in the_error(done.stderr)


def test_stop_tokens_end_a_text(work):
    model = saved("llama3", work / "model")
    with torch.no_grad():
        words = torch.tensor([list(PROMPTS[0].encode())])
        theirs = model.generate(words, do_sample=False, max_new_tokens=12)[0, words.shape[1] :].tolist()
    found = generated(work, "--prompt", PROMPTS[0], "--max-new-tokens", "12", *SMALL)[1]
    assert found["tokens"][:4] == theirs[:4]
    stop = found["tokens"][5]
    first = found["tokens"].index(stop)
    unused = next(token for token in range(255, 0, -1) if token not in found["tokens"])
    settings = json.loads((work / "model" / "generation_config.json").read_text())
    (work / "model" / "generation_config.json").write_text(json.dumps({**settings, "eos_token_id": [unused, stop]}))
    ended = generated(work, "--prompt", PROMPTS[0], "--max-new-tokens", "12", *SMALL)[1]
    assert (ended["tokens"], ended["finish_reason"]) == (found["tokens"][:first], "stop")
    (work / "model" / "generation_config.json").unlink()
    if stop < 128:
        by_text = generated(work, "--prompt", PROMPTS[0], "--max-new-tokens", "12", "--stop", chr(stop), *SMALL)[1]
        assert by_text["tokens"] == ended["tokens"]


@pytest.fixture
def chat(base, work):  # noqa: F811
    """A model with a tokenizer and a chat template, whose text may end."""
    model = work / "model"
    (work / "config.json").write_text(json.dumps(config(vocab=400, eos_token_id=1)))
    run(work, "init", "--config", "config.json", "--out", "model")
    for file in base.iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    (model / "chat_template.jinja").write_text(PLAIN)
    return work


def test_conversations_are_rendered_by_the_models_template(chat):
    rows = [{"messages": messages([("user", "héllo 😀")])}, {"prompt": "What is 2 + 2?"}, {"messages": messages([("system", "You are kind."), ("user", "again")])}]
    write_rows(chat / "rows.jsonl", rows)
    found = generated(chat, "--prompts", "rows.jsonl", "--chat", "--system", "You are brief.", "--max-new-tokens", "8", *SMALL)
    tokenizer = the_library(chat / "model", PLAIN)
    brief = messages([("system", "You are brief.")])
    asked = [brief + rows[0]["messages"], brief + messages([("user", "What is 2 + 2?")]), rows[2]["messages"]]
    model = transformers.AutoModelForCausalLM.from_pretrained(chat / "model", dtype=torch.bfloat16).eval()
    for number, conversation in enumerate(asked, 1):
        ids = tokenizer.apply_chat_template(conversation, add_generation_prompt=True, return_dict=False)
        tokens = found[number]["tokens"]
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[*ids, *tokens]])).logits[0, len(ids) - 1 :].float()
        for at, token in enumerate(tokens):
            assert logits[at].max() - logits[at, token] < 0.1 * logits[at].std()
        assert found[number]["text"] == tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    alone = run(chat, "generate", "--model", "model", "--prompt", "What is 2 + 2?", "--chat", "--system", "You are brief.", "--max-new-tokens", "8", *SMALL)
    assert alone.stdout == found[2]["text"] + "\n"


def test_a_talk_on_the_terminal_remembers(chat):
    """The whole of it, of a model that is sure of its answers: what follows the tokens that are taken over may differ by rounding, and random weights have flat logits."""
    asked = ["What is 2 + 2?", "again", "and again"]
    turns = [("user", asked[0]), ("assistant", "It is 4."), ("user", asked[1]), ("assistant", "It is 4 again."), ("user", asked[2]), ("assistant", "So it is.")]
    write_rows(chat / "turns.jsonl", [{"messages": messages(turns)}] * 8)
    run(chat, "train", "--model", "model", "--data", "turns.jsonl", "--method", "lora", "--lr", "5e-3", "--steps", "150", "--held-out", "0", "--out", "tuned", "--sequence-length", "128", *SMALL)
    sure = ["--model", "model", "--adapter", "tuned", "--stop", "<|end|>", "--max-new-tokens", "12"]
    talk = ["generate", *sure, "--chat", "--context", "200", *SMALL]
    done = run(chat, *talk, input="".join(line + "\n" for line in asked))
    answers = []
    for number in range(len(asked)):  # each of the whole conversation until then
        write_rows(chat / "rows.jsonl", [{"messages": messages(turns[: 2 * number + 1])}])
        answers.append(generated(chat, "--prompts", "rows.jsonl", *sure[2:], *SMALL)[1]["text"])
    assert answers == [text for role, text in turns if role == "assistant"]
    assert done.stdout == "".join(answer + "\n" for answer in answers)
    first = answers[0]
    # A line without words, in what a script writes, is no message and ends nothing.
    assert run(chat, *talk, input=f"\n{asked[0]}\n\n").stdout == first + "\n"
    # What the turns before had is not computed again: all of the first prompt, at least; a third turn takes over more.
    log = chat / "talk.json"
    run(chat, *talk, "--log-json", log, input="What is 2 + 2?\nagain\nand again\n")
    turns = [record["talk"] for record in map(json.loads, log.read_text().splitlines()) if "talk" in record]
    assert turns[0]["taken_over"] == 0 and len(turns) == 3
    assert all(turns[at]["tokens"] <= turns[at + 1]["taken_over"] < turns[at + 1]["tokens"] for at in range(2))
    # Of a template that shortens earlier answers, what stands before the first of them.
    (chat / "model" / "chat_template.jinja").write_text(SHORTENING)
    changed = run(chat, *talk, "--log-json", chat / "changed.json", input="What is 2 + 2?\nagain\n")
    turns = [record["talk"] for record in map(json.loads, (chat / "changed.json").read_text().splitlines()) if "talk" in record]
    assert 0 < turns[1]["taken_over"] < turns[1]["tokens"] and changed.stdout.startswith(first + "\n")
    (chat / "model" / "chat_template.jinja").write_text(PLAIN)
    process = start(chat, *talk, stdin=-1, stdout=-1)
    try:
        process.stdin.write("What is 2 + 2?\n")
        process.stdin.flush()
        assert process.stdout.readline() == first + "\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130, "Ctrl-C at the prompt"
    finally:
        process.kill()
    done = run(chat, *talk[: -len(SMALL) - 1], "40", *SMALL, input="a very long message " * 20, ok=False)
    assert done.returncode == 2 and "beyond 40 (--context)" in the_error(done.stderr)


def test_an_adapter_answers(chat):
    row = {"messages": messages([("user", "What is 2 + 2?"), ("assistant", "It is 4.")])}
    write_rows(chat / "rows.jsonl", [row] * 8)
    run(chat, "train", "--model", "model", "--data", "rows.jsonl", "--method", "lora", "--lr", "5e-3", "--steps", "150", "--held-out", "0", "--out", "tuned",
        "--sequence-length", "64", *SMALL)
    assert (chat / "tuned" / "chat_template.jinja").exists(), "the template goes with the tokenizer"
    ask = ["generate", "--model", "model", "--chat", "--prompt", "What is 2 + 2?", "--max-new-tokens", "12", "--stop", "<|end|>", *SMALL]
    assert run(chat, *ask, "--adapter", "tuned").stdout == "It is 4.\n"
    assert run(chat, *ask, "--adapter", "tuned", "--base-precision", "int8", "--storage", "state").stdout == "It is 4.\n"
    assert "It is 4." not in run(chat, *ask).stdout


def test_what_cannot_be_answered_is_one_line(chat):
    def refused(*words, code):
        done = run(chat, "generate", *words, "--device-memory", "64MiB", "--host-memory", "2MiB", ok=False)
        assert done.returncode == code, done.stderr
        return the_error(done.stderr)

    (chat / "empty.txt").write_text("\n\n")
    (chat / "bad.jsonl").write_text('{"prompt": "a"}\n{"question": "b"}\n')
    (chat / "roles.jsonl").write_text('{"messages": [{"role": "wizard", "content": "b"}]}\n')
    write_rows(chat / "answered.jsonl", [{"messages": messages([("user", "a")])}, {"messages": messages([("user", "a"), ("assistant", "b")])}])
    model = ["--model", "model"]
    assert "needs --model" in refused("--prompt", "a", code=2)
    assert "--prompt, --prompts or --chat" in refused(*model, code=2)
    assert "empty.txt: has no prompt" in refused(*model, "--prompts", "empty.txt", code=3)
    assert "bad.jsonl:2: is no object" in refused(*model, "--prompts", "bad.jsonl", code=3)
    assert "prompt 1: message 0 has the role" in refused(*model, "--prompts", "roles.jsonl", code=3)
    assert "answered.jsonl:2: ends with a message of the assistant" in refused(*model, "--prompts", "answered.jsonl", code=3)
    assert 'has no token "<nope>"' in refused(*model, "--prompt", "a", "--stop", "<nope>", code=3)
    assert "beyond the model's 512 positions" in refused(*model, "--prompt", "a " * 600, code=2)
    assert "--json prints an object a prompt" in refused(*model, "--chat", "--json", code=2)
    assert "--temperature is -1" in refused(*model, "--prompt", "a", "--temperature", "-1", code=2)
    (chat / "many.txt").write_text("a\n" * 30)
    assert "keys and values of 30 sequences take" in refused(*model, "--prompts", "many.txt", "--max-new-tokens", "400", code=2)
    (chat / "model" / "chat_template.jinja").unlink()
    assert "without a chat template" in refused(*model, "--prompt", "a", "--chat", code=3)
    (chat / "model" / "tokenizer.json").unlink()
    assert "but no tokenizer.json" in refused(*model, "--prompt", "a", "--chat", code=3)


def test_a_text_ends_at_a_token_by_its_name_or_its_text(chat):
    tokenizer = transformers.AutoTokenizer.from_pretrained(chat / "model")
    for stop in ("\n", "Ċ"):
        assert tokenizer.encode("\n", add_special_tokens=False) == [tokenizer.get_vocab()["Ċ"]]
        generated(chat, "--prompt", "a", "--stop", stop, "--max-new-tokens", "1", *SMALL)


def test_an_interrupted_generation_prints_what_it_has(chat):
    """Ctrl-C reaches all processes of the terminal's group, the tokenizer's too."""
    (chat / "model" / "config.json").write_text(json.dumps(config(vocab=400, max_position_embeddings=1 << 20)))
    (chat / "prompts.txt").write_text("a\nb\nc\n")
    process = start(chat, "generate", "--model", "model", "--prompts", "prompts.txt", "--json", "--max-new-tokens", "100000", "--device", "cpu",
                    "--device-memory", "256MiB", "--host-memory", "1GiB", stdout=-1, start_new_session=True)
    try:
        while "generating" not in (line := process.stderr.readline()):
            assert line or process.poll() is None, "it ended"
        os.killpg(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130 and "what was generated until then is written" in the_error(err), err
    lines = [json.loads(line) for line in out.splitlines()]
    assert {line["finish_reason"] for line in lines} == {"interrupted"} and len(lines) == 3
    tokenizer = the_library(chat / "model")
    assert all(line["tokens"] and line["text"] == tokenizer.decode(line["tokens"], skip_special_tokens=True, clean_up_tokenization_spaces=False) for line in lines)


def test_a_failed_read_leaves_what_was_generated(work):
    (work / "config.json").write_text(json.dumps(config(hidden=256, layers=8, max_position_embeddings=4096)))
    run(work, "init", "--config", "config.json", "--out", "model")
    (work / "prompts.txt").write_text("a\nb\n")
    budgets = ["--device", "cpu", "--device-memory", "6MiB", "--host-memory", "4MiB", "--storage", "state"]
    fails = {"LD_PRELOAD": str(BUILD / "librecord_calls.so"), "TIERFLOW_FAIL": f"read:state.tfv:{errno.EIO}", "TIERFLOW_FAIL_NTH": "400"}
    done = run(work, "generate", "--model", "model", "--prompts", "prompts.txt", "--json", "--max-new-tokens", "100", *budgets, "--engine", "threads", env=fails, ok=False, timeout=100)
    assert done.returncode == 5 and "Input/output error" in the_error(done.stderr)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["finish_reason"] for line in lines] == ["interrupted"] * 2 and all(line["tokens"] for line in lines)


def test_an_interrupted_answer_of_a_talk_ends_its_line(chat):
    (chat / "model" / "config.json").write_text(json.dumps(config(vocab=400, max_position_embeddings=1 << 20)))
    process = start(chat, "generate", "--model", "model", "--chat", "--max-new-tokens", "20000", "--context", "30000", "--device", "cpu",
                    "--device-memory", "512MiB", "--host-memory", "1GiB", stdin=-1, stdout=-1)
    try:
        process.stdin.write("What is 2 + 2?\n")
        process.stdin.flush()
        assert process.stdout.buffer.read(1)
        process.send_signal(signal.SIGINT)
        out = process.stdout.buffer.read()  # bytes: the text of random weights need not be UTF-8
        assert process.wait(timeout=60) == 130, process.stderr.read()
    finally:
        process.kill()
    assert out.endswith(b"\n")


def test_what_the_models_settings_say_and_is_not_known_is_named(work):
    saved("llama3", work / "model")
    settings = work / "model" / "generation_config.json"
    settings.write_text(json.dumps({"num_beams": 4, "typical_p": 1.0, "bad_words_ids": [[3]], "no_repeat_ngram_size": 1, "min_new_tokens": 5, "eos_token_id": list(range(200))}))
    done = run(work, "generate", "--model", "model", "--prompt", "a", "--json", "--max-new-tokens", "12", *SMALL)
    assert "warning: num_beams, bad_words_ids of generation_config.json are not applied" in done.stderr
    found = json.loads(done.stdout)
    assert len(found["tokens"]) >= 5 and all(token >= 200 for token in found["tokens"][:5])
    assert len({*found["tokens"], ord("a")}) == len(found["tokens"]) + 1


def test_a_batch_by_itself_is_as_large_as_memory_holds(work):
    saved("llama3", work / "model")
    few = prompts_file(work, ["abc"[: 1 + i % 3] * (1 + i % 10) for i in range(40)])
    found = generated(work, *few, "--max-new-tokens", "4", "--batch", "auto", *SMALL, "--log-json", "log.json")
    assert sorted(found) == list(range(1, 41))
    assert json.loads((work / "log.json").read_text().splitlines()[-1])["generation"]["passes"] < 8


def test_output_that_nobody_reads_ends_it(work):
    (work / "config.json").write_text(json.dumps(config(max_position_embeddings=1 << 20)))
    run(work, "init", "--config", "config.json", "--out", "model")
    process = start(work, "generate", "--model", "model", "--prompt", "a", "--max-new-tokens", "100000", *SMALL, stdout=-1)
    try:
        assert process.stdout.buffer.read(1)  # bytes: the text of random weights need not be UTF-8
        process.stdout.close()
        assert process.wait(timeout=60) == 5
    finally:
        process.kill()
    assert "standard output cannot be written" in the_error(process.stderr.read())


def test_words_in_brackets_are_one_prompt(work):
    saved("llama3", work / "model")
    words = ["--max-new-tokens", "4", *SMALL]
    (work / "prompts.txt").write_text("[INST] hi, you [/INST]\n")
    from_file = generated(work, "--prompts", "prompts.txt", *words)
    assert len(from_file) == 1
    assert generated(work, "--prompt", "[INST] hi, you [/INST]", *words) == from_file == generated(work, "--prompt=[INST] hi, you [/INST]", *words)


def test_prompts_may_come_from_windows(work):
    """A byte-order mark, and lines that end in two characters, are no part of a prompt."""
    saved("llama3", work / "model")
    words = ["--max-new-tokens", "4", *SMALL]
    (work / "prompts.txt").write_bytes(b"\xef\xbb\xbfa prompt\r\n\r\n")
    assert generated(work, "--prompts", "prompts.txt", *words) == generated(work, "--prompt", "a prompt", *words)


def test_tools_of_a_row_reach_the_template(chat):
    """In the order of their keys, as in training."""
    (chat / "model" / "chat_template.jinja").write_text("{{ bos_token }}{{ 'good' if (tools | tojson).startswith('[{\"b\"') else 'bad' }}{% for m in messages %}{{ m.content }}{% endfor %}{{ mood }}")
    row = {"messages": messages([("user", "x")]), "tools": [{"b": 1, "a": 2}], "chat_template_kwargs": {"mood": "glad"}}
    write_rows(chat / "rows.jsonl", [row])
    words = ["--max-new-tokens", "8", *SMALL]
    plain = generated(chat, "--prompt", "goodxglad", *words)
    assert generated(chat, "--prompts", "rows.jsonl", *words) == plain != generated(chat, "--prompt", "badxglad", *words)


def test_a_temperature_of_0_in_the_models_settings_takes_the_most_likely_token(work):
    saved("llama3", work / "model")
    likely = generated(work, "--prompt", "a", "--max-new-tokens", "6", *SMALL)
    (work / "model" / "generation_config.json").write_text('{"temperature": 0.0, "do_sample": false}')
    assert generated(work, "--prompt", "a", "--max-new-tokens", "6", "--top-p", "0.9", *SMALL) == likely


def test_an_answer_does_not_cross_the_length_where_rotary_factors_change(work):
    model, original = saved("phi4_mini", work / "model"), 32
    short, long = "a" * (original - 4), "b" * (original + 6)
    found = generated(work, *prompts_file(work, [short, long]), "--max-new-tokens", "4", "--sequence-length", "16", *SMALL)
    for number, prompt in enumerate([short, long], 1):
        assert worst_choice(model, prompt, found[number]["tokens"]) < 0.1
    done = run(work, "generate", "--model", "model", "--prompt", short, "--max-new-tokens", "8", *SMALL, ok=False)
    assert done.returncode == 2 and "other rotary factors" in the_error(done.stderr) and "at most 5 new ones" in done.stderr


def test_the_smallest_host_memory_that_is_named_works(work):
    (work / "config.json").write_text(json.dumps(config()))
    run(work, "init", "--config", "config.json", "--out", "model")
    words = ["generate", "--model", "model", "--prompt", "a", "--max-new-tokens", "40", "--device", "cpu", "--device-memory", "64MiB", "--json"]
    refused = the_error(run(work, *words, "--host-memory", "64KiB", ok=False).stderr)
    assert "--host-memory 64KiB is too small" in refused and "keys and values take" in refused
    smallest = re.search(r"the smallest that works is (\w+)", refused)[1]
    (line,) = run(work, *words, "--host-memory", smallest).stdout.splitlines()
    assert len(json.loads(line)["tokens"]) == 40


def test_the_smallest_device_memory_that_is_named_holds_a_long_answer(work):
    (work / "config.json").write_text(json.dumps(config(hidden=512, num_key_value_heads=4, max_position_embeddings=4096)))
    run(work, "init", "--config", "config.json", "--out", "model")
    words = ["generate", "--model", "model", "--prompt", "a", "--max-new-tokens", "1200", "--device", "cpu", "--host-memory", "64MiB", "--json"]
    refused = the_error(run(work, *words, "--device-memory", "1MiB", ok=False).stderr)
    assert "fewer --max-new-tokens" in refused
    smallest = re.search(r"the smallest that works is (\w+)", refused)[1]
    (line,) = run(work, *words, "--device-memory", smallest).stdout.splitlines()
    assert len(json.loads(line)["tokens"]) == 1200
