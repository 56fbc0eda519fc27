"""The shell scripts behind the Makefile, with stand-ins for what they call: a failure of any part is theirs, all parts run, and nothing is left behind."""

import pathlib
import shutil
import subprocess
import sys
import time

import pytest

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture
def tree(tmp_path):
    """A clone's folder. run(script, words..., environment): its status, what it said, and how the stand-ins were called."""
    (tmp_path / "tools").mkdir()
    log = tmp_path / "log"

    class Tree:
        folder = tmp_path

        @staticmethod
        def stand_in(path, line=""):
            """A program that notes how it was called, then runs a line of shell."""
            path = tmp_path / path
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f'#!/bin/bash\necho "{path.name} $*" >>{log}\n{line}\n')
            path.chmod(0o755)

        @staticmethod
        def run(script, *words, **environment):
            shutil.copy(ROOT / "tools" / script, tmp_path / "tools")
            log.write_text("")
            done = subprocess.run([tmp_path / "tools" / script, *map(str, words)], capture_output=True, text=True, timeout=60, cwd=tmp_path,
                                  env={"PATH": f"{tmp_path}/bin:/usr/bin:/bin", **environment})  # fmt: skip
            return done.returncode, done.stdout + done.stderr, log.read_text().splitlines()

    return Tree


PARTS = ("CTEST", "PYTEST", "TOTALS")


@pytest.mark.parametrize("failing", [None, *PARTS])
def test_all_tests_run_and_one_failure_is_a_failure(failing, tree):
    tree.stand_in("bin/ctest", "exit ${CTEST:-0}")
    tree.stand_in(".venv/bin/python", 'case "$*" in *pytest\\ *) exit ${PYTEST:-0} ;; *test_totals*) echo the totals; exit ${TOTALS:-0} ;; esac')
    reports = tree.folder / "build" / "test-reports" / "suites"
    reports.mkdir(parents=True)
    for stale in (reports / "old.xml", reports.parent / "pytest.xml"):
        stale.write_text("of the run before")
    status, said, calls = tree.run("test.sh", "build", **({failing: "1"} if failing else {}))
    assert status == (failing is not None) and said.splitlines()[-1] == "the totals"
    assert [call.split()[0] for call in calls] == ["ctest", "python", "python"]
    assert "--no-tests=error" in calls[0] and f"--output-junit {reports.parent}/ctest.xml" in calls[0] and "-m pytest" in calls[1]
    assert f"--junitxml={reports.parent}/pytest.xml" in calls[1] and calls[2].endswith(f"test_totals.py {reports.parent}/ctest.xml {reports.parent}/pytest.xml")
    assert not list(reports.glob("*.xml")) and not (reports.parent / "pytest.xml").exists()


@pytest.mark.parametrize("failing", [None, "clang-format", "python", "mypy", "clang-tidy"])
def test_all_of_lint_runs_and_one_finding_is_a_failure(failing, tree):
    for name in ("clang-format", "python", "mypy", "clang-tidy"):
        tree.stand_in(f".venv/bin/{name}", f"exit {int(name == failing)}")
    tree.stand_in("bin/git", "echo a.cpp; echo b.cpp")
    (tree.folder / "bindings").mkdir()
    status, _, calls = tree.run("lint.sh", "build")
    assert status == (failing is not None)
    assert {call.split()[0] for call in calls} == {"git", "clang-format", "python", "mypy", "clang-tidy"}
    assert any(call.endswith("a.cpp b.cpp") and "--Werror" in call for call in calls if call.startswith("clang-format"))
    assert {call.split()[-1] for call in calls if call.startswith("clang-tidy")} == {"a.cpp", "b.cpp"}
    status, _, calls = tree.run("lint.sh", "build", FILES="c.cpp")
    assert [call.split()[-1] for call in calls if call.startswith("clang-tidy")] == ["c.cpp"]


FAULTS = ("FaultRig.Nothing*", "FaultRig.Notices*", "*BitFlips*", "PowerCutDisk*")


