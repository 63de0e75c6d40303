# Fresh Debian chroots. Sourced by .ci/run and dev/try_*.sh; needs root, debootstrap and unshare. The script that
# sources it is started again in a private mount namespace: its mounts end with it, and no clean-up can reach this
# machine's file systems. The chroots are in $folder, which is removed when the script ends; scripts that it starts
# share them. Packages come from this machine's apt sources.
# shellcheck shell=bash

for tool in debootstrap unshare; do
    if ! command -v "$tool" > /dev/null; then
        echo "$0: $tool is missing, which makes a fresh Debian: apt-get install debootstrap util-linux" >&2
        exit 69
    fi
done
if [ "$(id -u)" != 0 ]; then
    echo "$0: only root can make a fresh Debian and mount in it" >&2
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

# make_base RELEASE: Debian as debootstrap leaves it, in $folder/base.RELEASE, once.
make_base() {
    local root=$folder/base.$1 mirror
    [ ! -e "$root.done" ] || return 0
    # shellcheck disable=SC2016
    mirror=$(apt-get indextargets --format '$(CODENAME) $(REPO_URI)' 'Created-By: Packages' |
        sed -n '0,/^bookworm /s/^bookworm //p') # the archive has every release
    if [ -z "$mirror" ]; then
        echo "$0: this machine's apt has no source of Debian 12 (bookworm)" >&2
        exit 69
    fi
    set -- debootstrap --variant=minbase "$1" "$root" "$mirror"
    echo "== $*"
    "$@" > "$root.log" 2>&1 || { tail "$root.log" >&2 && exit 69; }
    cp /etc/resolv.conf "$root/etc/"
    touch "$root.done"
}

# make_chroot RELEASE NAME [PACKAGE ...]: a minimal Debian of that release in $folder/NAME, with these packages. As in a
# booted system, /dev/shm is a tmpfs, and /dev/fuse and loop devices exist if this machine has them. scripts/setup.sh
# mounts /proc, /sys and /dev/pts.
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

# clone_into NAME: the last commit, not the working tree, as $folder/NAME/train_gpt.
clone_into() {
    runuser -u "$(stat -c %U .git)" -- git bundle create --quiet - HEAD > "$folder/last_commit"
    git -c advice.detachedHead=false clone --quiet "$folder/last_commit" "$folder/$1/train_gpt"
}

# in_chroot NAME COMMAND...: without anything of this machine's environment.
in_chroot() {
    local root=$folder/$1
    chroot "$root" /usr/bin/env -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root "${@:2}"
}
