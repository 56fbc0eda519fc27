#!/usr/bin/env bash
# QLoRA: the base is stored and streamed in 4 bits; adapters beside it learn from conversations.
. "$(dirname "$0")/common.sh"
base

say "what the 4 bits alone cost: held-out loss of the base on conversations, in bf16 and in nf4-double"
for precision in bf16 nf4-double; do
  "$TIERFLOW" eval --model "$WORK/base" --base-precision "$precision" --data "$WORK/data/held-out.jsonl" --sequence-length 128 --python "$PYTHON" --data-cache "$WORK/cache"
done

say "training the adapters"
train qlora --method lora --base-precision nf4-double --model "$WORK/base" --data "$WORK/data/chats.jsonl" --host-memory 4MiB --micro-batch 8 \
  --steps "${STEPS:-200}" --lr 5e-3 --warmup 5

say "questions that were not trained on"
"$PYTHON" "$here/ask.py" "$WORK/base" "$WORK/qlora" "$WORK/data/held-out.jsonl"
