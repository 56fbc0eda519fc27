"""Adds up JUnit reports into one line. Fails where a report is missing or holds a failure."""

import pathlib
import sys
import xml.etree.ElementTree as tree


def count(path):
    """(passed, failed, skipped) of a report."""
    cases = list(tree.parse(path).getroot().iter("testcase"))
    failed = sum(case.find("failure") is not None or case.find("error") is not None for case in cases)
    skipped = sum(case.find("skipped") is not None for case in cases)
    return len(cases) - failed - skipped, failed, skipped


def main(paths):
    totals, parts, broken = [0, 0, 0], [], False
    for path in map(pathlib.Path, paths):
        try:
            counts = count(path)
        except (OSError, tree.ParseError) as error:
            print(f"{path.stem}: no report: {error}")
            broken = True
            continue
        totals = [a + b for a, b in zip(totals, counts)]
        parts.append(f"{path.stem} {sum(counts)}")
    print(f"all tests: {totals[0]} passed, {totals[1]} failed, {totals[2]} skipped ({', '.join(parts)})")
    return int(broken or totals[1] > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
