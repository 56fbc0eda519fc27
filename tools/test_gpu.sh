#!/usr/bin/env bash
# Builds with CUDA and runs the tests labelled gpu. Without a GPU or nvcc it says so and succeeds.
set -euo pipefail
cd "$(dirname "$0")/.."
skip() { printf 'test-gpu: SKIPPED: %s\n' "$*"; exit 0; }

nvidia-smi -L 2>/dev/null | grep -q '^GPU' || skip "no NVIDIA GPU here (nvidia-smi finds none)"
command -v nvcc >/dev/null || [ -x /usr/local/cuda/bin/nvcc ] || skip "no nvcc here; install the CUDA toolkit"
nvidia-smi -L
[ -f build-cuda/build.ninja ] || cmake --preset cuda
cmake --build build-cuda --parallel "${JOBS:-$(nproc)}"
ctest --test-dir build-cuda --label-regex '^gpu$' --show-only | grep -q 'Total Tests: [1-9]' ||
  skip "no test of this version carries the label gpu"
exec ctest --test-dir build-cuda --label-regex '^gpu$' --output-on-failure
