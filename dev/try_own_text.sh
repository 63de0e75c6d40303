#!/usr/bin/env bash
# Tries the README's recipe for own text where nothing is installed: in a fresh Debian 12 as debootstrap leaves it, the
# lines of that recipe as they stand in the README, up to the sample, on one text file.
#
#   sudo dev/try_own_text.sh FILE.txt
#
# Needs root, debootstrap and 2 GB in TMPDIR. A clone of the last commit is tried, not the working tree. Packages come
# from where this machine's apt gets its own. Prints how long each command took; the exit code is that of the first
# that failed.
set -euo pipefail
text=$(realpath -e -- "$1")
. "$(dirname "$0")/chroot.sh"
cd "$(dirname "$0")/.."

make_chroot bookworm root
clone_into root
in_chroot root mount -t proc proc /proc
mkdir "$folder/root/train_gpt/mytext"
cp "$text" "$folder/root/train_gpt/mytext/"

# The lines of the block behind "Your own text", without comments, up to the first that samples.
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
