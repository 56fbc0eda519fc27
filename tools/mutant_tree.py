"""Where mutants live: a copy of the source beside the checkout, its builds, and runs of its test programs.

The checkout is read, never written. A mutant costs the compilation of what depends on its file, links of the test program's parts and
the tests up to the first that fails; afterwards the original objects are put back, so that the next mutant starts from the original.
"""

import contextlib
import dataclasses
import fcntl
import hashlib
import os
import pathlib
import re
import resource
import shutil
import signal
import subprocess
import sys
import time

MEMORY = 16 << 30  # address space of a test program: a mutant may ask for anything
COMPILE_SECONDS = 600
COMPILED_TOGETHER = 3  # changed sources of a test program that are compiled before its tests run
JOBS = len(os.sched_getaffinity(0))


class ToolError(Exception):
    """The tool cannot go on; one line says why."""


class Build:
    """One build folder of the copy: what depends on what, and compiling it."""

    def __init__(self, folder, source, settings, targets=()):
        self.folder, self.source, self.settings, self.targets = folder, source, settings, set(targets)  # no targets: all
        self.sources = {}  # object -> files of the copy that it is made from
        self.linked = []  # libraries and programs
        self.inputs = {}  # program -> everything that ninja builds it from

    def ninja(self, *arguments, seconds=None):
        return run(["ninja", "-j", JOBS, *arguments], self.folder, seconds)

    def prepare(self):
        """Configures, builds the original and reads ninja's graph."""
        if not (self.folder / "build.ninja").exists():
            code, text = run(["cmake", "-G", "Ninja", "-S", self.source, "-B", self.folder, *self.settings], self.source)
            if code != 0:
                raise ToolError(f"cmake refuses the copy:\n{text}")
        for original in self.folder.rglob("*.original"):  # a run was killed: what it had changed is compiled again
            original.with_suffix("").unlink(missing_ok=True)
            original.unlink()
        self.sources, self.inputs = {}, {}
        code, text = self.ninja(*self.targets)
        if code != 0:
            raise ToolError(f"the original does not build:\n{tail(text)}")
        self.read_graph()

    def read_graph(self):
        self.sources, current = {}, None
        for line in self.ninja("-t", "deps")[1].splitlines():
            if line and not line[0].isspace() and ": #deps" in line:
                current = self.sources.setdefault(line.split(":")[0], set())
            elif current is not None and line.strip():
                path = pathlib.Path(os.path.normpath(self.folder / line.strip()))
                if path.is_relative_to(self.source) and not path.is_relative_to(self.folder):
                    current.add(str(path.relative_to(self.source)))
        rules = r"(.*): CXX_(?:STATIC_LIBRARY|EXECUTABLE|SHARED_LIBRARY|MODULE_LIBRARY)_LINKER"
        self.linked = re.findall(rules, self.ninja("-t", "targets", "all")[1])

    def inputs_of(self, program):
        if program not in self.inputs:
            self.inputs[program] = set(self.ninja("-t", "inputs", program)[1].split("\n"))
        return self.inputs[program]

    def objects_of(self, files):
        return [made for made, sources in self.sources.items() if not sources.isdisjoint(files)]

    def parts(self, program, files, changed):
        """The test sources of a program, as objects, in the order in which they are likely to notice a change of `files` and cost little:
        those named like the files, those that need not be compiled, the others a few at a time. Each part is a program by itself."""
        tests = [name for name in sorted(self.inputs_of(program)) if f"/{program}.dir/" in name and name.endswith("_test.cpp.o")]
        alike = {name: max(len(os.path.commonprefix([pathlib.Path(each).name, pathlib.Path(name).name])) for each in files) for name in tests}
        near = sorted((name for name in tests if alike[name] >= 4), key=lambda name: -alike[name])
        rest = [name for name in tests if name not in near]
        some = [near[:1], near[1:], [name for name in rest if name not in changed]]
        costly = [name for name in rest if name in changed]
        some += [costly[at : at + COMPILED_TOGETHER] for at in range(0, len(costly), COMPILED_TOGETHER)]
        return [part for part in some if part]

    def part_of(self, program):
        return self.folder / f"{program}.part"

    def link(self, program, part, parts):
        """Whether a program of the tests of one part, or the whole one where `part` is None, could be made. All that is in it is compiled."""
        if part is None:
            return self.ninja(program, seconds=COMPILE_SECONDS)[0] == 0
        libraries = [name for name in self.inputs_of(program) if name in self.linked]
        self.part_of(program).unlink(missing_ok=True)
        if libraries and self.ninja(*libraries, seconds=COMPILE_SECONDS)[0] != 0:
            return False
        words = self.ninja("-t", "commands", program)[1].strip().splitlines()[-1].split(" && ")[1]
        for name in {name for one in parts for name in one} - set(part):
            words = words.replace(f" {name} ", " ")
        words = words.replace(f" -o {program} ", f" -o {self.part_of(program).name} ")
        return run(["sh", "-c", words], self.folder, COMPILE_SECONDS)[0] == 0 and self.part_of(program).exists()


