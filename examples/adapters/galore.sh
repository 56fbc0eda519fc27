#!/usr/bin/env bash
# Projected gradients beside full fine-tuning: the same data, the same number of steps; what each learns, and what each writes.
. "$(dirname "$0")/common.sh"
base

for method in full galore; do
  say "training with --method $method"
  options=(--method "$method" --model "$WORK/base" --data "$WORK/data/dialogues.jsonl" --host-memory 12MiB --micro-batch 8 --steps "${STEPS:-100}" --lr 1e-3 --warmup 5 --log-json "$WORK/$method.jsonl")
  [ "$method" = full ] || options+=(--rank 32 --update-gap 25 --scale 2)
  rm -f "$WORK/$method.jsonl"
  train "$method" "${options[@]}"
done

say "conversations that were not trained on, and bytes that a step writes inside of a window"
for method in full galore; do
  "$TIERFLOW" eval --model "$WORK/$method" --data "$WORK/data/dialogues-held-out.jsonl" --sequence-length 128 --python "$PYTHON" --data-cache "$WORK/cache"
  "$PYTHON" - "$WORK/$method.jsonl" "$method" <<'SHOWN'
import json, statistics, sys
steps = [record for record in map(json.loads, open(sys.argv[1])) if "loss" in record]
print(f"{sys.argv[2]}: {statistics.median(step['tb_written'] for step in steps) * 1e12 / 2**20:.1f} MiB written a step")
SHOWN
done
