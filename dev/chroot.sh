# Fresh Debians to try things in. Sourced by dev/try_*.sh; needs root and debootstrap. What is made lies in $folder,
# which goes when the script ends. Packages come from where this machine's apt gets its own.
# shellcheck shell=bash

folder=$(mktemp -d)

# What setup.sh and in_chroot mount in $1.
unmount_chroot() {
    local part
    for part in proc sys dev/pts; do umount "$1/$part" 2> /dev/null || true; done
}
remove_chroots() {
    local root
    for root in "$folder"/*/; do unmount_chroot "${root%/}"; done
    rm -rf --one-file-system "$folder"
}
trap remove_chroots EXIT

# make_chroot RELEASE NAME [PACKAGE ...]: a minimal Debian of that release in $folder/NAME, with these packages.
make_chroot() {
    local release=$1 root=$folder/$2 mirror packages=''
    # shellcheck disable=SC2016
    mirror=$(apt-get indextargets --format '$(CODENAME) $(REPO_URI)' 'Created-By: Packages' |
        sed -n '0,/^bookworm /s/^bookworm //p') # the archive has every release
    if [ -z "$mirror" ]; then
        echo "this machine's apt has no source of Debian 12 (bookworm)" >&2
        exit 69
    fi
    [ $# = 2 ] || printf -v packages ',%s' "${@:3}"
    set -- debootstrap --variant=minbase ${packages:+"--include=${packages#,}"} "$release" "$root" "$mirror"
    echo "== $*"
    "$@" > "$root.log" || { tail "$root.log" && exit 69; }
    cp /etc/resolv.conf "$root/etc/"
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
