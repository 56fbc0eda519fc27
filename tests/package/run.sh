#!/usr/bin/env bash
# Installs a build, builds examples/cpp against the installed package alone, and runs them: run.sh BUILD
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
build=$(realpath "$1")
export OMP_NUM_THREADS=1  # small matrices
work=$build/package-test
rm -rf "$work"
mkdir -p "$work/source"
cp "$here"/../../examples/cpp/* "$here"/config.json "$work/source"

cmake --install "$build" --prefix "$work/prefix" >/dev/null
cmake -S "$work/source" -B "$work/build" -G Ninja -DCMAKE_PREFIX_PATH="$work/prefix" -DCMAKE_BUILD_TYPE=Debug
cmake --build "$work/build"

"$work/prefix/bin/tierflow" init --config "$work/source/config.json" --out "$work/model" --seed 3
"$work/build/own_loop" "$work/state"
"$work/build/finetune" "$work/state" "$work/model" "$work/out"
test -s "$work/out/config.json"
compgen -G "$work/out/*.safetensors" >/dev/null
# The installed program finds its library.
head -c 8192 /dev/zero >"$work/tokens.bin"
"$work/prefix/bin/tierflow" eval --model "$work/out" --data "$work/tokens.bin" --sequence-length 32 --device-memory 64MiB --host-memory 16MiB
rm -rf "$work"
