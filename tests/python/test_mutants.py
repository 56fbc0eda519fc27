"""The mutation tool: what it draws, what it counts, and that it notices when tests notice nothing. A project of two functions stands in."""

import difflib
import pathlib
import subprocess
import sys
import time

import pytest

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import mutant_sampling as sampling
import mutants

SOURCE = """int larger(int a, int b) {
  if (a > b) return a;
  return b;
}
int before(int a) {
  return a - 1;
}
int untested(int a) {
  return a + 1;
}
"""
FILES = {
    "CMakeLists.txt": """cmake_minimum_required(VERSION 3.25)
project(tiny LANGUAGES CXX)
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY "${CMAKE_BINARY_DIR}")
add_library(tierflow_io STATIC io/larger.cpp)
add_executable(io_test tests/main.cpp tests/larger_test.cpp tests/before_test.cpp)
target_link_libraries(io_test PRIVATE tierflow_io)
""",
    "io/larger.cpp": SOURCE,
    "tests/main.cpp": """#include "tests.h"
bool failed;
int main() { return failed; }
""",
    "tests/tests.h": """#include <cstdio>
extern bool failed;
struct Test {
  Test(const char* name, bool passed) {
    if (!passed) std::printf("[  FAILED  ] %s\\n", name), failed = true;
  }
};
""",
    "tests/larger_test.cpp": """#include "tests.h"
int larger(int a, int b);
Test of_two("Larger.OfTwo", larger(2, 1) == 2 && larger(1, 2) == 2);
""",
    "tests/before_test.cpp": """#include "tests.h"
int before(int a);
Test of_one("Before.OfOne", before(1) == 0);
""",
    ".gitignore": "/build*/\n",
}


def patch(promise, old, new):
    changed = SOURCE.replace(old, new)
    assert changed != SOURCE
    lines = difflib.unified_diff(SOURCE.splitlines(True), changed.splitlines(True), "a/io/larger.cpp", "b/io/larger.cpp")
    return f"# {promise}\n" + "".join(lines)


@pytest.fixture
def project(tmp_path, monkeypatch):
    """Writes a project with the given patches and runs the tool on it."""
    monkeypatch.setattr(mutants, "FILES", {"io": ["io/*.cpp"]})
    monkeypatch.setattr(mutants, "PLAIN", {"io": ["io_test"]})
    monkeypatch.setattr(mutants, "WITH_TORCH", ["io_test"])

    def run(patches, *arguments):
        for name, text in {**FILES, **{f"tests/mutants/{name}": text for name, text in patches.items()}}.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
        code = mutants.main(["io", *arguments], tmp_path)
        assert (tmp_path / "io/larger.cpp").read_text() == SOURCE, "the checkout is never written"
        return code

    return run


def test_notices_what_tests_notice(project, capsys):
    killed = patch("the larger of two", "a > b", "a < b")
    assert project({"io/larger.patch": killed}, "--minutes", "0") == 0
    assert "Larger.OfTwo" in capsys.readouterr().err

    other = patch("one less", "a - 1", "a - 2")
    assert project({"io/other.patch": other}, "--minutes", "0") == 0
    assert "Before.OfOne" in capsys.readouterr().err, "the tests of other names run too"

    survives = patch("one more", "a + 1", "a + 2")
    assert project({"io/untested.patch": survives}, "--minutes", "0") == 1, "a listed mutation survived"
    said = capsys.readouterr()
    assert "io/untested.patch: survived: one more" in said.out
    assert "larger.patch" in said.err and " killed " in said.err, "the original came back between the two"

    unused = patch("nothing at all", "a + 1", "(a + 1)")
    assert project({"io/same.patch": unused}, "--minutes", "0") == 1
    assert "io/same.patch: equivalent" in capsys.readouterr().out


def test_a_patch_that_no_longer_applies_is_an_error(project, capsys):
    gone = patch("the larger of two", "a > b", "a < b").replace("return a", "return c")
    assert project({"io/gone.patch": gone}, "--minutes", "0") == 1
    assert "io/gone.patch no longer applies" in capsys.readouterr().err


def test_a_program_that_hangs_is_noticed(project, monkeypatch, capsys):
    monkeypatch.setattr(mutants, "SPARE_SECONDS", 1)
    hangs = patch("comes to an end", "return b;", "for (;;) {}")
    assert project({"io/hangs.patch": hangs}, "--minutes", "0") == 0
    assert "timed out" in capsys.readouterr().err


