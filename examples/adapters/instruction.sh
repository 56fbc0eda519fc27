#!/usr/bin/env bash
# Instruction tuning: conversations with a system message and several turns. Only what the assistant says is trained on.
. "$(dirname "$0")/common.sh"
base

say "three sequences as the model sees them; what is trained on stands out"
"$TIERFLOW" data preview 3 --model "$WORK/base" --data "$WORK/data/dialogues.jsonl" --sequence-length 128 --python "$PYTHON" --data-cache "$WORK/cache"

say "training the adapters"
train instruction --method lora --model "$WORK/base" --data "$WORK/data/dialogues.jsonl" --host-memory 10MiB --micro-batch 8 --steps "${STEPS:-200}" --lr 5e-3 --warmup 5

say "adding them to the model: the result is a whole model, which needs no adapters"
rm -rf "$WORK/instructed"
"$TIERFLOW" merge --adapter "$WORK/instruction" --out "$WORK/instructed"
"$TIERFLOW" eval --model "$WORK/instructed" --data "$WORK/data/dialogues-held-out.jsonl" --sequence-length 128 --python "$PYTHON" --data-cache "$WORK/cache"
