#!/usr/bin/env bash
# What bounds a step on this machine: the drive under STORAGE (default: here) and the optimizer on the CPU. One JSON line a result.
set -euo pipefail
build=$1
folder=$(mktemp -d "${STORAGE:-$PWD}/tierflow-bench.XXXXXX")
trap 'rm -rf "$folder"' EXIT
"$build/storage_bench" --dir "$folder" --size $((1 << 30))
"$build/optimizer_bench"
