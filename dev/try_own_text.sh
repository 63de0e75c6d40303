#!/usr/bin/env bash
# Tests the README's recipe for your own text: runs its lines up to the sample, as they are in the README, on one text
# file in a fresh minimal Debian 12 made by debootstrap.
#
#   sudo dev/try_own_text.sh FILE.txt
#
# Needs root, debootstrap and 2 GB in TMPDIR. Tests a clone of the last commit, not the working tree. Packages come from
# this machine's apt sources. Prints the time of each command. Exits with the code of the first command that failed.
set -euo pipefail
text=$(realpath -e -- "$1")
. "$(dirname "$0")/chroot.sh"
cd "$(dirname "$0")/.."

make_chroot bookworm root
clone_into root
in_chroot root mount -t proc proc /proc
mkdir "$folder/root/train_gpt/mytext"
cp "$text" "$folder/root/train_gpt/mytext/"

# The lines of the block after "Your own text", without comments, up to the first that samples.
mapfile -t commands < <(sed -n '/^Your own text/,$p' README.md | sed '1,/^```/d; /^```/,$d; s/ *#.*//; / sample /q')
start=$SECONDS
for command in "${commands[@]}"; do
    echo "== $command"
    since=$SECONDS code=0
    in_chroot root bash -c "cd /train_gpt; $command" || code=$?
    echo "== ended with $code after $((SECONDS - since)) s"
    [ "$code" = 0 ] || exit "$code"
done
echo "== $((SECONDS - start)) s in all"
