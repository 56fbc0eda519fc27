#!/usr/bin/env bash
# Adapter tuning from beginning to end, with nothing downloaded: makes a base model of 3 million parameters, tunes adapters over its 4-bit
# form (examples/adapters/qlora.sh), and asks questions before and after. Made again each time; leaves demo/lora/base, demo/lora/qlora
# (PEFT's folder) and the data, no state.
set -euo pipefail
cd "$(dirname "$0")/.."
export WORK=$PWD/demo/lora
rm -rf "$WORK"
trap 'rm -rf "$WORK/state" "$WORK/cache"' EXIT
examples/adapters/qlora.sh
printf '\nThe adapters are in demo/lora/qlora, their model in demo/lora/base. examples/adapters has more such runs.\n'
