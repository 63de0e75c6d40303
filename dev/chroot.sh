# Fresh Debian chroots. Sourced by .ci/run and dev/try_*.sh; needs root, debootstrap and unshare. Restarts the script
# that sources it in a private mount namespace, so that its mounts end with it and the clean-up cannot reach this
# machine's file systems. The chroots are in $folder, which is removed when the script ends; child scripts share them.
# Packages come from this machine's apt sources.
# shellcheck shell=bash

for tool in debootstrap unshare; do
    if ! command -v "$tool" > /dev/null; then
        echo "$0: $tool is not installed: apt-get install debootstrap util-linux" >&2
        exit 69
    fi
done
if [ "$(id -u)" != 0 ]; then
    echo "$0: must run as root, to create a Debian chroot and mount in it" >&2
    exit 77
fi
if [ -z "${CHROOTS:-}" ]; then
    CHROOTS=$(mktemp -d)
    export CHROOTS CHROOTS_OWNER=$$
    exec unshare --mount --propagation private bash "$0" "$@"
fi
folder=$CHROOTS

# remove_chroot NAME
remove_chroot() {
    local root=$folder/$1
    ! mountpoint -q "$root" || umount --recursive --lazy "$root"
    rm -rf --one-file-system "$root"
}
# shellcheck disable=SC2317  # called by the trap
remove_chroots() {
    local root
    for root in "$folder"/*/; do remove_chroot "$(basename "$root")"; done
    rm -rf --one-file-system "$folder"
}
[ "$CHROOTS_OWNER" != $$ ] || trap remove_chroots EXIT

# make_base RELEASE: installs a minimal Debian with debootstrap in $folder/base.RELEASE, once.
make_base() {
    local root=$folder/base.$1 mirror
    [ ! -e "$root.done" ] || return 0
    # shellcheck disable=SC2016
    mirror=$(apt-get indextargets --format '$(CODENAME) $(REPO_URI)' 'Created-By: Packages' |
        sed -n '0,/^bookworm /s/^bookworm //p') # the archive has every release
    if [ -z "$mirror" ]; then
        echo "$0: this machine's apt has no source for Debian 12 (bookworm)" >&2
        exit 69
    fi
    set -- debootstrap --variant=minbase "$1" "$root" "$mirror"
    echo "== $*"
    "$@" > "$root.log" 2>&1 || { tail "$root.log" >&2 && exit 69; }
    cp /etc/resolv.conf "$root/etc/"
    touch "$root.done"
}

# make_chroot RELEASE NAME [PACKAGE ...]: creates a minimal Debian of this release in $folder/NAME, with these packages.
# As in a booted system, /dev/shm is a tmpfs, and /dev/fuse and loop devices exist if this machine has them.
# scripts/setup.sh mounts /proc, /sys and /dev/pts.
make_chroot() {
    local release=$1 root=$folder/$2 device
    make_base "$release"
    cp -a "$folder/base.$release" "$root"
    mount --bind "$root" "$root" # a mount point, so that programs in it can create mount namespaces
    mount -t tmpfs -o mode=1777 tmpfs "$root/dev/shm"
    for device in fuse loop-control loop{0..7}; do
        [ ! -e "/dev/$device" ] || cp -a "/dev/$device" "$root/dev/"
    done
    [ $# = 2 ] || in_chroot "$2" sh -c 'apt-get update && apt-get install -y --no-install-recommends "$@"' sh "${@:3}" \
        > "$root.log" 2>&1 || { tail "$root.log" >&2 && exit 69; }
}

# clone_into NAME: clones the last commit, not the working tree, to $folder/NAME/train_gpt.
clone_into() {
    runuser -u "$(stat -c %U .git)" -- git bundle create --quiet - HEAD > "$folder/last_commit"
    git -c advice.detachedHead=false clone --quiet "$folder/last_commit" "$folder/$1/train_gpt"
}

# in_chroot NAME COMMAND...: runs a command with a clean environment.
in_chroot() {
    local root=$folder/$1
    chroot "$root" /usr/bin/env -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root "${@:2}"
}
