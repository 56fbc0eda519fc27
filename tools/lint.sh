#!/usr/bin/env bash
# Format, include directions, the Python package's types and clang-tidy; all run, any of them fails it. FILES="a.cpp b.cpp" narrows clang-tidy.
set -uo pipefail
cd "$(dirname "$0")/.."
build=$1 status=0
PATH=$PWD/.venv/bin:$PATH

git ls-files '*.h' '*.cpp' '*.cu' | xargs clang-format --dry-run --Werror --ferror-limit=1 || status=1
python tools/check_includes.py || status=1
(cd bindings && mypy --config-file ../pyproject.toml --python-executable ../.venv/bin/python -p tierflow) || status=1
[ -n "${FILES:-}" ] || FILES=$(git ls-files 'io/*.cpp' 'optim/*.cpp' 'swap/*.cpp')
printf '%s\n' $FILES | xargs -P "$(nproc)" -n 1 clang-tidy -p "$build" --quiet --warnings-as-errors='*' || status=1
exit $status