def test_an_interrupted_run_leaves_no_test_running(project, monkeypatch, tmp_path, capsys):
    polls, sleep = [], time.sleep

    def interrupted(seconds):
        polls.append(seconds)
        if len(polls) == 100:
            raise KeyboardInterrupt
        sleep(seconds)

    monkeypatch.setattr(time, "sleep", interrupted)
    project({"io/hangs.patch": patch("comes to an end", "return b;", "for (;;) {}")}, "--minutes", "0")
    assert "interrupted; what there is" in capsys.readouterr().err
    commands = [path.read_bytes().decode() for path in pathlib.Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert [one for one in commands if str(tmp_path) in one and "io_test" in one] == []


def drawn(seed):
    lines = [mutants.Mutant("io/larger.cpp", line, "old", f"new {line}.{which}") for line in range(1, 6) for which in range(3)]
    return [(each.line, each.new) for each in mutants.sample(lines, seed)]


def test_a_seed_draws_the_same_mutants_again():
    assert drawn(1) == drawn(1) != drawn(2)
    assert sorted(set(drawn(1))) == sorted(drawn(1)) and len(drawn(1)) == 15
    assert {line for line, _ in drawn(1)[:5]} == {1, 2, 3, 4, 5}, "every line once before any comes twice"


def results(**outcomes):
    return [mutants.Result("a", "io", outcome.replace("_", " ")) for outcome, count in outcomes.items() for _ in range(count)]


def test_the_score_counts_what_a_test_could_notice():
    assert mutants.score(results(killed=16, timed_out=1, survived=3, not_compiled=50, equivalent=9)) == 85
    assert mutants.score(results(not_compiled=1, equivalent=1)) is None
    assert mutants.verdict(results(killed=17, survived=3)) == 0
    assert mutants.verdict(results(killed=84, survived=16)) == 1


def test_every_mutation_of_the_lists_applies():
    assert list(mutants.patch_faults(ROOT)) == []
    assert list(mutants.faults_of_equivalents(ROOT, mutants.read_equivalents(ROOT / "tests/mutants/equivalent.toml"))) == []


def test_tests_in_python_run_with_the_settings_of_the_checkout():
    command = mutants.pytest_command(ROOT, ["tests/python/test_mutants.py", "-k", "with_the_settings", "--collect-only"])
    ended = subprocess.run(command, cwd="/", capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "1/" in ended.stdout


def test_what_cannot_compile_is_not_drawn():
    lines = ["for (int i = 0; i < n; ++i) {\n", "  sum += a * i;\n", "}\n", "const float* p = begin_of(pending);\n"]
    lines += ["while (a) {\n", "  if (b) {\n", "    c();\n", "  }\n", "  d();\n", "}\n"]

    def may(line, new):
        return bool(sampling.may_compile(mutants.Mutant("f", line, lines[line - 1], new), lines))

    assert may(2, "  sum += a + i;\n") and may(2, "  /*sum += a * i;*/\n") and may(2, "  sum += a * i;\n  break;\n")
    assert may(1, "for (int i = 0; i <= n; ++i) {\n") and may(1, "for (int i = 1; i < n; ++i) {\n")
    assert not may(1, "for (int i = 0; i < n; %+i) {\n") and not may(3, "/*}*/\n")
    assert not may(4, lines[3] + "break;\n"), "in no loop"
    lines += ["int f(int a) {\n", "  if (a > 1) {\n", "    return 2;\n", "  }\n", "  return a;\n", "}\n"]
    assert may(13, "    /*return 2;*/\n") and not may(15, "  /*return a;*/\n"), "no value"
    assert may(7, lines[6] + "    continue;\n") and not may(9, lines[8] + "  continue;\n"), "the loop ends there anyway"
    assert not may(4, "const float+ p = begin_of(pending);\n"), "a pointer is no product"
    assert not may(4, "const float* p = begin_of(pbegining);\n"), "part of a name"
    assert not may(4, "/*const float* p = begin_of(pending);*/\n"), "a declaration"
    assert not may(4, "const float* p = begin_of((pending);\n"), "half of a pair"


def test_every_pattern_of_files_has_a_file():
    for patterns in mutants.FILES.values():
        assert patterns
        for pattern in patterns:
            assert any(ROOT.glob(pattern)), pattern
