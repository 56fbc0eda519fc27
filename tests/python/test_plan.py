"""`tierflow plan` from the outside, and its numbers beside what a run then does."""
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import time

import pytest

from test_train import BUILD, PROGRAM, config

pytestmark = pytest.mark.skipif(not (BUILD / "libtierflow_train.so").exists(), reason="built without LibTorch")



def options(**given):
    """A run that streams on the CPU; options given replace those here, None leaves one out."""
    usual = dict(device="cpu", device_memory="24MiB", host_memory="2MiB", storage="state", sequence_length="128", micro_batch="2")
    words = [word for name, value in {**usual, **given}.items() if value is not None for word in ("--" + name.replace("_", "-"), str(value))]
    return [*words, "--allow-buffered", "--allow-any-filesystem"]


SMALL = options()


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A small model and a cache that the tests of this file share: it is measured once."""
    folder = tmp_path_factory.mktemp("plan")
    (folder / "config.json").write_text(json.dumps(config(hidden=128, layers=6)))
    text = "".join(p.read_text(errors="replace") for p in sorted(pathlib.Path(os.__file__).parent.glob("*.py"))[:20])
    (folder / "text.txt").write_text(text)
    return folder


def run(work, *words, ok=True, **environment):
    done = subprocess.run([str(PROGRAM), *map(str, words)], cwd=work, capture_output=True, text=True, timeout=300,
                          env={**os.environ, "XDG_CACHE_HOME": str(work / "cache"), **environment})
    assert not ok or done.returncode == 0, done.stderr
    return done


def plan(work, *more, of=SMALL):
    return json.loads(run(work, "plan", "--config", "config.json", *of, "--json", *more).stdout)


def test_adds_up_and_shows_what_keeps_32_bit_moments(work):
    planned = plan(work)
    parameters = planned["model"]["parameters"]
    layers = planned["precision"]["layers"]
    assert sum(row["parameters"] for row in layers) == parameters
    by_kind = {(row["layers"], row["precision"]): row for row in layers}
    embedding = by_kind["embedding", "fp32-master+adam32"]
    assert embedding["parameters"] == 256 * 128 and embedding["bytes"] == 12 * 256 * 128
    assert by_kind["layers.*", "fp32-master+adam8"]["units"] == 6
    norms = 13 * 128  # two a block, and the last one
    assert planned["precision"]["moments_32"]["parameters"] >= embedding["parameters"] + norms
    storage = planned["storage"]
    assert storage["weights"] + storage["state"] == pytest.approx(sum(row["bytes"] for row in layers), rel=0.01)
    assert storage["bytes"] >= storage["weights"] + storage["state"] + storage["staged_gradients"]
    assert planned["host"]["used"] <= planned["host"]["budget"] and planned["memory"]["device_peak"] <= planned["device"]["budget"]
    step = planned["step"]
    assert step["tokens"] == 256 and step["tokens_per_s"] == pytest.approx(256 / step["step_s"])
    assert step["limit"] in step["lanes"] and max(lane["busy_s"] for lane in step["lanes"].values()) <= step["step_s"] * 1.001
    table = run(work, "plan", "--config", "config.json", *SMALL).stdout
    assert "limited by " + step["limit"] in table and "fp32-master+adam32" in table and "clip" in table


def test_says_how_many_parameters_a_token_takes_and_from_when_on_streaming_hides(work):
    dense = plan(work)
    assert dense["model"]["active_parameters"] == dense["model"]["parameters"] - 255 * 128  # of the embedding one row
    at = dense["step"]["break_even"]
    assert at["tokens"] == 256 * at["micro_batches"] and (at["hidden_last"] is None) == (at["micro_batches"] == 1)
    enough = plan(work, "--micro-batches", 2 * at["micro_batches"])["step"]
    assert enough["limit"] == "compute" and enough["break_even"]["micro_batches"] <= 2 * at["micro_batches"]
    table = run(work, "plan", "--config", "config.json", *SMALL).stdout
    assert "streaming hides behind compute" in table and " active in a token" not in table
    experts = config(hidden=128, layers=2, num_local_experts=4, num_experts_per_tok=1)
    (work / "experts.json").write_text(json.dumps({**experts, "architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}))
    elsewhere = ["plan", "--config", "experts.json", "--machine", "rtx4090-128gb-2nvme", "--sequence-length", "128"]  # nothing is measured
    mixture = json.loads(run(work, *elsewhere, "--json").stdout)["model"]
    of_expert = 3 * 128 * experts["intermediate_size"]
    assert mixture["experts"] == 4 and mixture["active_parameters"] == mixture["parameters"] - 255 * 128 - 2 * 3 * of_expert
    assert " active in a token)" in run(work, *elsewhere).stdout


@pytest.mark.parametrize("clip", ["1.0", "none"])
def test_a_run_moves_the_bytes_and_takes_the_memory_that_were_planned(work, clip):
    planned = plan(work, "--clip", clip)
    assert planned["clip"]["staged"] == (clip != "none")
    assert planned["storage"]["staged_gradients"] > 0 or clip == "none"  # without clipping, those of deferred updates, if that is faster
    done = run(work, "train", "--config", "config.json", "--data", "text.txt", *SMALL, "--clip", clip, "--steps", "5", "--held-out", "0",
               "--out", f"out-{clip}", "--log-json", "log.json", "--trace", "trace.json")
    records = [json.loads(line) for line in (work / "log.json").read_text().splitlines()]
    last = [record for record in records if "step_s" in record][-1]
    for lane, moved in planned["step"]["lanes"].items():
        if lane != "disk_write":  # writes of one step may end in the next
            assert moved["bytes"] == last["lanes"][lane]["bytes"], lane
    summary = records[-1]["summary"]
    assert summary["storage_bytes"] == planned["storage"]["bytes"]
    assert summary["tb_written_per_step"] == pytest.approx(planned["wear"]["tb_written_per_step"], rel=0.3)
    assert summary["host_memory"] == planned["host"]["used"] == planned["memory"]["host"]
    assert summary["device_memory_peak"] == pytest.approx(planned["memory"]["device_peak"], rel=0.1)

    # The run knew the prediction, compared it, and drew both.
    assert summary["predicted"]["step_s"] == pytest.approx(planned["step"]["step_s"], rel=1e-6)
    assert summary["predicted"]["measured_step_s"] > 0
    assert "predicted: " in done.stderr and "measured" in done.stderr
    events = json.loads((work / "trace.json").read_text())["traceEvents"]
    processes = {event["args"]["name"]: event["pid"] for event in events if event["name"] == "process_name"}
    assert processes.keys() == {"measured", "predicted"}
    computed = {pid: sum(event["ph"] == "X" and event["pid"] == pid and event["name"].startswith("backward") for event in events)
                for pid in processes.values()}
    assert len(set(computed.values())) == 1, "the same four steps in both"


def test_measures_once_and_again_where_asked_or_where_the_cache_is_damaged(work):
    first = plan(work)
    cache = sorted((work / "cache" / "tierflow").iterdir())
    assert [path.name.split("-")[0] for path in cache] == ["machine", "model"]
    log = work / "loaded"
    run(work, "plan", "--config", "config.json", *SMALL, "--micro-batches", "3", "--clip", "none", LD_DEBUG="files", LD_DEBUG_OUTPUT=str(log))
    loaded = "".join(path.read_text(errors="replace") for path in work.glob("loaded.*"))
    assert "libc.so" in loaded and "libtorch" not in loaded
    again = plan(work)
    assert again["machine"] == first["machine"] and again["step"] == first["step"]

    before = [path.read_bytes() for path in cache]
    run(work, "plan", "--config", "config.json", *SMALL, "--refresh-profile")
    assert all(path.read_bytes() != old for path, old in zip(cache, before))

    for damage in b"{", before[0][:24], b"\x80\x05pickle", before[0].replace(b'"upload":', b'"upload":-'):
        cache[0].write_bytes(damage)
        done = run(work, "plan", "--config", "config.json", *SMALL)
        assert done.stderr.count("warning") == 1 and cache[0].name in done.stderr, done.stderr
        assert json.loads(cache[0].read_text())["version"] == json.loads(before[0])["version"]
        assert len([*(work / "cache" / "tierflow").iterdir()]) == 2


def test_another_micro_batch_is_another_measurement_and_depth_is_not(work):
    plan(work)
    before = {*(work / "cache" / "tierflow").iterdir()}
    (work / "deep.json").write_text(json.dumps(config(hidden=128, layers=60)))
    deep = json.loads(run(work, "plan", "--config", "deep.json", *SMALL, "--json").stdout)
    assert deep["model"]["stages"] == 62 and {*(work / "cache" / "tierflow").iterdir()} == before
    run(work, "plan", "--config", "config.json", *options(micro_batch=1))
    assert len({*(work / "cache" / "tierflow").iterdir()} - before) == 1


def test_a_cache_that_cannot_be_written_is_a_warning(work):
    done = run(work, "plan", "--config", "config.json", *options(sequence_length=16, micro_batch=1), XDG_CACHE_HOME="/proc/nowhere")
    assert "warning: " in done.stderr and "measures again" in done.stderr and "step" in done.stdout


def test_what_cannot_work_is_refused(work):
    small = run(work, "plan", "--config", "config.json", *options(device_memory="1MiB"), ok=False)
    assert small.returncode == 2 and "--device-memory" in small.stderr and "smallest that works" in small.stderr and not small.stdout
    assert run(work, "plan", *SMALL, ok=False).returncode == 2
    assert run(work, "plan", "--config", "config.json", "--refresh", ok=False).returncode == 2
    missing = run(work, "plan", "--config", "missing.json", ok=False)
    assert missing.returncode == 3 and "missing.json" in missing.stderr
    long = run(work, "plan", "--config", "config.json", "--sequence-length", "100000", ok=False)
    assert long.returncode == 2 and "positions" in long.stderr
    untraceable = run(work, "plan", "--config", "config.json", *SMALL, "--trace", "no/such/folder/t.json", ok=False)
    assert untraceable.returncode == 4
    assert not (work / "state").exists() and not (work / "out").exists()


def test_reads_the_configuration_file_of_a_run(work):
    (work / "run.json").write_text(json.dumps({"config": "config.json", "data": ["text.txt"], "out": "out", "steps": 3, "device": "cpu",
                                               "device-memory": "24MiB", "host-memory": "2MiB", "storage": ["state"], "sequence-length": 128,
                                               "micro-batch": 2, "allow-buffered": True, "allow-any-filesystem": True}))
    done = json.loads(run(work, "plan", "--config-file", "run.json", "--json", "--trace", "predicted.json").stdout)
    assert done["step"]["step_s"] == plan(work)["step"]["step_s"]
    events = json.loads((work / "predicted.json").read_text())["traceEvents"]
    assert {event["args"]["name"] for event in events if event["name"] == "process_name"} == {"predicted"}


def test_chooses_micro_batches_for_so_many_tokens(work):
    planned = plan(work, "--tokens-per-step", 1100)
    shapes = {(shape["micro_batch"], shape["micro_batches"]): shape for shape in planned["step_shapes"]}
    assert set(shapes) == {(1, 8), (2, 4), (4, 2), (8, 1)}
    fastest = max(shapes.values(), key=lambda shape: shape["tokens_per_s"])
    assert planned["step"]["tokens"] == 1024 and planned["step"]["tokens_per_s"] == pytest.approx(fastest["tokens_per_s"])
    again = plan(work, "--micro-batches", fastest["micro_batches"], of=options(micro_batch=fastest["micro_batch"]))
    assert again["step"]["step_s"] == pytest.approx(planned["step"]["step_s"]) and again["step_shapes"] == []
    tight = plan(work, "--tokens-per-step", 1024, of=options(device_memory="9MiB"))["step_shapes"]
    assert tight[0]["refused"] is None and "--device-memory" in tight[-1]["refused"]
    refused = run(work, "plan", "--config", "config.json", *SMALL, "--tokens-per-step", "100", ok=False)
    assert refused.returncode == 2 and "one sequence of 128 tokens" in refused.stderr


def cached(cache, what):
    """The one file of what was measured."""
    (path,) = (cache / "tierflow").glob(f"{what}-*.json")
    return path


def change(path, edit):
    content = json.loads(path.read_text())
    edit(content["profile"])
    path.write_text(json.dumps(content))


@pytest.fixture
def measured(work, tmp_path):
    """A copy of the cache, with a profile of SMALL, for a test that writes to it; and the environment that names it."""
    plan(work)
    (tmp_path / "cache" / "tierflow").mkdir(parents=True)
    for path in (work / "cache" / "tierflow").iterdir():
        key = json.loads(path.read_text())["key"]
        if (key.get("micro_batch", 2), key.get("sequence_length", 128)) == (2, 128):
            shutil.copy(path, tmp_path / "cache" / "tierflow")
    return tmp_path / "cache", {"XDG_CACHE_HOME": str(tmp_path / "cache")}


def readings(spread, other_cores):
    return {"spread": spread, "other_cores": other_cores, "corrected": False}


def measures_the_stages(work, *words, **environment):
    """Whether the plan says so, and how long it will take; it is not waited for."""
    with subprocess.Popen([str(PROGRAM), "plan", "--config", "config.json", *words], cwd=work, stdout=subprocess.DEVNULL,
                          stderr=subprocess.PIPE, text=True, env={**os.environ, **environment}) as process:
        try:
            return any("measuring the model's stages: about " in line for line in process.stderr)
        finally:
            process.kill()


def test_says_how_far_the_profile_can_be_trusted(work, measured):
    cache, environment = measured
    model, machine = cached(cache, "model"), cached(cache, "machine")
    for file in model, machine:
        change(file, lambda p: p.update(readings=readings(0.01, 0.0)))
    profile = json.loads(run(work, "plan", "--config", "config.json", *SMALL, "--json", **environment).stdout)["profile"]
    assert profile["scaled_from_width"] is None and profile["doubt"] is None and not profile["stages"]["corrected"]
    assert profile["machine"] == profile["stages"] == readings(0.01, 0.0)

    change(model, lambda p: p.update(width=0.25, seconds_allowed=60))
    change(machine, lambda p: p.update(readings=readings(0.5, 1.5)))
    done = run(work, "plan", "--config", "config.json", *SMALL, "--json", **environment)
    profile = json.loads(done.stdout)["profile"]
    assert "measuring" not in done.stderr and profile["scaled_from_width"] == 0.25
    assert "25% of their width" in profile["doubt"] and "other programs took 1.5 of" in profile["doubt"] and "50% apart" in profile["doubt"]
    assert "the model was measured" not in profile["doubt"]
    table = run(work, "plan", "--config", "config.json", *SMALL, **environment).stdout
    assert profile["doubt"] + "; --refresh-profile measures again" in table

    # What a run scaled for want of time is measured again by a plan.
    change(model, lambda p: p.update(seconds_allowed=8))
    assert measures_the_stages(work, *SMALL, **environment)


def test_a_run_corrects_the_profile_that_it_contradicts(work, measured, tmp_path):
    cache, environment = measured
    before = json.loads(run(work, "plan", "--config", "config.json", *SMALL, "--json", **environment).stdout)

    def slow(profile):  # measured beside very many other programs
        profile["readings"] = readings(10.0, 1000.0)
        for stage in profile["stages"].values():
            for name in stage:
                stage[name] *= 1 if name.endswith("_bytes") else 100
    change(cached(cache, "model"), slow)
    words = ["train", "--config", "config.json", "--data", "text.txt", *SMALL, "--held-out", "0", "--log-json", "corrected.json"]
    done = run(work, *words, "--steps", "12", "--out", tmp_path / "out", **environment)
    assert done.stderr.count("the profile is corrected") == 1 and "that is rough" in done.stderr, done.stderr
    measured = [json.loads(line) for line in (work / "corrected.json").read_text().splitlines()][-1]["summary"]["predicted"]["measured_step_s"]
    after = json.loads(run(work, "plan", "--config", "config.json", *SMALL, "--json", **environment).stdout)
    assert after["profile"]["stages"]["corrected"] and after["profile"]["machine"]["corrected"]
    assert measured / 3 < after["step"]["step_s"] < 3 * measured
    assert after["step"]["step_s"] < 20 * before["step"]["step_s"]
    # Two steps are too few to judge by.
    change(cached(cache, "model"), slow)
    assert "the profile is corrected" not in run(work, *words, "--steps", "2", "--out", tmp_path / "two", **environment).stderr


SHORT = options(sequence_length=32, micro_batch=1)


def test_a_long_run_without_a_profile_measures_this_machine_first(work, tmp_path):
    losses = {}

    def logged(name):
        path = tmp_path / f"{name}.json"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line)["loss"] for line in lines if '"grad_norm"' in line and line.endswith("}")][:3]

    def words(name):
        return ["train", "--config", "config.json", "--data", "text.txt", *SHORT, "--held-out", "0", "--lr-schedule", "constant",
                "--durability", "export-only", "--out", tmp_path / name, "--log-json", tmp_path / f"{name}.json"]

    def train(name, *more):
        """Three steps of a long run; what it said."""
        with open(tmp_path / f"{name}.err", "w") as said:
            process = subprocess.Popen([str(PROGRAM), *map(str, words(name)), "--steps", "100000000", *more], cwd=work, stderr=said,
                                       env={**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")})
            end = time.monotonic() + 200
            while len(logged(name)) < 3 and process.poll() is None and time.monotonic() < end:
                time.sleep(0.05)
            process.send_signal(signal.SIGINT)
            code = process.wait(timeout=100)
        losses[name] = logged(name)
        text = (tmp_path / f"{name}.err").read_text()
        assert code == 130, text
        return text

    limited = train("limited", "--max-tb-written", "1000")
    assert "measuring" not in limited and not (tmp_path / "cache").exists(), "under a limit nothing is written to measure"
    first = train("first")
    assert "this machine has no profile for this run yet" in first and "predicted: " in first
    assert {path.name.split("-")[0] for path in (tmp_path / "cache" / "tierflow").iterdir()} == {"machine", "model"}
    assert not (work / "state").exists()
    again = train("again")
    assert "predicted: " in again and "measuring" not in again
    short = run(work, *words("short"), "--steps", "3", XDG_CACHE_HOME=str(tmp_path / "empty"))
    assert "no prediction" in short.stderr and not (tmp_path / "empty").exists(), "a short run does not pay for it"
    losses["short"] = logged("short")
    assert len(losses["short"]) == 3 and losses["first"] == losses["again"] == losses["short"]


def test_plans_for_a_machine_that_is_not_here_and_names_the_source_of_each_number(work):
    words = ["plan", "--config", "config.json", "--sequence-length", "128", "--clip", "none"]
    began = time.monotonic()
    there = json.loads(run(work, *words, "--machine", "rtx4090-128gb-2nvme", "--json", CUDA_VISIBLE_DEVICES="").stdout)
    assert time.monotonic() - began < 30  # nothing is measured
    modelled = there["modelled"]
    assert modelled["name"] == "rtx4090-128gb-2nvme" and modelled["drives"] == 2
    assert all(figure["value"] > 0 and figure["source"] for figure in modelled["figures"]) and len(modelled["figures"]) == 16
    figures = {figure["name"]: figure["value"] for figure in modelled["figures"]}
    assert there["machine"]["upload"] == figures["card upload"] and there["machine"]["disk_read"] == 2 * figures["drive read"]
    assert there["machine"]["memory"] == figures["host memory rate"]
    assert "not measured" in modelled["note"] and "not measured" in there["profile"]["doubt"]
    assert there["host"]["budget"] == 112 << 30 and 20 << 30 < there["device"]["budget"] < 24 << 30
    assert there["storage"]["folders"] == ["nvme0", "nvme1"] and there["storage"]["free"] is None
    assert not (work / "nvme0").exists() and there["step"]["step_s"] > 0
    table = run(work, *words, "--machine", "h200-1024gb").stdout
    assert "computed from published rates, not measured" in table and "data sheet" in table and "--refresh-profile" not in table
    chosen = json.loads(run(work, *words, "--machine", "rtx4090-128gb-2nvme", "--host-memory", "64GiB", "--json").stdout)
    assert chosen["host"]["budget"] == 64 << 30
    for more, said in [(["--machine", "rtx4091-128gb"], "h100, h200, rtx3090, rtx4090, rtx5090"),
                       (["--machine", "rtx4090-128gb", "--storage", "state"], "add them to its name, as in -2nvme"),
                       (["--machine", "rtx4090-128gb-2nvme", "--storage", "state"], "has drives of its own: leave out --storage"),
                       (["--machine", "rtx4090-128gb", "--device", "cpu"], "computes on its card"),
                       (["--machine", "rtx4090-64gb", "--host-memory", "65GiB"], "has 64.0 GiB")]:
        refused = run(work, *words, *more, ok=False)
        lines = [line for line in refused.stderr.splitlines() if not line.startswith("budgets")]
        assert refused.returncode == 2 and len(lines) == 1 and said in lines[0], refused.stderr


def test_a_step_of_few_tokens_has_a_speed(work):
    large = {"hidden_size": 16384, "num_hidden_layers": 64, "intermediate_size": 65536, "num_attention_heads": 128, "num_key_value_heads": 128}
    (work / "large.json").write_text(json.dumps({**config(), **large}))
    table = run(work, "plan", "--config", "large.json", "--machine", "rtx4090-128gb-2nvme", "--sequence-length", "16", "--tokens-per-step", "16").stdout
    speeds = re.findall(r"(\S+) tokens/s", table)
    assert len(speeds) == 4 and all(0.01 < float(speed) < 1 for speed in speeds), table


def test_the_reference_of_pairs_is_planned(work):
    run(work, "init", "--config", "config.json", "--out", "of-pairs")
    words = ["plan", "--model", "of-pairs", "--machine", "rtx4090-128gb-2nvme", "--sequence-length", "64", "--json"]
    found = {method: json.loads(run(work, *words, "--loss", "dpo", "--method", method).stdout)["reference"] for method in ("full", "lora")}
    assert found["full"]["computed"] == "before the first step" and found["full"]["pairs_per_s"] > 0 and found["full"]["host_bytes_per_pair"] == 32
    assert found["lora"] == {"computed": "in the visits of each step", "pairs_per_s": None, "host_bytes_per_pair": 0, "storage_bytes_per_pair": 0}
    assert json.loads(run(work, *words).stdout)["reference"] is None


def test_the_budget_of_a_machine_is_the_one_that_the_table_has(work):
    """With what CUDA's context takes."""
    done = run(work, "plan", "--config", "config.json", "--machine", "rtx4090-128gb-2nvme", "--sequence-length", "128")
    budget = re.search(r"budgets: device (\S+ \S+) with \S+ \S+ for CUDA's own context", done.stderr)[1]
    assert f" of {budget} on cuda" in done.stdout
    done = run(work, "plan", "--config", "config.json", "--machine", "rtx4090-128gb-2nvme", "--sequence-length", "128", "--device-memory", "8GiB")
    assert "budgets: device 8.00 GiB, host" in done.stderr and " of 8.00 GiB on cuda" in done.stdout
