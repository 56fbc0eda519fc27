#!/usr/bin/env python3
"""What preparing rows of conversations costs beside the tokenizer alone.

    .venv/bin/python benchmarks/data/prepare_rows.py --rows 100000

Makes a byte-level BPE tokenizer and rows of two questions and answers from Python's own sources. Then, in turn: the tokenizer alone on the rendered
texts (`encode_batch`, in the script's batches, with all cores; and beside it `encode_batch_fast`, which does not tell the characters of each token), and
`tierflow data prepare` from nothing: start of Python, reading, templates, tokens, marks, the file written and flushed. One JSON line a kind of template:
{% generation %} in it, or not (turns found by contents). CPU seconds hold on a busy machine, wall seconds on a quiet one."""

import argparse
import itertools
import json
import os
import pathlib
import random
import resource
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).parents[2]
PLAIN = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}BEGIN{{ m.content + '<|im_end|>' }}END"
    "{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEMPLATES = {
    "generation": PLAIN.replace("BEGIN", "{% generation %}").replace("END", "{% endgeneration %}"),
    "contents": PLAIN.replace("BEGIN", "").replace("END", ""),
}
BATCH = 512


def make(folder, rows):
    import tokenizers
    import transformers

    text = "".join(path.read_text(errors="replace") for path in sorted(pathlib.Path(os.__file__).parent.rglob("*.py"))[:400])
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=32000, special_tokens=["<|im_start|>", "<|im_end|>"], initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    model.train_from_iterator((text[at : at + 4000] for at in range(0, len(text), 4000)), trainer)
    transformers.PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<|im_end|>").save_pretrained(folder)
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": len(model.get_vocab()), "hidden_size": 64, "intermediate_size": 128,
              "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "rms_norm_eps": 1e-5, "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    chance = random.Random(1)
    with open(folder / "rows.jsonl", "w") as file:
        for _ in range(rows):
            parts = []
            for length in (150, 500, 100, 450):
                at = chance.randrange(len(text) - 1000)
                parts.append(text[at : at + chance.randint(length // 2, 3 * length // 2)].strip() or "none")
            roles = ("user", "assistant") * 2
            file.write(json.dumps({"messages": [{"role": role, "content": part} for role, part in zip(roles, parts)]}) + "\n")


def alone(folder, template):
    """Wall and CPU seconds of the tokenizer on texts that are there, its CPU seconds without the characters of tokens, and how many tokens these are."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    wall = cpu = fast = 0.0
    tokens = 0
    with open(folder / "rows.jsonl") as file:
        while lines := list(itertools.islice(file, BATCH)):
            texts = tokenizer.apply_chat_template([json.loads(line)["messages"] for line in lines], tokenize=False, chat_template=template)
            before = time.perf_counter(), time.process_time()
            encodings = tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False)
            wall += time.perf_counter() - before[0]
            cpu += time.process_time() - before[1]
            tokens += sum(map(len, encodings))
            before = time.process_time()
            encodings = tokenizer.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=False)
            fast += time.process_time() - before
    return wall, cpu, fast, tokens


def prepared(folder, template, build):
    (folder / "template.jinja").write_text(template)
    with tempfile.TemporaryDirectory(dir=folder) as cache:
        words = [build / "tierflow", "data", "prepare", "--model", folder, "--data", folder / "rows.jsonl", "--chat-template", folder / "template.jinja",
                 "--data-cache", cache, "--sequence-length", "2048", "--python", sys.executable, "--json"]
        before, usage = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(list(map(str, words)), check=True, stdout=subprocess.PIPE, text=True)
        wall, after = time.perf_counter() - before, resource.getrusage(resource.RUSAGE_CHILDREN)
        again = time.perf_counter()
        subprocess.run(list(map(str, words)), check=True, capture_output=True)
        again = time.perf_counter() - again
    (summary,) = json.loads(done.stdout)
    return wall, after.ru_utime + after.ru_stime - usage.ru_utime - usage.ru_stime, summary["tokens"], again


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100000)
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build")
    parser.add_argument("--templates", nargs="+", default=list(TEMPLATES), choices=list(TEMPLATES))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        make(folder, args.rows)
        for kind in args.templates:
            wall, cpu, fast, tokens = alone(folder, TEMPLATES[kind])
            ours, our_cpu, our_tokens, again = prepared(folder, TEMPLATES[kind], args.build)
            assert tokens == our_tokens, (tokens, our_tokens)
            print(json.dumps({"template": kind, "rows": args.rows, "tokens": tokens, "tokenizer_s": round(wall, 2), "prepare_s": round(ours, 2), "ratio": round(ours / wall, 3),
                              "tokenizer_cpu_s": round(cpu, 2), "prepare_cpu_s": round(our_cpu, 2), "cpu_ratio": round(our_cpu / cpu, 3),
                              "tokenizer_fast_cpu_s": round(fast, 2), "cpu_ratio_fast": round(our_cpu / fast, 3), "from_cache_s": round(again, 2)}), flush=True)


if __name__ == "__main__":
    main()
