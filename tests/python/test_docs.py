"""Documents that name tests name tests that exist."""
import pathlib
import re
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PROGRAMS = ("core_test", "io_test", "optim_test", "session_test", "swap_test", "train_test")


def listed(program):
    names, suite = set(), ""
    for line in subprocess.run([program, "--gtest_list_tests"], capture_output=True, text=True, check=True).stdout.splitlines():
        word = line.split("#")[0].split()
        if word and not line.startswith(" "):
            suite = word[0].rstrip(".").split("/")[-1]
        elif word:
            names.add(f"{suite}.{word[0].split('/')[0]}")
    return names


def test_every_kind_of_fault_has_its_row():
    listed = (ROOT / "docs" / "faults.md").read_text().partition("## Track record")[0]
    numbers = [int(number) for row in re.findall(r"^\| ([\d, ]+) \| ", listed, re.MULTILINE) for number in row.split(", ")]
    assert sorted({*numbers}) == list(range(1, 65))


def test_every_fault_has_the_test_that_its_row_names(tierflow):
    programs = [tierflow.parent / name for name in PROGRAMS]
    if not all(program.exists() for program in programs):
        pytest.skip("a test program is not built")
    known = set().union(*(listed(program) for program in programs))
    tested, _, without = (ROOT / "docs" / "faults.md").read_text().partition("## Without a test")
    record = without.partition("## Track record")[2]
    rows = [line for line in (tested + record).splitlines() if line.startswith("| ") and not line.startswith(("| # |", "| what was"))]
    assert record
    assert len(rows) > 64
    for row in rows:
        suite, named = "", 0
        for first, test in re.findall(r"`(\w*)\.(\w+)`", row):
            suite = first or suite
            assert f"{suite}.{test}" in known, row
            named += 1
        for file, test in re.findall(r"`(\w+\.py)::(\w+)`", row):
            assert f"def {test}(" in (ROOT / "tests" / "python" / file).read_text(), row
            named += 1
        assert named, row
