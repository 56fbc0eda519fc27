#!/usr/bin/env bash
# Adapter tuning from beginning to end, with nothing downloaded: makes a base model of 3 million parameters, tunes adapters over its 4-bit
# form (examples/adapters/qlora.sh), and asks questions before and after. Made again each time; leaves base, qlora (PEFT's folder) and
# the data in demo/lora, or in WORK, and no state.
set -euo pipefail
cd "$(dirname "$0")/.."
export WORK=${WORK:-$PWD/demo/lora}
rm -rf "$WORK"/{base,data,qlora,state,cache}
trap 'rm -rf "$WORK/state" "$WORK/cache"' EXIT
examples/adapters/qlora.sh
printf '\nThe adapters are in %s, their model in %s. examples/adapters has more such runs.\n' "${WORK#"$PWD"/}"/{qlora,base}
