#!/usr/bin/env bash
# Sets up what building the program takes: tools/setup_program.sh JOBS. On a machine without torch, what needs no LibTorch compiles in
# build/ while pip downloads it; build/early then says that the folder was configured without.
set -euo pipefail
cd "$(dirname "$0")/.."
jobs=$1 early=

if [ ! -e .venv/installed-requirements.txt ] && [ ! -e build/build.ninja ]; then
  tools/setup.sh --system
  mkdir -p build
  : >build/early
  set -m  # a process group of its own, which can be ended with all that it started
  {
    cmake --preset release -DTIERFLOW_TORCH=OFF && cmake --build build --parallel "$jobs" --target tierflow_without_torch
  } >build/early.log 2>&1 &
  early=$!
  set +m
  trap 'kill -- "-$early" 2>/dev/null || true; wait "$early" 2>/dev/null || true' EXIT
fi
tools/setup.sh --program
if [ -n "$early" ]; then
  echo 'setup: building what needs no LibTorch, since torch began to download'
  wait "$early" || true  # what is wrong comes up again, and is shown then
  trap - EXIT
  rm -f build/early.log
fi
