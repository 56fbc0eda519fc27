#!/usr/bin/env bash
# Builds with CUDA and runs the tests labelled gpu, then the kernels and copies under compute-sanitizer where that is installed.
# Without a GPU or nvcc it says what was not verified, and succeeds.
set -euo pipefail
cd "$(dirname "$0")/.."
skip() {
  printf 'test-gpu: SKIPPED: %s\n' "$*"
  printf 'test-gpu: not verified: %s\n' \
    'the device contract (streams, events, pinned copies) on CUDA' \
    'offloaded = resident on the GPU, bit for bit, in deterministic mode, and its cost' \
    'the update on the GPU = the update on the CPU, bit for bit, by itself and in streamed training; its rate' \
    'a model that Python streams on the GPU: gradients of torch, the same bits under every budget' \
    'a thousand steps without a leak, and memory that runs out, on the GPU' \
    'compute-sanitizer: memcheck, racecheck, synccheck'
  exit 0
}

nvidia-smi -L 2>/dev/null | grep -q '^GPU' || skip "no NVIDIA GPU here (nvidia-smi finds none)"
command -v nvcc >/dev/null || [ -x /usr/local/cuda/bin/nvcc ] || skip "no nvcc here; install the CUDA toolkit"
nvidia-smi -L
[ -f build-cuda/build.ninja ] || cmake --preset cuda
cmake --build build-cuda --parallel "${JOBS:-$(nproc)}" --target device_test optim_gpu_test gpu_test tierflow_python
# Programs of the label, not single tests: a context a test would take longer than the tests.
status=0
for program in device_test optim_gpu_test gpu_test; do
  printf 'test-gpu: %s\n' "$program"
  (cd build-cuda && OMP_WAIT_POLICY=passive timeout 400 "./$program" --gtest_brief=1) || { status=1; printf 'test-gpu: FAILED: %s\n' "$program"; }
done
printf 'test-gpu: the Python package\n'
TIERFLOW_BUILD=$PWD/build-cuda CUBLAS_WORKSPACE_CONFIG=:4096:8 OMP_WAIT_POLICY=passive timeout 400 \
  .venv/bin/python -m pytest -q tests/python/test_stream_on_device.py || { status=1; printf 'test-gpu: FAILED: the Python package\n'; }

sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2>/dev/null ||
  find -L .venv/lib -path '*nvidia*' -name compute-sanitizer -type f 2>/dev/null | head -n 1 || true)
if [ -z "$sanitizer" ]; then
  printf 'test-gpu: not verified: compute-sanitizer (memcheck, racecheck, synccheck): the tool is not installed\n'
else
  for tool in memcheck racecheck synccheck; do
    for run in "device_test --gtest_filter=*cuda*" "optim_gpu_test --gtest_filter=*OnGpu*adamw_block8*split:SumsOnGpu*" "gpu_test --gtest_filter=*RowKernelsOnGpu*"; do
      printf 'test-gpu: %s: %s\n' "$tool" "$run"
      # shellcheck disable=SC2086  # the words of a command
      (cd build-cuda && timeout 240 "$sanitizer" --tool "$tool" --error-exitcode 1 ./$run --gtest_brief=1) ||
        { status=1; printf 'test-gpu: FAILED: %s: %s\n' "$tool" "$run"; }
    done
  done
fi
[ $status -eq 0 ] && printf 'test-gpu: passed\n'
exit $status