@pytest.mark.parametrize("failing", [None, *FAULTS, "hangs"])
def test_faults_are_shared_and_one_finding_is_a_failure(failing, tree):
    note = f"echo \"$* runs ${{TIERFLOW_FAULT_RUNS:-}} seed ${{TIERFLOW_FAULT_SEED:-}} flips ${{TIERFLOW_BIT_FLIPS:-}} cuts ${{TIERFLOW_POWER_CUTS:-}}\" >>{tree.folder}/seen"
    end = "case \"$*\" in *FaultRig.Notices*) exec sleep 30 ;; esac" if failing == "hangs" else f"case \"$*\" in *filter='{failing}'*|*\"filter={failing}\"*) exit 3 ;; esac"
    tree.stand_in("build/swap_test", f"{note}\n{end}")
    status, said, _ = tree.run("test_faults.sh", "build", 3, RUNS="10", SEED="7", FLIPS="5", CUTS="6", TIERFLOW_TEST_DIR=str(tree.folder), LIMIT="1" if failing == "hangs" else "30")
    assert status == (failing is not None) and ("a program hung: it was ended after 1 s" in said) == (failing == "hangs")
    seen = (tree.folder / "seen").read_text().splitlines()
    assert sorted(line.partition("runs ")[2].split(" flips")[0] for line in seen if "Nothing" in line) == ["4 seed 11", "4 seed 15", "4 seed 7"]
    for name, words in zip(FAULTS[1:], ("", "flips 5", "cuts 6"), strict=True):
        assert any(f"filter={name}" in line and words in line for line in seen)


@pytest.mark.parametrize("failing", [False, True])
def test_every_parser_is_fuzzed_and_a_finding_is_a_failure(failing, tree):
    parsers = "config header index manifest superblock tokens records rows teacher adapter".split()
    for parser in parsers:
        tree.stand_in(f"build/fuzz_{parser}", "echo 'stat::number_of_executed_units: 12'" + ("; echo 'ERROR: found'; exit 1" if failing and parser == "tokens" else ""))
    status, said, calls = tree.run("fuzz.sh", "build", 2, MINUTES="2")
    assert (status != 0) == failing and sorted(call.split()[0] for call in calls) == sorted(f"fuzz_{parser}" for parser in parsers)
    assert all("-max_total_time=120 " in call for call in calls) and said.count("12 inputs, no finding") == len(parsers) - failing
    assert ("tokens: ERROR: found" in said) == failing
    _, _, calls = tree.run("fuzz.sh", "build", 1, RUNS="9", PARSER="rows")
    assert len(calls) == 1 and calls[0].startswith("fuzz_rows ") and "-runs=9 " in calls[0]
    for parser in parsers:
        assert (ROOT / "tests/fuzz/corpus" / parser).is_dir()
    assert sorted(path.name for path in (ROOT / "tests/fuzz/corpus").iterdir() if path.is_dir()) == sorted(parsers)


@pytest.mark.parametrize("code", [0, 1])
def test_a_soak_removes_its_folder_and_says_how_it_ended(code, tree):
    tree.stand_in("build/io_soak", f"exit {code}")
    (tree.folder / "drive").mkdir()
    for environment, begin in (({}, "io_soak 10 "), ({"MINUTES": "3"}, "io_soak 3 "), ({"SEED": "8"}, "io_soak 0 ")):
        status, _, (call,) = tree.run("soak_io.sh", "build", STORAGE=str(tree.folder / "drive"), **environment)
        assert status == code and call.startswith(f"{begin}{tree.folder}/drive/tierflow-soak.") and call.endswith(" 8") == ("SEED" in environment)
        assert not list((tree.folder / "drive").iterdir())


@pytest.mark.parametrize("failing", [None, "storage", "optimizer"])
def test_both_benchmarks_run_and_a_failure_is_one(failing, tree):
    tree.stand_in("build/tierflow", f'[ "$2" != "{failing}" ]')
    status, _, calls = tree.run("bench.sh", "build", STORAGE="/drive")
    assert (status != 0) == (failing is not None) and calls[0] == "tierflow bench storage --dir /drive"
    assert failing == "storage" or calls[1:] == ["tierflow bench optimizer"]
    assert tree.run("bench.sh", "build")[2][0] == f"tierflow bench storage --dir {tree.folder}"


