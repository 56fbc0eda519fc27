#!/usr/bin/env python3
"""Do the tests notice when the code is wrong? Changes one line at a time, in a copy, and runs the tests that depend on it.

Two kinds of mutants. Those written by hand, tests/mutants/FOLDER/*.patch, break one promise each; all of them run, and each must be
noticed. The others are drawn by a seed from what universalmutator makes of the folder's files, as many as the minutes allow; at least
85 in a hundred must be noticed. docs/testing.md says more.
"""

import argparse
import dataclasses
import difflib
import itertools
import json
import pathlib
import random
import re
import shlex
import shutil
import signal
import sys
import time
import tomllib

from mutant_sampling import Mutant, candidates, sample
from mutant_tree import COMPILE_SECONDS, Build, ToolError, Tree, digest, run, say, tail

GOAL = 85
SHARDS = 8  # of a test program, beside each other: many tests wait for the drive
SPARE_SECONDS = 30
FILES = {
    "io": ["io/*.h", "io/*.cpp"],
    "optim": ["optim/*.h", "optim/*.cpp"],
    "swap": ["swap/*.h", "swap/*.cpp"],
    # What reads files and words of other people, stores, and signals. What of program/ is not here prints, or needs LibTorch.
    "runtime": [f"runtime/{each}.cpp" for each in [
        *(f"{room}/*" for room in ("base", "checkpoint", "data", "spec")),
        *(f"planning/{name}" for name in ("correction", "left_store", "moved_store", "profile", "reference_file", "store_cut", "stored_model")),
        *(f"program/{name}" for name in ("*option*", "command_line", "config_file", "prompts", "run_identity", "run_record", "training_spec")),
    ]],
}  # fmt: skip
# The test programs of a folder, with a filter where it saves time. Only what depends on the file runs.
EXHAUSTIVE = "ParityOfCodes.*:Master.EveryPatternComesBack"  # every float there is: a minute
PLAIN = {
    "io": ["io_test"],
    "optim": [f"optim_test -{EXHAUSTIVE}", f"optim_test {EXHAUSTIVE}", "optim_standin_test"],
    "swap": ["swap_test", "device_test", "device_standin_test"],
    "runtime": ["core_test -Tokenizer.*", "core_test Tokenizer.*", "dense_standin_test", "row_kernels_standin_test"],  # of Tokenizer: they start Python
}
WITH_TORCH = ["train_test", "session_test", "gpu_test", "pytest tests/python/test_train.py", "pytest tests/python/test_run_end.py"]
OUTCOMES = ["killed", "timed out", "survived", "not compiled", "equivalent"]


@dataclasses.dataclass
class Result:
    name: str
    folder: str
    outcome: str
    by: str = ""
    diff: str = ""
    seconds: float = 0
    listed: bool = False  # written by hand


def read_equivalents(path):
    """{(file, line, its mutation): reason} of the mutants that no test can notice."""
    if not path.exists():
        return {}
    entries = tomllib.loads(path.read_text(encoding="utf-8")).get("mutant", [])
    return {(one["file"], one["line"].strip(), one["becomes"].strip()): one["reason"] for one in entries}


def faults_of_equivalents(checkout, equivalents):
    """What no longer stands in the source is to be removed from the list."""
    for file, line, _ in equivalents:
        path = checkout / file
        if not path.exists() or line not in (each.strip() for each in path.read_text(encoding="utf-8").splitlines()):
            yield f"tests/mutants/equivalent.toml: {file} has no line `{line}` any more"


@dataclasses.dataclass
class Patch:
    """A mutation written by hand. Leading lines with `# ` say which promise it breaks; `# run: PROGRAM [FILTER]` or `# run: pytest
    ARGUMENTS` names the tests where those of the folder are not meant."""

    path: pathlib.Path
    promise: str
    tests: list
    files: list
    diff: str

    @staticmethod
    def read(path):
        text = path.read_text(encoding="utf-8")
        head = re.match(r"(#[^\n]*\n)*", text)[0]
        said = [line[1:].strip() for line in head.splitlines()]
        files = sorted({name for name in re.findall(r"^(?:---|\+\+\+) [ab]/(\S+)", text, re.MULTILINE)})
        promise = " ".join(line for line in said if not line.startswith("run:"))
        if not promise or not files:
            raise ToolError(f"{path.name}: begins with `# ` and the promise that it breaks, and then is a diff")
        return Patch(path, promise, [line[4:].strip() for line in said if line.startswith("run:")], files, text[len(head) :])


