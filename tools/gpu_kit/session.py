"""Runs one part of the kit: every step in a process of its own, with a time limit, recorded whatever becomes of it.

In $OUT: partN.log (every line at once), partN.jsonl (one object a step, at once), partN.txt (the table). Exit code: 0, 1 where a step
failed, 2 for usage, 4 where this machine is not what the kit needs, 128 + n where signal n ended the part."""

import argparse
import importlib.util
import json
import os
import pathlib
import re
import runpy
import shutil
import signal
import subprocess
import sys
import threading
import time

import parts

KIT = pathlib.Path(__file__).resolve().parents[1]


def refuse(text, code=4):
    print(f"gpu-kit: {text}", file=sys.stderr)
    sys.exit(code)


def package_folders(name):
    """Where Python has that package, which is not imported."""
    spec = importlib.util.find_spec(name)
    return [pathlib.Path(place) for place in (spec.submodule_search_locations or [])] if spec else []


def torch_folder(kit):
    """The folder of this Python's torch. Ends the session where it is not the build that the kit's binaries were linked with. One release's
    wheels have one git version, whichever CUDA they are for."""
    found = package_folders("torch")
    if not found:
        refuse(f"{sys.executable} has no torch: name a Python that has, PYTHON=path")
    try:
        version = runpy.run_path(str(found[0] / "version.py"))
    except OSError as error:
        refuse(f"{found[0]} is no torch that can be read: {error}")
    git, wanted = version.get("git_version"), kit["torch_git_version"]
    if git != wanted:
        refuse(f"{found[0]} is torch of git version {git}; this kit was built with {wanted} and works with no other")
    cuda, wanted = version.get("cuda"), kit["torch_cuda"]
    if str(cuda).split(".")[0] != str(wanted).split(".")[0]:
        refuse(f"{found[0]} is torch for CUDA {cuda}; this kit was built with torch {kit['torch_version']}, for CUDA {wanted}, and works with no other major version")
    return found[0]


def library_path(torch):
    """The kit's own libraries, torch's, those of the CUDA wheels, and last what was set already: the driver's may be there alone."""
    folders = [KIT / "lib", torch / "lib"]
    for place in package_folders("nvidia"):
        folders += sorted(folder for folder in place.glob("*/lib") if folder.is_dir())
    return ":".join([*map(str, folders), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])])


def refuse_old_machine(kit, runtime):
    """Ends the session where this machine's C library is older than the programs need, or their C++ runtime, if they take the kit's."""
    try:
        here = os.confstr("CS_GNU_LIBC_VERSION").split()[1]
    except (AttributeError, IndexError, OSError, ValueError):
        refuse("this machine has no GNU C library, which the kit's programs need")
    needed = kit["glibc_of_runtime"] if runtime else kit["glibc"]
    if [int(part) for part in here.split(".")] >= [int(part) for part in needed.split(".")]:
        return
    what = "the C++ runtime that the kit brings, because this machine's is too old," if runtime else "this kit"
    refuse(f"{what} needs glibc {needed}, and this machine has {here}: take an image that is newer (Ubuntu 22.04 and Debian 12 are)")


