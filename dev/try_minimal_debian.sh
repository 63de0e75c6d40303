#!/usr/bin/env bash
# Tries the README's two commands where nothing is installed: each in a fresh Debian 12 as debootstrap leaves it.
#
#   sudo dev/try_minimal_debian.sh [quickstart.sh] [test.sh]     (default: both)
#
# Needs root, debootstrap and 3 GB in TMPDIR. A clone of the last commit is tried, not the working tree. Packages come
# from where this machine's apt gets its own.
set -euo pipefail
cd "$(dirname "$0")/.."

# shellcheck disable=SC2016
mirror=$(apt-get indextargets --format '$(CODENAME) $(REPO_URI)' 'Created-By: Packages' |
    sed -n '0,/^bookworm /s/^bookworm //p')
if [ -z "$mirror" ]; then
    echo "this machine's apt has no source of Debian 12 (bookworm)" >&2
    exit 69
fi
folder=$(mktemp -d)
# A system that was started has these, debootstrap's folder has not: ranks look for processes in /proc, Open MPI for
# devices in /sys (and waits 15 s where it finds none), and everybody for the machine's own name in /etc/hosts.
unmount() { umount "$folder/root/proc" "$folder/root/sys" 2> /dev/null || true; }
trap 'unmount; rm -rf --one-file-system "$folder"' EXIT

echo "== debootstrap --variant=minbase bookworm (log: $folder/debootstrap.log)"
debootstrap --variant=minbase bookworm "$folder/base" "$mirror" > "$folder/debootstrap.log"
cp /etc/resolv.conf "$folder/base/etc/"
printf '127.0.0.1 localhost\n127.0.1.1 %s\n' "$(hostname)" > "$folder/base/etc/hosts"
runuser -u "$(stat -c %U .git)" -- git bundle create --quiet - HEAD > "$folder/last_commit"
git -c advice.detachedHead=false clone --quiet "$folder/last_commit" "$folder/base/train_gpt"

worst=0
[ $# != 0 ] || set -- quickstart.sh test.sh
for script in "$@"; do
    cp -a "$folder/base" "$folder/root"
    mount -t proc proc "$folder/root/proc"
    mount --bind /sys "$folder/root/sys"
    echo "== $script"
    start=$SECONDS code=0
    chroot "$folder/root" /usr/bin/env -i PATH="$PATH" HOME=/root "/train_gpt/scripts/$script" || code=$?
    echo "== $script ended with $code after $((SECONDS - start)) s"
    [ "$code" = 0 ] || worst=$code
    unmount
    rm -rf --one-file-system "$folder/root"
done
exit "$worst"