def pytest_command(source, words):
    """pytest for these words of a patch's `run:`, with the settings of the checkout in `source`."""
    words = [str(source / word) if word.startswith("tests/") else word for word in words]
    return [str(source / ".venv/bin/python"), "-m", "pytest", "-x", "-q", "--rootdir", str(source), *words]


class Harness:
    """The copy, its two builds, and what their test programs take when nothing is wrong."""

    def __init__(self, checkout, folders):
        self.tree = Tree(checkout, checkout / "build-mutants")
        source = self.tree.source
        # -w: a warning is the compiler's finding, not the tests'. No ccache: nothing is compiled twice.
        fast = ["-DTIERFLOW_TORCH=OFF", "-DTIERFLOW_CCACHE=", "-DTIERFLOW_QUICK_TESTS=ON", "-DCMAKE_CXX_FLAGS_RELEASE=-O1 -w -fmax-errors=1", "-DCMAKE_GTEST_DISCOVER_TESTS_DISCOVERY_MODE=PRE_TEST"]
        self.programs = programs = {tests.split()[0] for folder in folders for tests in PLAIN[folder]}
        # Clang takes a third of the time for the tests; clang 14 does not know all of the C++20 that runtime is written in.
        clang = shutil.which("clang++") is not None and "core_test" not in programs
        compiler = ["-DCMAKE_CXX_COMPILER=clang++"] if clang else []
        self.plain = Build(source / ("build-clang" if clang else "build-plain"), source, ["-DTIERFLOW_CUDA=OFF", *fast, *compiler], programs)
        self.with_torch = Build(source / "build-torch", source, ["-DTIERFLOW_CUDA=OFF"])
        self.usual = {}  # command -> seconds

    def prepare(self, build):
        if not build.sources:
            say(f"building the original, {'with' if build is self.with_torch else 'without'} LibTorch")
            build.prepare()
        return build

    def command(self, build, tests):
        """(what ninja has to make for it, the command, in how many shards)."""
        words = shlex.split(tests)
        if words[0] == "pytest":
            source = self.tree.source
            return "all", ["env", f"TIERFLOW_BUILD={build.folder}", *pytest_command(source, words[1:])], 1
        chosen = [f"--gtest_filter={':'.join(words[1:])}"] if words[1:] else []
        return words[0], [str(build.folder / words[0]), "--gtest_fail_fast", *chosen], SHARDS

    def limits(self, build, tests):
        """(seconds, seconds of silence) after which a test run is ended: several times what the tests take on the original, where they
        have to pass. The machine may be busier than it was then."""
        target, command, shards = self.command(build, tests)
        key = tuple(command)
        if key not in self.usual:
            code, text = build.ninja(target, seconds=COMPILE_SECONDS)
            if code != 0:
                raise ToolError(f"the original does not build:\n{tail(text)}")
            usual = self.usual[key] = self.tree.run_tests(command, 1200, 1200, shards)
            if usual.verdict != "passed":
                raise ToolError(f"{tests}: {usual.verdict} on the original: {usual.name}")
            say(f"{tests}: {usual.seconds:.1f} s on the original, silent for {usual.silence:.1f} s at most")
        return SPARE_SECONDS + 8 * self.usual[key].seconds, SPARE_SECONDS + 4 * self.usual[key].silence

    def judge(self, build, tests, files, change):
        """(outcome, by which test) of a change of `files`."""
        relevant = []
        for one in tests:  # on the original, before anything is changed
            made = build.objects_of(files)
            inputs = build.inputs_of(self.command(build, one)[0])
            if any(name in inputs for name in made):
                relevant.append((one, self.limits(build, one), inputs))
        if not relevant:
            raise ToolError(f"{', '.join(files)}: none of {', '.join(tests)} depends on it")
        with self.tree.changed(build, files, change) as originals:
            touched = False  # an object came out different from its original
            for one, limits, inputs in relevant:
                program, command, shards = self.command(build, one)
                objects = {name for name in originals if name in inputs}
                parts = build.parts(program, files, objects)
                common = objects.difference(*parts)
                for part in parts or [None]:
                    compiled = common | objects.intersection(part or ())
                    if compiled and build.ninja(*compiled, seconds=COMPILE_SECONDS)[0] != 0:
                        return "not compiled", ""
                    if all(digest(build.folder / name) == digest(originals[name]) for name in compiled):
                        continue
                    touched = True
                    if not build.link(program, part, parts):
                        return "not compiled", ""
                    if part:
                        command = [str(build.part_of(program)), *command[1:]]
                    ended = self.tree.run_tests(command, *limits, shards)
                    if ended.verdict != "passed":
                        return ("killed" if ended.verdict == "failed" else ended.verdict), ended.name
        return ("survived", "") if touched else ("equivalent", "the same object code")

    def try_mutant(self, folder, mutant):
        path = self.tree.source / mutant.file
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        changed = [*lines[: mutant.line - 1], *mutant.new.splitlines(keepends=True), *lines[mutant.line :]]
        diff = "".join(difflib.unified_diff(lines, changed, f"a/{mutant.file}", f"b/{mutant.file}", n=3))
        start = time.monotonic()
        build = self.prepare(self.plain)
        outcome, by = self.judge(build, PLAIN[folder], [mutant.file], lambda: path.write_text("".join(changed), encoding="utf-8"))
        return Result(f"{mutant.file}:{mutant.line}", folder, outcome, by, diff, time.monotonic() - start)

    def try_patch(self, folder, patch):
        tests = patch.tests or PLAIN[folder]
        build = self.plain
        plain = {shlex.split(one)[0] for one in tests} <= self.programs  # the compiler of that build may not know the others
        if plain:
            self.prepare(build)
        if not plain or not set().union(*build.sources.values()).issuperset(patch.files):
            build, tests = self.prepare(self.with_torch), patch.tests or WITH_TORCH
        start = time.monotonic()
        outcome, by = self.judge(build, tests, patch.files, lambda: self.tree.apply(patch.path))
        return Result(patch.path.name, folder, outcome, by or patch.promise, patch.diff, time.monotonic() - start, listed=True)


