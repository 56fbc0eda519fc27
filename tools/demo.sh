#!/usr/bin/env bash
# Trains examples/demo/config.json, a Llama over bytes, with its state in demo/state and budgets well below that state. The text is
# Python's standard library, or DATA=path. STEPS=n for a longer run. Leaves demo/model (a Hugging Face folder),
# demo/log.jsonl and the text, no state.
set -euo pipefail
cd "$(dirname "$0")/.."

if [ -n "${DATA:-}" ]; then
  [ -e "$DATA" ] || { echo "demo: DATA=$DATA does not exist" >&2; exit 3; }
  data=$DATA
else
  library=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')
  data=demo/text
  mkdir -p "$data"
  cp "$library"/*.py "$data" || { echo "demo: no Python sources in $library; name a text with DATA=path" >&2; exit 3; }
fi

mkdir -p demo
rm -rf demo/model demo/state demo/log.jsonl
trap 'rm -rf demo/state' EXIT

# Real training wants a local drive. A demonstration may also run in a container or in RAM, and says so.
any=()
case $(stat --file-system --format %T demo) in
  overlay* | tmpfs | ramfs | fuse* | nfs* | v9fs | 9p)
    echo "demo: this folder is on $(stat --file-system --format %T demo), not directly on a drive: speeds will not be a drive's"
    any=(--allow-any-filesystem --allow-buffered) ;;
esac

build/tierflow train --config examples/demo/config.json --data "$data" --out demo/model --storage demo/state "${any[@]}" \
  --device auto --device-memory 56MiB --host-memory 10MiB --sequence-length 256 --micro-batch 2 --micro-batches 4 \
  --steps "${STEPS:-100}" --lr 1.5e-3 --warmup 10 --seed 1 --log-json demo/log.jsonl
.venv/bin/python tools/demo_sample.py demo/model