class Tree:
    """The copy. `changed()` lends it in a changed state."""

    def __init__(self, checkout, folder):
        self.checkout, self.folder, self.source = checkout, folder, folder / "tree"
        self.scratch = folder / "scratch"
        folder.mkdir(exist_ok=True)
        self.lock = open(folder / "lock", "w")
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ToolError(f"another run works in {folder}") from None
        self.refresh()

    def refresh(self):
        """Makes the copy equal to the checkout as it stands, new files included; what is equal keeps its time."""
        listed = run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], self.checkout)[1].split("\0")
        wanted = {name for name in listed if name and (self.checkout / name).is_file()}
        self.source.mkdir(parents=True, exist_ok=True)
        environment = self.source / ".venv"  # under the same name as in the checkout: the compiler's cache knows its paths
        if not environment.is_symlink() and (self.checkout / ".venv").exists():
            environment.symlink_to(self.checkout / ".venv")
        for top in [p for p in self.source.iterdir() if p != environment and not p.name.startswith("build")]:
            for path in [p for p in (top.rglob("*") if top.is_dir() else [top]) if p.is_file() or p.is_symlink()]:
                if str(path.relative_to(self.source)) not in wanted:
                    path.unlink()
        for name in wanted:
            original, copy = self.checkout / name, self.source / name
            if not copy.exists() or copy.read_bytes() != original.read_bytes():
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(original, copy)

    @contextlib.contextmanager
    def changed(self, build, files, change):
        """Calls `change()`, which alters `files` of the copy, with the objects made from them laid aside. Yields {object: original}."""
        start = time.time_ns()
        before = {name: ((self.source / name).read_bytes(), (self.source / name).stat()) for name in files if (self.source / name).exists()}
        aside = {}
        try:
            change()
            for name in build.objects_of(files):
                original = build.folder / (name + ".original")
                os.rename(build.folder / name, original)
                aside[name] = original
            yield aside
        finally:
            for name in files:
                (self.source / name).unlink(missing_ok=True)
            for name, (content, times) in before.items():
                (self.source / name).write_bytes(content)
                os.utime(self.source / name, ns=(times.st_atime_ns, times.st_mtime_ns))
            for name, original in aside.items():
                os.replace(original, build.folder / name)
            for linked in (build.folder / name for name in build.linked):
                if linked.exists() and linked.stat().st_mtime_ns >= start - 10**8:
                    linked.unlink()  # the next that needs it links it again, from the original objects

    def apply(self, patch):
        """Applies a patch file to the copy, or says why not."""
        outside = dict(os.environ, GIT_CEILING_DIRECTORIES=str(self.folder))  # no repository: paths begin at the copy
        code, text = run(["git", "apply", "--whitespace=nowarn", patch], self.source, environment=outside)
        if code != 0:
            raise ToolError(f"{patch.name} no longer applies: renew or remove it\n{text.strip()}")

    def run_tests(self, command, seconds, quiet, shards=1):
        """Runs a test program, in shards beside each other, to the first failure. It is ended after so many seconds, and where a shard
        writes nothing for `quiet` seconds: a test hangs."""
        shutil.rmtree(self.scratch, ignore_errors=True)
        running = []
        for shard in range(shards):
            here = self.scratch / str(shard)
            here.mkdir(parents=True)
            environment = dict(os.environ, TMPDIR=str(here), OMP_WAIT_POLICY="passive", GTEST_TOTAL_SHARDS=str(shards), GTEST_SHARD_INDEX=str(shard))
            output = open(here.parent / f"{shard}.txt", "w+b")
            process = subprocess.Popen(
                [*own_mounts(), *command], cwd=here, env=environment, stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT, start_new_session=True, preexec_fn=limits)
            running.append((process, output))
        began, verdict, name = time.monotonic(), "passed", ""
        heard = {output: (0, began) for _, output in running}  # how much it has written, and when that grew last
        silence = 0
        left = list(running)
        try:
            while left and verdict == "passed":
                now = time.monotonic()
                for process, output in list(left):
                    written, since = heard[output]
                    silence = max(silence, now - since)
                    if process.poll() is None:
                        if os.fstat(output.fileno()).st_size > written:
                            heard[output] = os.fstat(output.fileno()).st_size, now
                        elif now > since + quiet:
                            verdict, name = "timed out", f"{quiet:.0f} s of silence in {last_started(output)}"
                            break
                        continue
                    left.remove((process, output))
                    if process.returncode != 0:
                        verdict, name = "failed", first_failure(output, process.returncode)
                        break
                if left and verdict == "passed":
                    if now > began + seconds:
                        verdict, name = "timed out", f"after {seconds:.0f} s in {last_started(left[0][1])}"
                    time.sleep(0.02)
        finally:  # of an interrupted run too
            for process, output in running:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                try:
                    process.wait(60)
                except subprocess.TimeoutExpired as error:
                    raise ToolError(f"{command[0]} cannot be killed: it waits for a drive; the machine has to be looked at") from error
                output.close()
        self.detach_loops()
        shutil.rmtree(self.scratch, ignore_errors=True)
        return TestRun(verdict, name, time.monotonic() - began, silence)

    def detach_loops(self):
        """A test that was killed may have left a loop device."""
        if os.geteuid() != 0 or not shutil.which("losetup"):
            return
        for line in run(["losetup", "--list", "--noheadings", "--output", "NAME,BACK-FILE"], self.folder)[1].splitlines():
            name, _, image = line.partition(" ")
            if image.strip().startswith(f"{self.scratch}/"):
                run(["losetup", "--detach", name], self.folder)


