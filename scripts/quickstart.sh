#!/usr/bin/env bash
# Quickstart: trains a GPT on real text on a fresh Debian and prints a sample, in a few minutes:
#
#   scripts/quickstart.sh [--text FILE]
#
# Installs missing packages (setup.sh), builds, trains a tokenizer and the model of configs/quickstart.json on the King
# James text, and compares the model with xz on the last 5 % of the text, which is held out from both. Trains on FILE
# (UTF-8) instead if there is one, with a vocabulary for its size.
# Writes only to build/ and runs/quickstart/, and moves an earlier run there aside.
# Exit codes: 0, or the exit codes of setup.sh, make and train_gpt.
set -euo pipefail
start=$SECONDS

text=''
if [ $# = 2 ] && [ "$1" = --text ]; then
    if ! text=$(realpath -e -- "$2" 2> /dev/null) || [ ! -f "$text" ]; then
        echo "quickstart: --text $2: file not found" >&2
        exit 66
    fi
elif [ $# != 0 ]; then
    echo "usage: scripts/quickstart.sh [--text FILE]" >&2
    exit 64
fi

cd "$(dirname "$0")/.."
config=configs/quickstart.json
work=build/quickstart
run=runs/quickstart
trainer=build/train_gpt_cpu

stage() { echo "quickstart: $*"; }

# Prints the number that follows a key in the JSON text on stdin.
number_of() { sed -n "s/.*\"$1\": *\([-+.0-9e]*\).*/\1/p"; }

# Prints the number of bytes that the held-out part adds to the compressed text, for xz's bits per byte.
xz_held_out_bytes() {
    xz -9ec "$text" | wc -c > "$work/xz_all" &
    head -c "$train_bytes" "$text" | xz -9ec | wc -c > "$work/xz_train"
    wait $!
    echo $(($(cat "$work/xz_all") - $(cat "$work/xz_train")))
}

if [ -n "$text" ]; then scripts/setup.sh xz; else scripts/setup.sh xz kjv; fi

stage "building $trainer"
make -s -j"$(nproc)" "$trainer"

mkdir -p "$work"
prompt=''
options=()
if [ -z "$text" ]; then
    text=$work/kjv.txt
    prompt='And the king said'
    # The best for three or four passes over this text
    options=(--vocab-size "$(number_of vocab_size < "$config")" --bpe-dropout 0.01)
    bible -f 'Gen1:1-Rev22:21' < /dev/null > "$text"
fi

stage "a tokenizer and token shards from $text"
"$trainer" prepare "${options[@]}" "$text" --out "$work/data" --minutes 0 --force
vocab_size=$(number_of vocab_size < "$work/data/dataset.json")

# Ending the training 320 s after the start keeps the whole script under six minutes. Train for at least two minutes.
seconds=$((320 - (SECONDS - start)))
if [ "$seconds" -lt 120 ]; then seconds=120; fi
run_command="$trainer $config --set model.vocab_size=$vocab_size"
run_command+=" --set train.max_minutes=$(awk "BEGIN { printf \"%.2f\", $seconds / 60 }")"
stage "training: $run_command"
code=0
$run_command --fresh || code=$?
if [ "$code" = 75 ]; then stage "stopped with a checkpoint; to continue: $run_command --resume"; fi
[ "$code" = 0 ] || exit "$code"

steps=$(grep -c '"kind":"train"' "$run/metrics.jsonl")
wanted=$(number_of max_steps < "$config")
if [ "$steps" -lt "$wanted" ]; then
    stage "trained $steps of $wanted steps in the available time; more steps give better text"
fi

stage "a sample from the trained model"
"$trainer" sample "$run" --prompt "$prompt" --tokens 150 --temperature 0.8 --top-k 50

train_bytes=$(number_of val_begin < "$work/data/dataset.json")
held_out_bytes=$(($(wc -c < "$text") - train_bytes))
result=$(grep '"val"' "$run/metrics.jsonl" | tail -n 1)
stage "compression of the last 5 % of the text, $held_out_bytes bytes that were held out"
printf '    train_gpt  %.3f bits per byte (validation loss %.3f)\n' \
    "$(number_of bits_per_byte <<< "$result")" "$(number_of loss <<< "$result")"
awk -v extra="$(xz_held_out_bytes)" -v bytes="$held_out_bytes" \
    'BEGIN { printf "    xz -9e     %.3f bits per byte\n", 8 * extra / bytes }'
stage "done in $((SECONDS - start)) s. Next:"
echo "    $trainer sample $run --prompt 'In the beginning'"
echo "    $trainer --help"
echo "and docs/own_data.md"
