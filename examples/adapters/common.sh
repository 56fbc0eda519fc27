# shellcheck shell=bash
# Read by the examples of this folder. Set in the environment: TIERFLOW, the program; PYTHON, with the packages of requirements.txt;
# WORK, the folder that everything is written into; BASE_STEPS and STEPS, how long to train.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
TIERFLOW=${TIERFLOW:-$here/../../build/tierflow}
PYTHON=${PYTHON:-$here/../../.venv/bin/python}
WORK=${WORK:-$here/../../demo/adapters}
mkdir -p "$WORK"
WORK=$(cd "$WORK" && pwd)

# Real training wants a local drive; an example may also run in a container or in RAM.
any=()
case $(stat --file-system --format %T "$WORK") in
  overlay* | tmpfs | ramfs | fuse* | nfs* | v9fs | 9p)
    any=(--allow-any-filesystem --allow-buffered) ;;
esac

say() { printf '\n== %s\n' "$*"; }

# train OUT WORDS...: `tierflow train` with small budgets. State lies in WORK/state while it runs; a result with this name is replaced.
train() {
  local out=$WORK/$1
  shift
  rm -rf "$out" "$WORK/state"
  "$TIERFLOW" train --out "$out" --storage "$WORK/state" "${any[@]}" --durability export-only --python "$PYTHON" --data-cache "$WORK/cache" \
    --device-memory 64MiB --sequence-length 128 --seed 1 "$@"
  rm -rf "$WORK/state"
}

# The data and the model that the examples share, made once: WORK/data and WORK/base.
base() {
  [ ! -e "$WORK/base/tokenizer.json" ] || return 0
  say "making the data, and a base model of 3 million parameters that reads plain text: quantities, things and units, and no answers to questions"
  "$PYTHON" "$here/make_data.py" "$WORK/data"
  train base --config "$here/config.json" --tokenizer "$WORK/data/tokenizer/tokenizer.json" --data "$WORK/data/sentences.jsonl" \
    --host-memory 10MiB --micro-batch 8 --micro-batches 2 --steps "${BASE_STEPS:-100}" --lr 2e-3 --warmup 10
  cp "$WORK"/data/tokenizer/* "$WORK/base"
}