def score(results):
    """Noticed among a hundred that compile and change something; None where there are none."""
    noticed = sum(one.outcome in ("killed", "timed out") for one in results)
    counted = noticed + sum(one.outcome == "survived" for one in results)
    return 100 * noticed / counted if counted else None


def table(results):
    rows = [["", *OUTCOMES, "noticed"]]
    for listed, kind in ((True, "listed"), (False, "sampled")):
        for folder in sorted({one.folder for one in results}):
            some = [one for one in results if one.listed == listed and one.folder == folder]
            if some:
                noticed = score(some)
                counts = [str(sum(one.outcome == outcome for one in some)) for outcome in OUTCOMES]
                rows.append([f"{folder}, {kind}", *counts, "-" if noticed is None else f"{noticed:.0f}%"])
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)


def patches_of(checkout, folder):
    return sorted((checkout / "tests/mutants" / folder).glob("*.patch"))


def patch_faults(checkout):
    """Every patch of tests/mutants that cannot be read or does not apply to the checkout."""
    for path in sorted((checkout / "tests/mutants").glob("*/*.patch")):
        try:
            Patch.read(path)
            code, text = run(["git", "apply", "--check", path], checkout)
            if code != 0:
                yield f"{path.parent.name}/{path.name} no longer applies: renew or remove it: {text.strip()}"
        except ToolError as error:
            yield str(error)


def judge_folder(harness, folder, patches, minutes, seed, skip, equivalents):
    """Results as they come: the patches, then sampled mutants for so many minutes, without the first `skip`."""
    for path in patches:
        yield harness.try_patch(folder, Patch.read(path))
    if minutes <= 0:
        return
    harness.prepare(harness.plain)
    known = set().union(*harness.plain.sources.values())
    files = sorted({str(path.relative_to(harness.tree.source)) for each in FILES[folder] for path in harness.tree.source.glob(each)} & known)
    end = time.monotonic() + 60 * minutes
    for mutant in itertools.islice(sample([one for file in files for one in candidates(harness.tree.source, file)], seed), skip, None):
        if time.monotonic() > end:
            return
        if reason := equivalents.get(mutant.key()):
            yield Result(f"{mutant.file}:{mutant.line}", folder, "equivalent", reason)
        else:
            yield harness.try_mutant(folder, mutant)


