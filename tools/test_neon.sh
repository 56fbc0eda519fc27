#!/usr/bin/env bash
# Cross-compiles optim and its tests for 64-bit ARM and runs them in QEMU's user mode. GTEST_FILTER narrows; all of it takes some 8 minutes.
set -euo pipefail
cd "$(dirname "$0")/.."
compiler=aarch64-linux-gnu-g++ emulator=qemu-aarch64 gtest=/usr/src/googletest/googletest
for tool in $compiler $emulator; do
  command -v $tool > /dev/null || { echo "test-neon: no $tool: apt-get install g++-aarch64-linux-gnu qemu-user" >&2; exit 1; }
done
[ "$(uname -m)" != aarch64 ] || { echo "test-neon: this is a 64-bit ARM machine: make test runs these tests" >&2; exit 1; }

build=build-neon
mkdir -p $build/include
ln -sfn /usr/include/hwy $build/include/hwy  # headers alone: nothing of the host's architecture is linked
flags=(-std=c++20 -O2 -ffp-contract=off -I. -isystem $build/include -isystem $gtest/include)
compile() {  # source, flags of its own
  local object
  object=$build/$(basename "${1%.*}").o
  [ "$object" -nt "$1" ] && [ -z "$(find optim tests/optim -newer "$object" -name '*.h' -print -quit)" ] && return
  echo "compiling $1"
  $compiler "${flags[@]}" "${@:2}" -c "$1" -o "$object"
}
for source in optim/{adamw,coefficients,environment,scalar,streams}.cpp tests/optim/{adamw,codec,parity,streams}_test.cpp; do
  compile $source -Wall -Wextra -Werror
done
compile optim/kernels_simd.cpp -Wall -Wextra -Werror -march=armv8-a+crypto
for source in gtest-all gtest_main; do compile $gtest/src/$source.cc -I$gtest; done
$compiler $build/*.o -static -pthread -o $build/optim_test 2> /dev/null
exec $emulator $build/optim_test "$@"