@dataclasses.dataclass
class TestRun:
    verdict: str  # passed, failed, timed out
    name: str  # of the test that failed or did not end
    seconds: float
    silence: float  # the longest time in which a shard wrote nothing


def limits():
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def own_mounts():
    """Mounts that a mutant leaves behind go with it, where the machine allows that."""
    if not hasattr(own_mounts, "prefix"):
        prefix = ["unshare", "--mount"]
        works = os.geteuid() == 0 and shutil.which("unshare") and subprocess.run([*prefix, "true"], capture_output=True).returncode == 0
        own_mounts.prefix = prefix if works else []
    return own_mounts.prefix


def first_failure(output, code):
    output.seek(0)
    text = output.read().decode(errors="replace")
    found = re.search(r"^\[  FAILED  \] ([^\s,]+)|^FAILED (\S+)", text, re.MULTILINE)
    return (found[1] or found[2]) if found else f"code {code} in {last_started(output)}"


def last_started(output):
    output.seek(0)
    found = re.findall(r"^\[ RUN      \] (\S+)", output.read().decode(errors="replace"), re.MULTILINE)
    return found[-1] if found else "no test"


def run(command, folder, seconds=None, environment=None):
    """(exit code, output); a command that takes longer is ended, with all that it started: code 124."""
    process = subprocess.Popen(
        [str(word) for word in command], cwd=folder, env=environment, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        text, _ = process.communicate(timeout=seconds)
        return process.returncode, text.decode(errors="replace")
    except BaseException as stopped:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if isinstance(stopped, subprocess.TimeoutExpired):
            return 124, f"stopped after {seconds:.0f} s"
        raise


def digest(path):
    return hashlib.sha256(path.read_bytes()).digest() if path.exists() else None


def tail(text, lines=20):
    return "\n".join(text.splitlines()[-lines:])


def say(text):
    print(text, flush=True, file=sys.stderr)