def test_the_demo_trains_samples_and_leaves_no_state(tree):
    tree.stand_in("build/tierflow", "mkdir -p demo/state demo/model; exit ${TRAIN:-0}")
    tree.stand_in(".venv/bin/python", f'case "$*" in -c*) exec {sys.executable} "$@" ;; esac; exit ${{SAMPLE:-0}}')
    status, said, calls = tree.run("demo.sh", STEPS="7")
    assert status == 0 and " --steps 7 " in calls[1] and " --data demo/text " in calls[1] and calls[2] == "python tools/demo_sample.py demo/model"
    assert list((tree.folder / "demo/text").glob("*.py")) and not (tree.folder / "demo/state").exists()
    (tree.folder / "demo/log.jsonl").write_text("of the run before")
    status, _, calls = tree.run("demo.sh", TRAIN="4", DATA="tools")
    assert status == 4 and len(calls) == 1 and " --data tools " in calls[0] and " --steps 100 " in calls[0]
    assert not (tree.folder / "demo/state").exists() and not (tree.folder / "demo/log.jsonl").exists()
    assert tree.run("demo.sh", SAMPLE="1")[0] == 1
    status, said, calls = tree.run("demo.sh", DATA="absent")
    assert status == 3 and said == "demo: DATA=absent does not exist\n" and not calls


def test_the_program_is_set_up_beside_the_download(tree):
    tree.stand_in("tools/setup.sh", 'case "$1" in --program) exit ${PROGRAM:-0} ;; --system) exit ${SYSTEM:-0} ;; esac')
    tree.stand_in("bin/cmake", "exit ${CMAKE:-0}")
    status, said, calls = tree.run("setup_program.sh", 3)
    assert status == 0 and calls[0] == "setup.sh --system" and "setup.sh --program" in calls and (tree.folder / "build/early").exists()
    assert [call for call in calls if call.startswith("cmake")] == ["cmake --preset release -DTIERFLOW_TORCH=OFF", "cmake --build build --parallel 3 --target tierflow_without_torch"]
    assert "building what needs no LibTorch" in said and not (tree.folder / "build/early.log").exists()
    assert tree.run("setup_program.sh", 3, CMAKE="1")[0] == 0  # what is wrong comes up again
    assert tree.run("setup_program.sh", 3, PROGRAM="1")[0] == 1
    assert tree.run("setup_program.sh", 3, SYSTEM="1")[::2] == (1, ["setup.sh --system"])
    (tree.folder / ".venv").mkdir()
    (tree.folder / ".venv/installed-requirements.txt").write_text("")
    assert tree.run("setup_program.sh", 3)[::2] == (0, ["setup.sh --program"])


def test_a_build_is_configured_once_and_again_when_nvcc_came(tree):
    tree.stand_in("tools/setup.sh")
    tree.stand_in("bin/cmake", "mkdir -p build; touch build/build.ninja")
    tree.stand_in("bin/nvcc")
    shutil.copy(ROOT / "Makefile", tree.folder)

    def configured():
        (tree.folder / "log").write_text("")
        subprocess.run(["make", "build"], cwd=tree.folder, env={"PATH": f"{tree.folder}/bin:/usr/bin:/bin"}, capture_output=True, check=True)
        return "cmake --preset release" in (tree.folder / "log").read_text()

    assert configured() and not configured()
    for found, again in ("TIERFLOW_NVCC-NOTFOUND", True), ("/usr/bin/nvcc", False):
        (tree.folder / "build/CMakeCache.txt").write_text(f"TIERFLOW_NVCC:FILEPATH={found}\n")
        assert configured() == again


def test_a_setup_that_fails_leaves_no_build_behind(tree):
    began = tree.folder / "began"
    tree.stand_in("tools/setup.sh", f'[ "$1" = --system ] || while [ ! -s {began} ]; do sleep 0.01; done; [ "$1" = --system ]')
    tree.stand_in("bin/cmake", f"echo $$ >{began}; exec sleep 60")
    assert tree.run("setup_program.sh", 3)[0] == 1
    deadline = time.monotonic() + 5

    def runs(pid):
        """One that has ended may wait for the first process to notice."""
        try:
            return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
        except OSError:
            return False

    while runs(began.read_text().strip()):
        assert time.monotonic() < deadline, "it still builds"
        time.sleep(0.01)


def test_the_table_of_what_fits_in_the_readme_is_the_one_that_is_computed():
    printed = subprocess.run([sys.executable, ROOT / "tools/fit_table.py"], capture_output=True, text=True, check=True).stdout.splitlines()
    readme = (ROOT / "README.md").read_text().splitlines()
    assert len(printed) == 8 and all(line in readme for line in printed), printed