def asked_of_card(*words):
    """A line of nvidia-smi about the first card; None where it says nothing."""
    try:
        done = subprocess.run(["nvidia-smi", *words], capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip().splitlines()[0].strip() if done.returncode == 0 and done.stdout.strip() else None


def card_is():
    """The first card's compute capability, as nvidia-smi writes it, and the bytes of its memory that are free, None where it does not say. It is
    asked once: with some drivers each answer takes seconds."""
    said = [word.strip() for word in (asked_of_card("--query-gpu=compute_cap,memory.free", "--format=csv,noheader,nounits") or "").split(",")]
    free = said[1] if len(said) > 1 and said[1].isdigit() else None
    return said[0], int(free) << 20 if free else None


def refuse_other_card(architectures, capability):
    """Ends the session where the kit has no code for this card. `architectures` as CMake has them: 90-real, or 80;90, which newer cards take too."""
    found = re.fullmatch(r"(\d+)\.(\d)", capability)
    made_for = [(int(number), kind) for number, kind in re.findall(r"(\d+)(-real)?", architectures)]
    if not found or not made_for:
        return
    card = 10 * int(found[1]) + int(found[2])
    if not any(card // 10 == number // 10 and card >= number if kind else card >= number for number, kind in made_for):
        refuse(f"this kit's kernels are for compute capability {', '.join(f'{number / 10:.1f}' for number, _ in made_for)}, and this card has {card / 10:.1f}: make gpu-kit GPU_ARCH={card}")


def needs_own_runtime(env):
    """Whether this machine's C++ runtime is missing or older than a program of the kit needs."""
    for program in sorted((KIT / "bin").iterdir()):
        try:
            found = subprocess.run(["ldd", program], env=env, capture_output=True, text=True, check=False)
        except OSError:
            return False
        if re.search(r"(libstdc\+\+|libgcc_s)\.so\.\d+ => not found|version `(GLIBCXX|CXXABI|GCC)_", found.stdout + found.stderr):
            return True
    return False


def environment(kit, torch, work):
    made = {**os.environ, "LD_LIBRARY_PATH": library_path(torch), "XDG_CACHE_HOME": str(work / "cache"), "OMP_WAIT_POLICY": "passive", "PYTHONUNBUFFERED": "1"}
    runtime = needs_own_runtime(made)
    refuse_old_machine(kit, runtime)
    if runtime:
        made["LD_LIBRARY_PATH"] = f"{KIT / 'lib/runtime'}:{made['LD_LIBRARY_PATH']}"
    return made


def gpu_is_here():
    return (asked_of_card("-L") or "").startswith("GPU")


def gtest_counts(path):
    """What a GoogleTest program's JSON report comes to; None without one."""
    try:
        report = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    tests = [test for suite in report["testsuites"] for test in suite["testsuite"]]
    ran = [test for test in tests if test.get("status") == "RUN"]
    return {"tests": len(ran), "failed": sum("failures" in test for test in ran), "skipped": sum(test.get("result") == "SKIPPED" for test in ran)}


class TestsSeen:
    """What the lines of a GoogleTest program say of its tests: all there is when it does not end by itself, because it writes its report last."""

    def __init__(self):
        self.ran, self.running = {"OK": 0, "FAILED": 0, "SKIPPED": 0}, None

    def read(self, line):
        found = re.search(r"\[ +(RUN|OK|FAILED|SKIPPED) +\] (\S+)", line)
        if not found:
            return
        if found[1] == "RUN":
            self.running = found[2]
        elif self.running:  # else a list at the end
            self.ran[found[1]] += 1
            self.running = None

    def counts(self):
        """As those of a report, and the test that was under way; None where no test has begun."""
        if not self.running and not any(self.ran.values()):
            return None
        return {"tests": sum(self.ran.values()), "failed": self.ran["FAILED"], "skipped": self.ran["SKIPPED"], "ended_in": self.running}


class Interrupted(Exception):
    pass


class Session:
    """Owns the files of one part in `out`, and the running step."""

    def __init__(self, part, out, work, env, gpu, deadline, most):
        self.part, self.out, self.work, self.env, self.gpu, self.deadline, self.most = part, out, work, env, gpu, deadline, most
        self.lock, self.records, self.child = threading.Lock(), [], None
        self.log = open(out / f"part{part}.log", "w", buffering=1)
        self.lines = open(out / f"part{part}.jsonl", "w", buffering=1)

    def say(self, text):
        line = f"{time.strftime('%H:%M:%S')} {text}"
        with self.lock:
            self.log.write(line + "\n")
            try:
                print(line, flush=True)
            except OSError:  # nobody reads any more; the files go on
                pass

    def record(self, name, status, seconds=0.0, rc=None, measured=()):
        entry = {"part": self.part, "name": name, "status": status, "seconds": round(seconds, 2), "rc": rc, "measured": list(measured)}
        self.records.append(entry)
        self.lines.write(json.dumps(entry) + "\n")
        self.say(f"{name}: {status}" + (f", {seconds:.1f} s" if seconds else ""))

    def stop_child(self):
        """First what lets a step say what it has; then, five seconds later at most, what neither it nor what it started can refuse."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self.child.pid, number)
                self.child.wait(5)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue

    def read_lines(self, name, measured, tests):
        for raw in self.child.stdout:
            text = raw.decode(errors="replace").rstrip("\n")
            self.say(f"{name}| {text}")
            tests.read(text)
            if text.startswith("{"):
                try:
                    measured.append(json.loads(text))
                except ValueError:
                    pass

    def run(self, step, behind=()):
        """behind: the steps that follow, whose time it leaves to them."""
        left = self.deadline - time.monotonic()
        limit = min(self.most, left, max(step.timeout, left - sum(other.timeout for other in behind)))
        if step.gpu and not self.gpu:
            return self.record(step.name, "skipped: no GPU")
        if step.absent:
            return self.record(step.name, f"absent: {step.absent}")
        if limit < 3:
            return self.record(step.name, "skipped: no time left")
        report = self.work / f"{step.name}.gtest.json"
        report.unlink(missing_ok=True)
        self.say(f"{step.name}: {' '.join(map(str, step.command))}")
        begin, measured, tests, status, self.child = time.monotonic(), [], TestsSeen(), "", None
        env = {**self.env, **({"GTEST_OUTPUT": f"json:{report}"} if step.gtest else {})}
        reader = threading.Thread(target=self.read_lines, args=(step.name, measured, tests), daemon=True)
        try:
            self.child = subprocess.Popen([*map(str, step.command)], cwd=self.work, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                          start_new_session=True)
            reader.start()
            rc = self.child.wait(limit)
        except OSError as error:
            self.say(f"{step.name}| {error}")
            return self.record(step.name, "failed: could not be started", rc=127)
        except subprocess.TimeoutExpired:
            self.stop_child()
            rc, status = 124, f"timeout after {limit:.0f} s"
        except Interrupted:  # which comes at any line
            if self.child:
                self.stop_child()
            if reader.ident:
                reader.join(2)
            measured += [counts] if step.gtest and (counts := tests.counts()) else []
            self.record(step.name, "interrupted", time.monotonic() - begin, self.child.returncode if self.child else None, measured)
            raise
        reader.join(5)
        counts = gtest_counts(report) if step.gtest else None
        if step.gtest and (known := counts or tests.counts()):
            measured.append(known)
        if not status:
            status = "ok" if rc == 0 else f"failed: exit code {rc}"
            if rc == 0 and step.gtest and self.gpu and (counts is None or counts["skipped"] or not counts["tests"]):
                status = "failed: tests were skipped on a machine with a GPU" if counts else "failed: there is no report of its tests"
        self.record(step.name, status, time.monotonic() - begin, rc, measured)

    def table(self):
        width = max([len(entry["name"]) for entry in self.records] + [4])
        rows = [f"{'step':{width}}  {'seconds':>7}  {'rc':>4}  status and what was measured"]
        for entry in self.records:
            measured = re.sub(r'["{}]', "", json.dumps(entry["measured"][-1])) if entry["measured"] else ""
            rows.append(f"{entry['name']:{width}}  {entry['seconds']:7.1f}  {'' if entry['rc'] is None else entry['rc']:>4}  {entry['status']}  {measured}"[:200].rstrip())
        (self.out / f"part{self.part}.txt").write_text("\n".join(rows) + "\n")
        for row in rows:
            self.say(row)


def interrupt(number, _frame):
    raise Interrupted(number)


def main():
    began = time.monotonic()
    parser = argparse.ArgumentParser(prog="gpu_session.sh", description="Proves and measures Tierflow on a machine with an NVIDIA GPU.")
    parser.add_argument("part", type=int, choices=sorted(parts.SECONDS), help="0: what answers most, in under seven minutes; 1: correctness; 2: each lane, 1B; 3: 8B")
    parser.add_argument("--rehearse", action="store_true", default=os.environ.get("REHEARSE", "") not in ("", "0"), help="tiny shapes on the CPU; what needs a GPU is recorded as skipped")
    parser.add_argument("--only", default="", help="only steps whose names contain one of these, with commas between them")
    parser.add_argument("--seconds", type=float, help=f"of the whole part at most ({', '.join(f'{part}: {seconds}' for part, seconds in parts.SECONDS.items())})")
    parser.add_argument("--step-seconds", type=float, help="of each step at most")
    args = parser.parse_args()
    args.seconds = parts.SECONDS[args.part] if args.seconds is None else args.seconds
    try:
        kit = json.loads((KIT / "kit.json").read_text())
    except (OSError, ValueError) as error:
        refuse(f"{KIT} is not a whole kit: {error}")
    torch = torch_folder(kit)
    gpu = not args.rehearse and gpu_is_here()
    if not gpu and not args.rehearse:
        refuse(f"no NVIDIA GPU here (nvidia-smi finds none); ./gpu_session.sh --rehearse {args.part} tries the steps without one")
    capability, free = card_is() if gpu else ("", None)
    refuse_other_card(kit["gpu_arch"], capability)
    deadline = began + args.seconds
    out = pathlib.Path(os.environ.get("OUT") or "kit-out").resolve()
    work = pathlib.Path(os.environ.get("STORAGE") or KIT).resolve() / "kit-work"
    try:
        for folder in (out, work):
            folder.mkdir(parents=True, exist_ok=True)
        session = Session(args.part, out, work, environment(kit, torch, work), gpu, deadline, args.step_seconds or args.seconds)
    except OSError as error:
        refuse(f"cannot be written: {error}")
    place = parts.Place(KIT, out, work, sys.executable, args.rehearse, free)
    steps = [step for step in parts.steps(args.part, place) if any(word in step.name for word in args.only.split(","))]
    session.say(f"part {args.part}, {'a rehearsal' if args.rehearse else 'on a GPU'}: Tierflow {kit['source']} for architecture {kit['gpu_arch']}, torch {kit['torch_version']} in {torch}")
    signal.signal(signal.SIGTERM, interrupt)
    signal.signal(signal.SIGINT, interrupt)
    code = 0
    try:
        for index, step in enumerate(steps):
            session.run(step, steps[index + 1:])
    except Interrupted as stopped:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        code = 128 + stopped.args[0]
        if session.child and session.child.poll() is None:
            session.stop_child()
    session.table()
    for left in work.iterdir():
        if left.is_dir() and left.name != "cache":  # measured profiles serve the next part
            shutil.rmtree(left, ignore_errors=True)
    return code or int(any(re.match("failed|timeout", entry["status"]) for entry in session.records))


if __name__ == "__main__":
    sys.exit(main())
