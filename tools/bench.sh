#!/usr/bin/env bash
# What bounds a step on this machine: the drive under STORAGE (default: here) and the optimizer on the CPU.
set -euo pipefail
build=$1
"$build/tierflow" bench storage --dir "${STORAGE:-$PWD}"
"$build/tierflow" bench optimizer