def main(arguments=None, checkout=pathlib.Path(__file__).resolve().parents[1]):
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("folders", nargs="*", metavar="FOLDER", help=f"of {', '.join(FILES)}; all of them where none is given")
    parser.add_argument("--minutes", type=float, default=20, help="how long to draw mutants, for each folder; 0: the listed ones alone")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6), help="draws the same mutants again")
    parser.add_argument("--drawn", action="store_true", help="none of the listed ones")
    parser.add_argument("--skip", type=int, default=0, help="the first so many that the seed draws: goes on with an earlier run")
    parser.add_argument("--patch", type=pathlib.Path, nargs="+", help="these patches alone, as mutants of the one FOLDER")
    parser.add_argument("--json", type=pathlib.Path, help="every result, into this file")
    options = parser.parse_args(arguments)
    if unknown := set(options.folders) - set(FILES):
        parser.error(f"{', '.join(unknown)}: no such folder; there are {', '.join(FILES)}")
    if options.patch and len(options.folders) != 1:
        parser.error("--patch takes the one folder whose tests are meant")

    results, survivors = [], checkout / "build-mutants" / "survivors"
    try:
        equivalents = read_equivalents(checkout / "tests/mutants/equivalent.toml")
        if faults := [*patch_faults(checkout), *faults_of_equivalents(checkout, equivalents)]:
            raise ToolError("\n".join(faults))
        harness = Harness(checkout, options.folders or FILES)
        survivors.mkdir(parents=True, exist_ok=True)
        say(f"seed {options.seed}")
        for folder in options.folders or FILES:
            patches = [path.resolve() for path in options.patch] if options.patch else [] if options.drawn else patches_of(checkout, folder)
            for one in judge_folder(harness, folder, patches, 0 if options.patch else options.minutes, options.seed, options.skip, equivalents):
                results.append(one)
                say(f"{one.seconds:6.1f} s  {one.outcome:12}  {one.name}  {one.by}")
                if one.outcome == "survived":
                    say(one.diff)
                    if not one.listed:
                        (survivors / f"{options.seed}-{len(results)}-{folder}.patch").write_text(f"# {one.name}\n{one.diff}", encoding="utf-8")
    except ToolError as error:
        say(f"mutants: {error}")
        return 1
    except KeyboardInterrupt:
        say("interrupted; what there is:")
    code, text = run(["git", "describe", "--always", "--dirty", "--abbrev=12"], checkout)
    commit = text.strip() if code == 0 else "none"
    if options.json:
        scores = {folder: score([one for one in results if one.folder == folder and not one.listed]) for folder in options.folders or FILES}
        report = {"commit": commit, "seed": options.seed, "noticed": scores, "mutants": [dataclasses.asdict(one) for one in results]}
        options.json.write_text(json.dumps(report, indent=1), encoding="utf-8")
    print(f"commit {commit}, seed {options.seed}")
    print(table(results))
    return verdict(results)


def verdict(results):
    """1 where a listed mutation was not noticed, or too few of the others."""
    code = 0
    for one in results:
        if one.listed and one.outcome not in ("killed", "timed out"):
            print(f"tests/mutants/{one.folder}/{one.name}: {one.outcome}: {one.by}")
            code = 1
    for folder in sorted({one.folder for one in results}):
        noticed = score([one for one in results if one.folder == folder and not one.listed])
        if noticed is not None and noticed < GOAL:
            print(f"{folder}: {noticed:.0f}% of the sampled mutants were noticed, {GOAL}% are asked for; survivors lie in build-mutants/survivors")
            code = 1
    return code


if __name__ == "__main__":
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # a shell's background job ignores the first
        signal.signal(each, signal.default_int_handler)
    sys.exit(main())
