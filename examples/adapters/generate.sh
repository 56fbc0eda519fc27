#!/usr/bin/env bash
# Generating text: a base without and with adapters, one text and many at once, and with weights that do not fit memory.
. "$(dirname "$0")/common.sh"
base
[ -e "$WORK/instruction/adapter_model.safetensors" ] || "$here/instruction.sh"

generate() {
  "$TIERFLOW" generate --model "$WORK/base" --python "$PYTHON" --max-new-tokens 24 "$@"
}

say "the base goes on with a text: the most likely tokens, then two draws"
generate --prompt "The length of the rope" --temperature 0
for seed in 1 2; do generate --prompt "The length of the rope" --temperature 0.8 --top-p 0.95 --seed "$seed"; done

say "a question, with adapters"
generate --adapter "$WORK/instruction" --chat --prompt "Which unit does the length of the bridge have?" --temperature 0

say "20 questions share each pass over the weights, as JSON; everything in memory, then with 6 MiB of it and the rest on storage"
# Each row's own question, without its answer.
sed 's/, {"role": "assistant".*/]}/' "$WORK/data/held-out.jsonl" >"$WORK/questions.jsonl"
ask() {
  generate --adapter "$WORK/instruction" --prompts "$WORK/questions.jsonl" --temperature 0 --json "$@"
}
ask >"$WORK/answers.jsonl"
ask --device-memory 12MiB --host-memory 6MiB --storage "$WORK/state" "${any[@]}" >"$WORK/answers-streamed.jsonl"
rm -rf "$WORK/state"
head -n 2 "$WORK/answers.jsonl"
cmp "$WORK/answers.jsonl" "$WORK/answers-streamed.jsonl"
echo "the same bytes of text either way"
