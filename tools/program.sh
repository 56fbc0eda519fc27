#!/usr/bin/env bash
# Sets up what the program takes and builds it: tools/program.sh JOBS. On a machine without torch, what needs no LibTorch compiles
# while pip downloads it.
set -euo pipefail
cd "$(dirname "$0")/.."
jobs=$1 early=

# An early build knows no LibTorch; until it is configured anew, build/early says so.
configure() { [ -f build/build.ninja ] && [ ! -e build/early ] || cmake --preset release "$@"; }
if [ ! -e .venv/installed-requirements.txt ] && [ ! -e build/build.ninja ]; then
  tools/setup.sh --system
  mkdir -p build
  : >build/early
  {
    cmake --preset release -DTIERFLOW_TORCH=OFF && cmake --build build --parallel "$jobs" --target tierflow_without_torch
  } >build/early.log 2>&1 &
  early=$!
  trap 'kill "$early" 2>/dev/null || true; wait "$early" 2>/dev/null || true' EXIT
fi
tools/setup.sh --program
if [ -n "$early" ]; then
  echo 'program: building what needs no LibTorch, since torch began to download'
  wait "$early" || true  # what is wrong comes up again, and is shown then
  trap - EXIT
fi
configure -DTIERFLOW_TORCH=ON
rm -f build/early build/early.log
cmake --build build --parallel "$jobs" --target tierflow_program
