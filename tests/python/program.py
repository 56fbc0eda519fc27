"""The program from the outside: small runs of `tierflow`, and what they wrote."""
import json
import os
import pathlib
import signal
import subprocess
import time

import fork_server
import pytest

BUILD = pathlib.Path(os.environ.get("TIERFLOW_BUILD", pathlib.Path(__file__).parents[2] / "build"))
PROGRAM = BUILD / "tierflow"
needs_torch = pytest.mark.skipif(not (BUILD / "libtierflow_train.so").exists(), reason="built without LibTorch")

MIB = 1 << 20


def config(hidden=64, layers=2, vocab=256, **more):
    return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": vocab, "hidden_size": hidden,
            "intermediate_size": hidden * 11 // 4 // 32 * 32, "num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 2,
            "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "hidden_act": "silu",
            "torch_dtype": "bfloat16", **more}


@pytest.fixture
def work(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(config()))
    text = "".join(p.read_text(errors="replace") for p in sorted(pathlib.Path(os.__file__).parent.glob("*.py"))[:10])
    (tmp_path / "text.txt").write_text(text)
    return tmp_path


def run(work, *words, ok=True, timeout=300, env=None, **more):
    command = [str(PROGRAM), *map(str, words)]
    if more:
        more = {"capture_output": True, **more}
        done = subprocess.run(command, cwd=work, text=True, timeout=timeout, env={**os.environ, **(env or {})}, **more)
    else:
        done = fork_server.run(command, cwd=work, timeout=timeout, env=env)
    assert not ok or done.returncode == 0, done.stderr
    return done


def adapter_bits(folder):
    """Of adapters over a base that two folders store in their own way: names, shapes and values, without the hash of the folder's weights."""
    raw = (folder / "adapter_model.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:8 + length])
    assert header.pop("__metadata__")["tierflow_base_weights"]
    return header, raw[8 + length:]


def changed(words, values):
    """The same words with other values of these options."""
    return [values.get(before, word) for before, word in zip(["", *words], words)]


def again(work, *words, **more):
    """The same command, once the kernel has taken the drive from a killed one."""
    deadline = time.time() + 60
    while True:
        done = run(work, *words, ok=False, **more)
        if done.returncode != 8 or time.time() > deadline:
            return done


def start(work, *words, env=None, delay_ms=0, **more):
    """delay_ms: what each call that changes files takes longer, so that a run of a few steps is still there to be stopped."""
    more = {"stderr": subprocess.PIPE, **more}
    if delay_ms:
        env = {"LD_PRELOAD": str(BUILD / "librecord_calls.so"), "TIERFLOW_CALL_DELAY_MS": str(delay_ms), **(env or {})}
    return subprocess.Popen([str(PROGRAM), *map(str, words)], cwd=work, text=True, env={**os.environ, **(env or {})}, **more)


def small(*more):
    """Options of a small run; those in `more` replace them."""
    options = {"--device": "cpu", "--device-memory": "64MiB", "--host-memory": "64MiB", "--sequence-length": "128", "--micro-batch": "2"}
    return [*(word for option, value in options.items() if option not in more for word in (option, value)), *more]


def on_a_card(words):
    """Words of a plan without storage, for a machine of the tables: it measures nothing."""
    return [*changed(words, {"--device": "cuda", "--device-memory": "1GiB"}), "--machine", "rtx4090-128gb-2nvme"]


def steps_of(path):
    """Of a log that may be written at this moment."""
    whole = path.read_text().rpartition("\n")[0]
    return [record for record in map(json.loads, whole.splitlines()) if "loss" in record]


def wait_until(condition, seconds=60):
    deadline = time.time() + seconds
    while not condition():
        assert time.time() < deadline, "it never came to that"
        time.sleep(0.02)


def wait_until_stopped(process):
    """Until it stands still (`stop` in $TIERFLOW_FAIL), or has ended."""
    stat = pathlib.Path(f"/proc/{process.pid}/stat")
    wait_until(lambda: process.poll() is not None or stat.read_text().rsplit(")", 1)[1].split()[0] == "T")


def while_it_stands(process, act):
    """Does that while the process stands still, and lets it end: what it said."""
    try:
        wait_until_stopped(process)
        act()
        process.send_signal(signal.SIGCONT)
        return process.communicate(timeout=60)[1]
    finally:
        process.kill()
        process.wait()


def damage(path, begin=MIB):
    """Other bytes, from there to the end."""
    with path.open("r+b") as file:
        file.seek(begin)
        file.write(os.urandom(path.stat().st_size - begin))


def the_error(stderr):
    """The one line that a failure is."""
    lines = [line for line in stderr.splitlines() if line.startswith("tierflow: ")]
    assert len(lines) == 1, stderr
    return lines[0]
