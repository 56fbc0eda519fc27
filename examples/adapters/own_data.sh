#!/usr/bin/env bash
# Data of one's own: a script of a few lines turns a table into rows, `data prepare` counts them, `data preview` shows them.
. "$(dirname "$0")/common.sh"
base

say "the table, and the rows that csv_to_rows.py makes of it"
head -n 4 "$WORK/data/units.csv"
"$PYTHON" "$here/csv_to_rows.py" "$WORK/data/units.csv" "$WORK/rows.jsonl"
head -n 1 "$WORK/rows.jsonl"

data=(--model "$WORK/base" --data "$WORK/rows.jsonl" --sequence-length 128 --python "$PYTHON" --data-cache "$WORK/cache")
say "what they come to"
"$TIERFLOW" data prepare "${data[@]}"
say "what the model sees"
"$TIERFLOW" data preview 1 "${data[@]}"

say "training the adapters"
train own --method lora --model "$WORK/base" --data "$WORK/rows.jsonl" --host-memory 10MiB --micro-batch 8 --steps "${STEPS:-200}" --lr 5e-3 --warmup 5
