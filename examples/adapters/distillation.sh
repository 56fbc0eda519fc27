#!/usr/bin/env bash
# Distillation: a model a tenth of the base's size learns from a few texts, alone and from what the base finds likely in them.
. "$(dirname "$0")/common.sh"
base
head -n 400 "$WORK/data/sentences.jsonl" > "$WORK/data/few.jsonl"
tail -n 400 "$WORK/data/sentences.jsonl" > "$WORK/data/others.jsonl"
data=(--sequence-length 128 --python "$PYTHON" --data-cache "$WORK/cache")

say "the base is the teacher: its 32 most likely tokens at each position, in one pass"
"$TIERFLOW" eval --model "$WORK/base" --data "$WORK/data/few.jsonl" "${data[@]}" --device-memory 64MiB --host-memory 16MiB \
  --teacher-out "$WORK/teacher.tft" --teacher-top 32

# learn OUT WORDS...: a small model from random weights, the same steps on the same data.
learn() {
  local out=$1
  shift
  train "$out" --config "$here/student.json" --tokenizer "$WORK/data/tokenizer/tokenizer.json" --data "$WORK/data/few.jsonl" --host-memory 16MiB \
    --micro-batch 8 --steps "${STEPS:-80}" --lr 3e-3 --warmup 5 "$@"
  cp "$WORK"/data/tokenizer/* "$WORK/$out"
}

say "a student without a teacher"
learn alone

say "a student with it"
learn student --distill "$WORK/teacher.tft"

say "texts that the students have not seen"
for model in base alone student; do
  echo "$model:"
  "$TIERFLOW" eval --model "$WORK/$model" --data "$WORK/data/others.jsonl" "${data[@]}"
done
