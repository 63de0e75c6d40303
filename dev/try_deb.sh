#!/usr/bin/env bash
# Tests the package of make deb in a fresh Debian 12: apt installs it, an unprivileged user prepares a text, trains,
# stops, resumes and samples, and removing the package with apt leaves no files.
#
#   sudo dev/try_deb.sh [FOLDER]          (default: build; the newest train-gpt_*.deb in it)
#
# Needs root, debootstrap and 2 GB in TMPDIR. Exit code 0 only if all checks passed.
set -euo pipefail
. "$(dirname "$0")/chroot.sh"
cd "$(dirname "$0")/.."
# shellcheck disable=SC2012  # names without blanks, by time
package=$(realpath "$(ls -t "${1:-build}"/train-gpt_*.deb | head -n 1)")
worst=0

# expect CODE TEXT USER COMMAND: regular expressions of the command's exit code and of what it prints.
expect() {
    local code=0
    echo "== $3: $4"
    in_chroot root runuser -u "$3" -- bash -c "cd; $4" > "$folder/output" 2>&1 || code=$?
    tail -n 8 "$folder/output" | cut -c -200
    if ! [[ $code =~ ^($1)$ ]] || ! grep -qE -- "$2" "$folder/output"; then
        echo "-- WRONG: exit code $code instead of $1, or no line with: $2"
        worst=1
    fi
}
# Lists every file of the system, except the state of apt, dpkg and running programs.
files_of_chroot() {
    (cd "$folder/root" && find etc usr opt root srv var ! -path 'var/lib/apt/*' ! -path 'var/lib/dpkg/*' \
        ! -path 'var/cache/*' ! -path 'var/log/*' | sort)
}

echo "== $(basename "$package"), $(stat -c %s "$package") bytes"
make_chroot bookworm root
in_chroot root mount -t proc proc /proc
in_chroot root useradd --create-home --shell /bin/bash user
printf '127.0.0.1 localhost\n127.0.1.1 %s\n' "$(uname -n)" > "$folder/root/etc/hosts"
cp "$package" "$folder/root/tmp/train-gpt.deb"
python3 -c "print('\n'.join(f'{n} times {n} is {n * n}, and one more is {n * n + 1}.' for n in range(3000)))" \
    > "$folder/root/home/user/text.txt"
cat > "$folder/root/home/user/config.json" << 'CONFIG'
{
  "run": {"dir": "run"},
  "model": {"n_layer": 2, "n_head": 2, "n_embd": 64, "n_positions": 64, "vocab_size": 400},
  "data": {"train": "data/train_*.bin", "val": "data/val_*.bin", "tokenizer": "data/tokenizer.json"},
  "train": {"max_steps": 5, "batch_size": 2, "seq_len": 64, "total_batch_tokens": 256},
  "schedule": {"name": "constant", "warmup_steps": 0}
}
CONFIG
in_chroot root chown -R user:user /home/user
in_chroot root apt-get -qq update
# Install the dependencies first: they stay when the package is removed.
depends=$(dpkg-deb --field "$package" Depends | sed 's/ ([^)]*)//g; s/ |[^,]*//g; s/,//g')
# shellcheck disable=SC2086
in_chroot root env DEBIAN_FRONTEND=noninteractive apt-get -qq -y install --no-install-recommends $depends \
    > "$folder/apt.log" 2>&1 || { tail "$folder/apt.log"; exit 69; }
files_of_chroot > "$folder/before"

expect 0 'Setting up train-gpt' root 'apt-get -y install --no-install-recommends /tmp/train-gpt.deb'
expect 0 '^train_gpt 0\.[0-9.]+ \([0-9a-f]+, ' user 'train_gpt_cpu --version'
expect 0 'vectors of 8 floats' user 'train_gpt_cpu --version'
expect 0 'trained a tokenizer of 400 tokens' user 'train_gpt_cpu prepare --vocab-size 400 text.txt --out data'
expect 0 'train: ' user 'train_gpt_cpu prepare --tokenizer gpt2 text.txt --out gpt2'
expect 0 '50257 tokens' user 'train_gpt_cpu inspect gpt2/tokenizer.json'
expect 0 'step 5/5' user 'train_gpt_cpu config.json'
expect 0 'step 8/8' user 'train_gpt_cpu --supervise config.json --auto --accept-changes --set train.max_steps=8'
expect 0 '^3 times' user 'train_gpt_cpu sample run --prompt "3 times" --tokens 20'
expect 0 'total' user 'train_gpt_cpu plan /usr/share/train_gpt/configs/gpt2_124M.json'
expect 0 'OK' user 'cd / && md5sum --check --quiet /var/lib/dpkg/info/train-gpt.md5sums && echo OK'
expect 0 'Removing train-gpt' root 'apt-get -y purge train-gpt'
expect 127 'not found' user 'train_gpt_cpu --version'
files_of_chroot > "$folder/after"
if diff "$folder/before" "$folder/after"; then echo "== no files left"; else worst=1; fi
echo "== $([ "$worst" = 0 ] && echo all checks passed || echo A CHECK FAILED)"
exit "$worst"
