#!/usr/bin/env bash
# Tries the README's two commands where nothing is installed: each in a fresh Debian 12 as debootstrap leaves it.
#
#   sudo dev/try_minimal_debian.sh [quickstart.sh] [test.sh]     (default: both)
#
# Needs root, debootstrap and 3 GB in TMPDIR. A clone of the last commit is tried, not the working tree. Packages come
# from where this machine's apt gets its own.
set -euo pipefail
cd "$(dirname "$0")/.."
. dev/chroot.sh

make_chroot bookworm base
clone_into base
worst=0
[ $# != 0 ] || set -- quickstart.sh test.sh
for script in "$@"; do
    cp -a "$folder/base" "$folder/root"
    echo "== $script"
    start=$SECONDS code=0
    in_chroot root "/train_gpt/scripts/$script" || code=$?
    echo "== $script ended with $code after $((SECONDS - start)) s"
    [ "$code" = 0 ] || worst=$code
    unmount_chroot "$folder/root"
    rm -rf --one-file-system "$folder/root"
done
exit "$worst"
