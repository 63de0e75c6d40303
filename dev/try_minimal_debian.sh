#!/usr/bin/env bash
# Tests the README's two commands, each in a fresh minimal Debian 12 made by debootstrap.
#
#   sudo dev/try_minimal_debian.sh [--times N] [quickstart.sh] [test.sh]     (default: both, once)
#
# Needs root, debootstrap and 3 GB in TMPDIR. Tests a clone of the last commit, not the working tree. Packages come from
# this machine's apt sources. Exits with 0, or with the code of the last command that failed.
set -euo pipefail
. "$(dirname "$0")/chroot.sh"
cd "$(dirname "$0")/.."

times=1
if [ "${1:-}" = --times ]; then
    times=$2
    shift 2
fi
worst=0
[ $# != 0 ] || set -- quickstart.sh test.sh
for ((i = 1; i <= times; i++)); do
    for script in "$@"; do
        make_chroot bookworm root
        clone_into root
        echo "== $script, $i of $times"
        start=$SECONDS code=0
        in_chroot root "/train_gpt/scripts/$script" || code=$?
        echo "== $script ended with $code after $((SECONDS - start)) s"
        [ "$code" = 0 ] || worst=$code
        remove_chroot root
    done
done
exit "$worst"
