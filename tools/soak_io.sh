#!/usr/bin/env bash
# Random volumes, requests and faults until MINUTES have passed; with SEED that one round alone.
set -euo pipefail
build=$1
folder=$(mktemp -d "${STORAGE:-$PWD}/tierflow-soak.XXXXXX")
trap 'rm -rf "$folder"' EXIT
if [ -n "${SEED:-}" ]; then
  "$build/io_soak" 0 "$folder" "$SEED"
else
  "$build/io_soak" "${MINUTES:-10}" "$folder"
fi
