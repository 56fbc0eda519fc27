#!/usr/bin/env bash
# Preference tuning: adapters first learn to answer, then, by DPO, to answer in one word rather than in a sentence.
. "$(dirname "$0")/common.sh"
base

say "a pair: the answer that was chosen, and the one that was rejected"
head -n 1 "$WORK/data/pairs.jsonl"

say "training adapters to answer: cross-entropy on conversations"
train answers --method lora --model "$WORK/base" --data "$WORK/data/chats.jsonl" --host-memory 16MiB --micro-batch 8 --steps "${STEPS:-200}" --lr 5e-3 --warmup 5

say "going on with them by DPO: the loss is relative to the adapters as they were"
train preference --method lora --model "$WORK/base" --adapter "$WORK/answers" --data "$WORK/data/pairs.jsonl" --loss dpo --host-memory 16MiB \
  --micro-batch 8 --steps "${STEPS:-30}" --lr 2e-4 --held-out 0.05

say "a question that was not trained on, before and after"
question=$(head -n 1 "$WORK/data/held-out.jsonl" | sed 's/.*"user", "content": "\([^"]*\)".*/\1/')
for adapter in answers preference; do
  "$TIERFLOW" generate --model "$WORK/base" --adapter "$WORK/$adapter" --python "$PYTHON" --chat --prompt "$question" --temperature 0 --max-new-tokens 24
done
