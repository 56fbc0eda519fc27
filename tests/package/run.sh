#!/usr/bin/env bash
# Installs a build, builds examples/cpp against the installed package alone, and runs them: run.sh BUILD
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
build=$(realpath "$1")
export OMP_NUM_THREADS=1  # small matrices
work=$build/package-test
rm -rf "$work"
mkdir -p "$work/source"
cp "$here"/../../examples/cpp/* "$here"/config.json "$work/source"

cmake --install "$build" --prefix "$work/prefix" >/dev/null
cmake -S "$work/source" -B "$work/build" -G Ninja -DCMAKE_PREFIX_PATH="$work/prefix"
cmake --build "$work/build"

"$work/prefix/bin/tierflow" init --config "$work/source/config.json" --out "$work/model" --seed 3
"$work/build/own_loop" "$work/state"
"$work/build/own_lora" "$work/state" "$work/own"
test -s "$work/own/adapter/adapter_model.safetensors"
"$work/build/finetune" "$work/state" "$work/model" "$work/out"
test -s "$work/out/config.json"
compgen -G "$work/out/*.safetensors" >/dev/null
# The rule that it learned: 5 * token + 3 follows each token.
"$work/build/generate" "$work/state" "$work/out" 7 >"$work/tokens"
test "$(wc -l <"$work/tokens")" = 16 && test "$(head -1 "$work/tokens")" = 38
# Conversations: prepared by the program, trained on by the library.
adapters=$here/../../examples/adapters
python=$here/../../.venv/bin/python
"$python" "$adapters/make_data.py" "$work/data"
"$work/prefix/bin/tierflow" init --config "$adapters/config.json" --out "$work/base" --seed 3
cp "$work"/data/tokenizer/* "$work/base"
"$work/prefix/bin/tierflow" data prepare --model "$work/base" --data "$work/data/chats.jsonl" --out "$work/rows.tfd" --data-cache "$work/cache" \
  --python "$python" --sequence-length 128
"$work/build/chat_lora" "$work/state" "$work/base" "$work/rows.tfd" "$work/adapter"
test -s "$work/adapter/adapter_model.safetensors"
"$work/prefix/bin/tierflow" data prepare --model "$work/base" --data "$work/data/pairs.jsonl" --data-format preference --out "$work/pairs.tfd" \
  --data-cache "$work/cache" --python "$python" --sequence-length 128
"$work/build/dpo_lora" "$work/state" "$work/base" "$work/pairs.tfd" "$work/preferring"
test -s "$work/preferring/adapter_model.safetensors"
# The installed program finds its library.
head -c 8192 /dev/zero >"$work/tokens.bin"
"$work/prefix/bin/tierflow" eval --model "$work/out" --data "$work/tokens.bin" --sequence-length 32 --device-memory 64MiB --host-memory 16MiB
rm -rf "$work"
