#!/usr/bin/env bash
# Runs every test of a build folder: ctest, then pytest; a failure of the first does not hide the second. Ends with one line of totals.
set -uo pipefail
build=$(realpath "$1")
cd "$(dirname "$0")/.."
reports=$build/test-reports
mkdir -p "$reports/suites"
rm -f "$reports"/*.xml "$reports"/suites/*.xml
status=0
# Two programs run beside each other, with as many threads each as there are cores: those that wait are not to take a core from the other.
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}

# Many of these wait for a drive or for a thread that waits: with half as many more as there are cores they took 0.85 of the time on two.
ctest --test-dir "$build" --parallel "$(($(nproc) * 3 / 2))" --output-on-failure --no-tests=error --output-junit "$reports/ctest.xml" || status=1
# Most tests wait for a program of one thread. With one more worker than cores they waited longer for the drive. A file's tests stay together: they share what they trained.
TIERFLOW_BUILD=$build .venv/bin/python -m pytest --numprocesses "$(nproc)" --maxprocesses 4 --dist loadfile --junitxml="$reports/pytest.xml" || status=1
.venv/bin/python tools/test_totals.py "$reports/ctest.xml" "$reports/pytest.xml" || status=1
exit $status
