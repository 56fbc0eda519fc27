"""The steps of each part, the most important first. The limits of a part's steps add up to less than its SECONDS: a step that hangs takes no
time from those behind it."""

import dataclasses
import json
import pathlib
import shutil
import subprocess


SECONDS = {0: 400, 1: 530, 2: 530, 3: 530}


@dataclasses.dataclass
class Place:
    kit: pathlib.Path
    out: pathlib.Path
    work: pathlib.Path
    python: str
    rehearse: bool
    card: int | None = None  # bytes of the card's memory that are free, where known

    def script(self, name, *words):
        return [self.python, self.kit / "scripts" / name, *words]

    def program(self, name, *words):
        return [self.kit / "bin" / name, *words]


@dataclasses.dataclass
class Step:
    name: str
    timeout: float  # seconds that are its own; what the steps before it left comes on top
    command: list
    gpu: bool = False  # is not tried without one
    gtest: bool = False  # leaves a report of its tests
    absent: str = ""  # what this machine lacks for it


def sanitizer():
    """Path of compute-sanitizer, or None."""
    return shutil.which("compute-sanitizer") or next((str(path) for path in sorted(pathlib.Path("/usr/local").glob("cuda*/bin/compute-sanitizer"))), None)


def unlike_a_drive(folder):
    """The file system of a folder that is on no drive, as containers have it; else None."""
    try:
        kind = subprocess.run(["stat", "--file-system", "--format", "%T", folder], capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return None
    return kind if kind.startswith(("overlay", "tmpfs", "ramfs", "fuse", "nfs", "v9fs", "9p")) else None


def touch(at, gib, seconds):
    """Memory that a virtual machine hands out as it is used: used once, before anything is timed."""
    return Step("touch_memory", seconds, at.script("touch_memory.py", "--gib", 0.125 if at.rehearse else gib))


def inventory(at, seconds):
    return Step("inventory", seconds, at.script("inventory.py", "--kit", at.kit, "--folder", at.work))


def device_contract(at, seconds):
    return Step("device_contract", seconds, at.program("device_test"), gtest=True)


def optimizer_kernels(at, seconds):
    # The test that a build without CUDA says so skips itself in one with CUDA.
    return Step("optimizer_kernels", seconds, at.program("optim_gpu_test", "--gtest_filter=-DeviceUpdateBuild.*"), gpu=True, gtest=True)


# What gpu_test has, without what it also computes on the CPU, in the order in which it is worth knowing: a program runs its tests in an order
# of its own, and a card may be gone, or the time be over, before the last one.
ON_GPU = {
    "model_kernels": "*RowKernelsOnGpu.*:DenseWeightsOnGpu.*:*AttentionOn.*/cuda:ProductsOnGpu.*",
    "streamed_is_resident": "*OnGpu.StreamedIsResident/*:*OnGpu.UpdatesHaveTheBitsOfTheHost/*",
    "models_on_gpu": "*OnGpu.ComputesWhatTheCpuDoes/*:OneGpu.AdamW*",
    "long_on_gpu": "OneGpu.*:*Devices.*/cuda:-OneGpu.AdamW*",
}


def on_gpu(at, name, seconds):
    return Step(name, seconds, at.program("gpu_test", f"--gtest_filter={ON_GPU[name]}"), gpu=True, gtest=True)


def correctness(at):
    bench = ["--dir", at.work / "bench", "--json", *(["--size", "16MiB", "--block", "1MiB"] if at.rehearse else ["--size", "2GiB", "--block", "4MiB", "--depth", 16])]
    if unlike_a_drive(at.work):
        bench += ["--allow-buffered", "--allow-any-filesystem"]
    steps = [
        inventory(at, 40),
        device_contract(at, 40),
        optimizer_kernels(at, 60),
        on_gpu(at, "model_kernels", 40),
        on_gpu(at, "streamed_is_resident", 80),
        on_gpu(at, "models_on_gpu", 30),
        on_gpu(at, "long_on_gpu", 30),
        Step("drive", 30, at.program("tierflow", "bench", "storage", *bench)),
    ]
    tool = sanitizer()
    for check, seconds in (("memcheck", 45), ("racecheck", 25), ("synccheck", 20)):
        for name, tests in (("device_test", "*cuda*"), ("optim_gpu_test", "*OnGpu*adamw_block8*split:SumsOnGpu*")):
            command = [tool or "compute-sanitizer", "--tool", check, "--error-exitcode", 1, *at.program(name, f"--gtest_filter={tests}")]
            steps.append(Step(f"{check}.{name}", seconds, command, gpu=True, gtest=True, absent="" if tool else "compute-sanitizer is not installed"))
    return steps


def run(at, model, length):
    """What a streamed and a resident run of one shape are both told: `length` tokens a sequence, and 65,536 a step."""
    if at.rehearse:
        model, shape = model.split("-")[0] + "-tiny", ["--sequence-length", length // 128, "--micro-batch", 8192 // length, "--micro-batches", 2]
    else:
        tokens, micro_batches = (8192, 8) if model == "llama-8b" else (16384, 4)
        shape = ["--sequence-length", length, "--micro-batch", tokens // length, "--micro-batches", micro_batches]
    return ["--config", at.kit / f"data/{model}.json", "--device", "cpu" if at.rehearse else "cuda", *shape]


def at_most(at, gib):
    """A budget of the card's memory: so much, or four fifths of what a smaller card has free, in whole GiB."""
    return f"{gib if at.card is None else min(gib, at.card * 4 // 5 >> 30)}GiB"


def parameters(config):
    """Of resident.py's model."""
    hidden, kv = config["hidden_size"], config["hidden_size"] // config["num_attention_heads"] * config["num_key_value_heads"]
    block = hidden * (2 * hidden + 2 * kv + 3 * config["intermediate_size"] + 2)
    return config["num_hidden_layers"] * block + hidden + hidden * config["vocab_size"] * (1 if config["tie_word_embeddings"] else 2)


def resident_bytes(config, tokens):
    """What resident.py takes besides activations: weights, gradients and both moments in bf16, and as the backward of `tokens` tokens begins,
    the logarithms of their probabilities and two gradients of that size in fp32."""
    return 4 * 2 * parameters(config) + 3 * 4 * tokens * config["vocab_size"]


def streamed(at, name, model, length, seconds, steps, host, storage=False, device=None, kernels=False):
    """device: the budget of the card's memory; None: most of what is free, so that state stays there if it fits. kernels: two steps more, of
    which the last one's kernels are logged, where the kit has what logs them."""
    small = ["--host-memory", "64MiB", "--device-memory", "64MiB"] if at.rehearse else ["--host-memory", host, *(["--device-memory", device] if device else [])]
    tokens = "tokens-tiny.npy" if at.rehearse else "tokens.npy"
    more = ["--storage", at.work / "store", "--fit-seconds", int(seconds * 0.8)] if storage else []
    log = at.kit / "lib/libkernel_log.so"
    if kernels and log.exists() and not at.rehearse:
        more += ["--kernels", log]
    return Step(name, seconds, at.script("streamed.py", *run(at, model, length), "--program", at.kit / "bin/tierflow", "--data", at.kit / "data" / tokens, "--steps", steps,
                                         "--work", at.work / name, "--trace", at.out / f"{name}.trace.json.gz", *small, *more))


def resident(at, name, model, length, seconds, steps):
    words, absent = run(at, model, length), ""
    if at.card is not None and not at.rehearse:
        options = dict(zip(words[::2], words[1::2]))
        needed = resident_bytes(json.loads(options["--config"].read_text()), length * options["--micro-batch"])
        if needed > at.card:
            absent = f"{at.card / (1 << 30):.1f} GiB of the card are free, and a resident run takes more than {needed / (1 << 30):.1f} GiB"
    return Step(name, seconds, at.script("resident.py", *words, "--steps", steps), absent=absent)


def lanes(at):
    def lane(name, seconds, gpu=False):
        return Step(name, seconds, at.script("lanes.py", name, "--device", "cpu" if at.rehearse else "cuda"), gpu=gpu)

    optimizer = ["--elements", 1 << 18, "--repeats", 1] if at.rehearse else ["--elements", 1 << 27, "--repeats", 3]
    return [
        touch(at, 32, 25),
        Step("device_bench", 40, at.program("device_bench", "cpu" if at.rehearse else "cuda")),
        lane("copies", 30, gpu=True),
        lane("overlap", 30, gpu=True),
        lane("products", 30),
        lane("weight_gradients", 30),
        lane("attention", 45),
        lane("kernels", 35),
        streamed(at, "streamed_1b", "llama-1b", 4096, 115, 5, "20GiB", device=at_most(at, 16), kernels=True),
        resident(at, "resident_1b", "llama-1b", 4096, 50, 4),
        streamed(at, "streamed_mixture", "mixture", 4096, 60, 2, "20GiB", device=at_most(at, 16), kernels=True),
        Step("cpu_update", 40, at.program("tierflow", "bench", "optimizer", "--json", *optimizer)),
    ]


def large(at):
    return [
        touch(at, 64, 45),
        streamed(at, "streamed_8b_8192", "llama-8b", 8192, 160, 3, "most", device=at_most(at, 40), kernels=True),
        resident(at, "resident_8b_8192", "llama-8b", 8192, 75, 3),
        streamed(at, "whole_card_8b_2048", "llama-8b", 2048, 110, 3, "most"),
        streamed(at, "streamed_8b_drive", "llama-8b", 8192, 135, 2, "40GiB", storage=True, device=at_most(at, 40)),
    ]


def short(at):
    """For a machine that one has for a quarter of an hour: what answers most, of all three parts."""
    return [
        inventory(at, 20),
        device_contract(at, 20),
        optimizer_kernels(at, 35),
        on_gpu(at, "model_kernels", 45),
        touch(at, 64, 24),
        streamed(at, "streamed_8b_8192", "llama-8b", 8192, 125, 3, "most", device=at_most(at, 40), kernels=True),
        resident(at, "resident_8b_8192", "llama-8b", 8192, 51, 2),
        on_gpu(at, "streamed_is_resident", 55),
        on_gpu(at, "models_on_gpu", 20),
    ]


def steps(part, at):
    return {0: short, 1: correctness, 2: lanes, 3: large}[part](at)
