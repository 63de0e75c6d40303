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
# What setup.sh mounts there.
unmount() {
    local part
    for part in proc sys dev/pts; do umount "$folder/root/$part" 2> /dev/null || true; done
}
trap 'unmount; rm -rf --one-file-system "$folder"' EXIT

echo "== debootstrap --variant=minbase bookworm (log: $folder/debootstrap.log)"
debootstrap --variant=minbase bookworm "$folder/base" "$mirror" > "$folder/debootstrap.log"
cp /etc/resolv.conf "$folder/base/etc/"
runuser -u "$(stat -c %U .git)" -- git bundle create --quiet - HEAD > "$folder/last_commit"
git -c advice.detachedHead=false clone --quiet "$folder/last_commit" "$folder/base/train_gpt"

worst=0
[ $# != 0 ] || set -- quickstart.sh test.sh
for script in "$@"; do
    cp -a "$folder/base" "$folder/root"
    echo "== $script"
    start=$SECONDS code=0
    chroot "$folder/root" /usr/bin/env -i PATH="$PATH" HOME=/root "/train_gpt/scripts/$script" || code=$?
    echo "== $script ended with $code after $((SECONDS - start)) s"
    [ "$code" = 0 ] || worst=$code
    unmount
    rm -rf --one-file-system "$folder/root"
done
exit "$worst"
