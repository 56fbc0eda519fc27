"""`tierflow plan`, then `tierflow train` of random weights, ended after the last step without a result. One JSON line for the plan, one a
step, one for the run: median step, what was predicted of it, and the share of copying that computation hid. SIGTERM ends it with what
was measured by then. Everything under --work and --storage that it made is removed."""

import argparse
import gzip
import json
import os
import pathlib
import shutil
import signal
import statistics
import subprocess
import sys
import time

import kernel_times
from bench import hidden_share
from parts import unlike_a_drive


class Stop(Exception):
    pass


def stop(_number, _frame):
    raise Stop


def show(**values):
    print(json.dumps(values), flush=True)


def number_in(path):
    """What a file of the kernel says; None where it is missing or no number."""
    try:
        return int(pathlib.Path(path).read_text())
    except (OSError, ValueError):
        return None


def memory_available(root=pathlib.Path("/")):
    """Bytes, of the machine and of the container, if one has a limit. Page cache that the container could give back counts as taken."""
    with open(root / "proc/meminfo") as file:
        free = next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable:"))
    for most, taken in (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")):
        limit, used = (number_in(root / "sys/fs/cgroup" / name) for name in (most, taken))
        if limit is not None and used is not None:
            free = min(free, max(0, limit - used))
    return free


def on_a_drive(folder):
    """Options for a folder on no drive; said, because its speed is not a drive's."""
    kind = unlike_a_drive(folder)
    if kind is None:
        return []
    show(warning=f"{folder} is on {kind}: speeds will not be a drive's")
    return ["--allow-any-filesystem", "--allow-buffered"]


def plan(args, config, options):
    """The plan's JSON and its exit code; what it says goes to standard error."""
    begin = time.monotonic()
    done = subprocess.run([args.program, "plan", "--json", "--config", config, *options], stdout=subprocess.PIPE, text=True, check=False)
    try:
        made = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        sys.exit(done.returncode or 1)
    show(plan={"seconds": round(time.monotonic() - begin, 1), "step": made["step"], "memory": made["memory"], "activations": made["activations"], "updates": made["updates"],
               "storage_bytes": made["storage"]["bytes"], "storage_free": made["storage"]["free"], "machine": made["machine"], "profile": made["profile"]})
    return made


def layers_that_fit(made, layers, steps, seconds):
    """So many layers that the state fits the drive, and filling it and the steps the time. The drive is taken to be filled at the rate at
    which a step writes."""
    written = made["step"]["lanes"]["disk_write"]
    rate = written["bytes"] / written["busy_s"] if written["busy_s"] > 0 else float("inf")
    needed = made["step"]["step_s"] * (steps + 0.5) + made["storage"]["bytes"] / rate
    share = min(1.0, seconds / needed if needed > 0 else 1.0, 0.9 * made["storage"]["free"] / max(1, made["storage"]["bytes"]))
    return max(2, int(layers * share)) if share < 1 else layers


def whole_trace(path, patience):
    """The trace's events as soon as it is whole; None where it does not become so."""
    end = time.monotonic() + patience
    while time.monotonic() < end:
        try:
            return json.loads(path.read_text())["traceEvents"]
        except (OSError, ValueError):
            time.sleep(0.1)
    return None


def steps_of(log, seen):
    """The log's steps after the first `seen`."""
    try:
        text = log.read_text()
    except OSError:
        return []
    lines = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
    return [line for line in lines if "loss" in line and "step" in line][seen:]


def log_kernels(args, log, logged, child):
    """Has two more steps run, shows where the time of the last one's kernels went, and keeps their log beside the trace."""
    (args.work / "log-kernels").touch()
    while len(steps := steps_of(log, args.steps)) < 2 and child.poll() is None:
        time.sleep(0.02)
    time.sleep(1.5)  # the log is written twice a second
    try:
        found = kernel_times.summary(logged, steps[-1]["step_s"] if steps else 0)
        for values in found or [{"kernels_not_logged": "the log holds no kernel"}]:
            show(**values)
        if args.trace:
            kernel_times.keep(logged, args.trace.with_name(args.trace.name.replace(".trace.json", ".kernels")))
    except OSError as error:
        show(kernels_not_logged=str(error))


def train(args, config, options):
    """Steps of one run, seconds from the command to the first step, the trace's events, and the process, killed but not waited for: it may
    take seconds to give its memory back."""
    log, trace = args.work / "log.jsonl", args.work / "trace.json"
    result = ["--no-export", "--durability", "export-only"] if args.storage else ["--out", args.work / "result"]
    more = 2 if args.kernels else 0  # one that is under way when the log begins, and one that is in it whole
    command = [args.program, "train", "--config", config, *options, *result, "--data", args.data, "--steps", args.steps + more, "--held-out", 0, "--log-json", log]
    if args.trace:
        command += ["--trace", trace]
    begin, all_steps, until_first, logged = time.monotonic(), [], None, args.work / "kernels.log"
    of_kernels = {"CUDA_INJECTION64_PATH": str(args.kernels.resolve()), "KERNEL_LOG": str(logged), "KERNEL_LOG_WHEN": str(args.work / "log-kernels")} if args.kernels else {}
    child = subprocess.Popen([*map(str, command)], stdin=subprocess.DEVNULL, env={**os.environ, **of_kernels})
    events = None
    try:
        while len(all_steps) < args.steps:
            ended = child.poll() is not None
            for step in steps_of(log, len(all_steps)):
                if until_first is None:
                    until_first = time.monotonic() - begin - step["step_s"]
                all_steps.append(step)
                show(step={key: step[key] for key in ("step", "loss", "step_s", "tokens_per_s", "limit", "lanes", "device_memory_peak", "host_memory", "gpu", "computed_again", "allocator_retries") if key in step})
            if ended:
                break
            time.sleep(0.05)
        if args.kernels and len(all_steps) == args.steps:
            log_kernels(args, log, logged, child)
        if args.trace and len(all_steps) == args.steps:
            events = whole_trace(trace, 10)
    except Stop:
        show(stopped=f"after {len(all_steps)} of {args.steps} steps")
    finally:
        child.kill()
    return all_steps, until_first, events, child


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--program", required=True)
    parser.add_argument("--config", type=pathlib.Path, required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--sequence-length", type=int, required=True)
    parser.add_argument("--micro-batch", type=int, required=True)
    parser.add_argument("--micro-batches", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--work", type=pathlib.Path, required=True)
    parser.add_argument("--storage", type=pathlib.Path)
    parser.add_argument("--host-memory", required=True, help="a size, or most: four fifths of what is free")
    parser.add_argument("--device-memory")
    parser.add_argument("--fit-seconds", type=float, help="with --storage: fewer layers where the whole model would take longer or more room")
    parser.add_argument("--trace", type=pathlib.Path, help="where the trace goes, compressed")
    parser.add_argument("--kernels", type=pathlib.Path, help="libkernel_log.so: two steps more, and what the kernels of the last one took")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, stop)
    shutil.rmtree(args.work, ignore_errors=True)
    args.work.mkdir(parents=True)
    host = str(memory_available() * 4 // 5) if args.host_memory == "most" else args.host_memory
    options = ["--device", args.device, "--sequence-length", str(args.sequence_length), "--micro-batch", str(args.micro_batch), "--micro-batches", str(args.micro_batches), "--host-memory", host]
    if args.device_memory:
        options += ["--device-memory", args.device_memory]
    code, child = 0, None
    try:
        if args.storage:
            args.storage.mkdir(parents=True, exist_ok=True)
            options += ["--storage", str(args.storage), *on_a_drive(args.storage)]
        config, layers = args.config, json.loads(args.config.read_text())["num_hidden_layers"]
        made = plan(args, config, options)
        if args.storage and args.fit_seconds:
            fewer = layers_that_fit(made, layers, args.steps, args.fit_seconds)
            if fewer < layers:
                config = args.work / "config.json"
                config.write_text(json.dumps({**json.loads(args.config.read_text()), "num_hidden_layers": fewer}))
                show(fewer_layers=fewer, of=layers)
                layers, made = fewer, plan(args, config, options)
        steps, until_first, events, child = train(args, config, options)
        if steps:
            counted = steps[1:] or steps
            seconds = statistics.median(step["step_s"] for step in counted)
            predicted = made["step"]["step_s"]
            show(layers=layers, tokens_per_s=round(statistics.median(step["tokens_per_s"] for step in counted), 1), step_s=round(seconds, 4), predicted_step_s=round(predicted, 4),
                 measured_to_predicted=round(seconds / predicted, 3), limit=counted[-1]["limit"], hidden_share=hidden_share(events) if events else None,
                 steps=len(steps), seconds_to_first_step=round(until_first, 1), device_memory_peak=steps[-1]["device_memory_peak"], host_memory=steps[-1]["host_memory"])
        if events:
            with gzip.open(args.trace, "wt") as file:
                json.dump({"traceEvents": events}, file)
        code = int(len(steps) != args.steps)
    except Stop:
        show(stopped="before the first step")
        code = 1
    finally:
        if child is not None:
            child.wait()  # what comes next needs its memory
        shutil.rmtree(args.work, ignore_errors=True)
        if args.storage:
            shutil.rmtree(args.storage, ignore_errors=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
