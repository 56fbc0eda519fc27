"""Adds up JUnit reports into one line, the last. Fails where a report is missing, holds a failure, or holds a skip for want
of something that tools/setup.sh installs or `make build` builds. In ctest's report the entry of a suite is replaced by the suite's
tests, whose own reports lie in suites/ beside it and are used up."""

import collections
import os
import pathlib
import re
import shutil
import sys
import xml.etree.ElementTree as tree

# What a machine may lack through no fault of its set-up. Any other reason to skip is a failure.
GPU = r"no CUDA device here|needs? an NVIDIA GPU"
MOUNTS = r"this machine does not let us (mount|serve)"
ALLOWED = (
    GPU,
    r"this build has (no )?CUDA",
    MOUNTS,
    r"this file system punches no holes|the file system refuses O_DIRECT|no way to break this ext4",
    r"which the sanitizer reports as it should|the sanitizer keeps freed memory for a while",
    r"root may write everywhere",
    r"only root (may become|becomes) another user|only root gives files away|this user may not lock a gibibyte of memory",
    r"no (dpkg|cuobjdump) here",
    r"this machine has no io_uring",
    r"a file system in memory has no drive",
)
MOUNTING = ("losetup", "mount", "umount", "mkfs.ext4")  # programs that the tests of real file systems run


def reason(case):
    """Why a test was skipped; "" where it was not."""
    skipped = case.find("skipped")
    if skipped is None:
        return ""
    lines = (case.findtext("system-out") or "").splitlines()
    given = [after for line, after in zip(lines, lines[1:]) if line.endswith(": Skipped")]  # GoogleTest's, in ctest's report
    given += [line for line in lines if line.startswith("SKIPPED: ")]
    return " ".join([*given, skipped.get("message") or "", skipped.text or ""]).strip() or "no reason given"


def wanting(why):
    """What a skipped test lacks that the set-up should have brought; None where the machine may lack it."""
    if not any(re.search(pattern, why) for pattern in ALLOWED):
        return why
    if "does not let us" in why:
        path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
        absent = [program for program in MOUNTING if shutil.which(program, path=path) is None]
        if absent:
            return f"{' and '.join(absent)} not installed: {why}"
    return None


def kind(why):
    """Under what a skip is counted."""
    return "for want of a GPU" if re.search(GPU, why) else "for want of mounts" if re.search(MOUNTS, why) else "for another reason"


def expand(path):
    """Puts tests in the place of their suites' entries. An entry without a report of its tests has failed; one that failed though none of
    its tests did (a crash, a time limit) stays beside them."""
    report = tree.parse(path)
    root = report.getroot()
    for case in root.findall("testcase"):
        own = path.parent / "suites" / f"{case.get('name')}.xml"
        failed = case.find("failure") is not None or case.get("status") == "fail"
        if own.exists():
            tests = [one for one in tree.parse(own).getroot().iter("testcase") if one.get("status") != "notrun"]
            own.unlink()
        elif re.search(r"Note: Google Test filter = \S+\.\*$", case.findtext("system-out") or "", re.MULTILINE):
            tests = []
        else:
            continue
        at = list(root).index(case)
        if not tests or failed and all(one.find("failure") is None for one in tests):
            if case.find("failure") is None:
                tree.SubElement(case, "failure", message="the suite left no report of its tests")
            at += 1
        else:
            root.remove(case)
        for one in reversed(tests):
            root.insert(at, one)
    cases = root.findall("testcase")
    if root.tag == "testsuite" and cases:
        root.set("tests", str(len(cases)))
        root.set("failures", str(sum(one.find("failure") is not None for one in cases)))
        root.set("skipped", str(sum(one.find("skipped") is not None for one in cases)))
    report.write(path, encoding="utf-8", xml_declaration=True)


def count(path):
    """(passed, failed, skipped) of a report, what its skipped tests want, and how many were skipped of each kind."""
    cases = list(tree.parse(path).getroot().iter("testcase"))
    failed = sum(case.find("failure") is not None or case.find("error") is not None for case in cases)
    why = {f"{case.get('classname')}.{case.get('name')}": reason(case) for case in cases if case.find("skipped") is not None}
    wants = {name: wanting(text) for name, text in why.items() if wanting(text)}
    kinds = collections.Counter(kind(text) for name, text in why.items() if name not in wants)
    return (len(cases) - failed - len(why), failed + len(wants), len(why) - len(wants)), wants, kinds


def main(paths):
    totals, parts, skipped = [0, 0, 0], [], collections.Counter()
    for path in map(pathlib.Path, paths):
        try:
            expand(path)
            counts, wants, kinds = count(path)
        except (OSError, tree.ParseError) as error:
            print(f"{path.stem}: no report, which counts as a failure: {error}")
            totals[1] += 1
            continue
        for name, want in wants.items():
            print(f"{path.stem}: {name} was skipped, which counts as a failure (make setup, make build): {want}")
        totals = [a + b for a, b in zip(totals, counts)]
        parts.append(f"{path.stem} {sum(counts)}")
        skipped += kinds
    if skipped:
        print("skipped " + ", ".join(f"{number} {why}" for why, number in skipped.most_common()))
    print(f"all tests: {totals[0]} passed, {totals[1]} failed, {totals[2]} skipped ({', '.join(parts)})")
    print(f"{totals[0]} passed, {totals[1]} failed, {totals[2]} skipped")
    return int(totals[1] > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
