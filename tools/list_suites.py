"""Writes the ctest entries of a GoogleTest program, one for each suite: PROGRAM FILE.cmake --reports FOLDER --label LABEL."""

import argparse
import pathlib
import subprocess

SECONDS, EACH = 600, 60  # that a suite may take on a busy machine, and each of its tests besides


def suites(program):
    """How many tests each of its suites has, without those that are disabled."""
    listed = subprocess.run([program, "--gtest_list_tests"], capture_output=True, text=True, timeout=60, check=True).stdout
    found, suite = {}, ""
    for line in listed.splitlines():
        name = line.split("#")[0].rstrip()  # a comment says what a test's parameter is
        if name.endswith(".") and not name.startswith(" "):
            suite = name
        elif name.startswith("  ") and "DISABLED_" not in suite and not name.strip().startswith("DISABLED_"):
            found[suite] = found.get(suite, 0) + 1
    return found


def entry(program, suite, tests, reports, label):
    """Names have no slash: they are those of reports as well. Where several entries run beside each other, the largest begin first. One thread
    each: models of tests are so small that more threads cost a third more processor time. Tests of threads set their number themselves."""
    name = f"{pathlib.Path(program).name}.{suite.rstrip('.').replace('/', '-')}"
    environment = f"OMP_NUM_THREADS=1;OMP_WAIT_POLICY=passive;GTEST_OUTPUT=xml:{reports}/{name}.xml"
    labels = f" LABELS [==[{label}]==]" if label else ""
    return (
        f"add_test([==[{name}]==] [==[{program}]==] [==[--gtest_filter={suite}*]==])\n"
        f"set_tests_properties([==[{name}]==] PROPERTIES TIMEOUT {SECONDS + EACH * tests} COST {tests} ENVIRONMENT [==[{environment}]==]{labels})\n"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("program")
    parser.add_argument("file", type=pathlib.Path)
    parser.add_argument("--reports", required=True)
    parser.add_argument("--label", default="")
    options = parser.parse_args()
    text = "".join(entry(options.program, suite, tests, options.reports, options.label) for suite, tests in suites(options.program).items())
    options.file.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
