#!/usr/bin/env bash
# Installs the built programs with their data and documentation, or removes an installation.
#
#   scripts/packaging/install.sh install BUILD PREFIX [DESTDIR]         (make install calls it)
#   scripts/packaging/install.sh uninstall BUILD PREFIX [DESTDIR]
#
# DESTDIR is put before PREFIX when files are copied, to make a package. DOCDIR (below PREFIX) sets the folder of the
# documentation, which differs between distributions. Uninstalling removes only the files listed in
# PREFIX/share/train_gpt/installed_files.
# Exit codes: 0; 64 wrong arguments; 66 no build or no installation; those of install.
set -euo pipefail
if [ $# -lt 3 ] || [[ $1 != install && $1 != uninstall ]] || [[ $3 != /* ]]; then
    echo "usage: scripts/packaging/install.sh install|uninstall BUILD /PREFIX [DESTDIR]" >&2
    exit 64
fi
cd "$(dirname "$0")/../.."
build=$2 root=${4:-}${3%/}
shared=share/train_gpt
doc=${DOCDIR:-share/doc/train_gpt}
list=$shared/installed_files

if [ "$1" = uninstall ]; then
    if [ ! -e "$root/$list" ]; then
        echo "uninstall: $root/$list does not exist: no installation found" >&2
        exit 66
    fi
    mapfile -t files < "$root/$list"
    (cd "$root" && rm -f -- "${files[@]}" "$list")
    # Remove the program's own folders if they are empty.
    for folder in "$shared" "$doc"; do
        [ ! -d "$root/$folder" ] || find "$root/$folder" -depth -type d -empty -delete
    done
    exit
fi

programs=()
for program in train_gpt_cpu train_gpt; do
    [ ! -x "$build/$program" ] || programs+=("$program")
done
if [ ${#programs[@]} = 0 ]; then
    echo "install: $build has neither train_gpt_cpu nor train_gpt; run make first" >&2
    exit 66
fi

installed=()
# copy MODE FOLDER FILE...: copies files into a folder below PREFIX.
copy() {
    local mode=$1 folder=$2 file
    shift 2
    install -d -m 755 "$root/$folder"
    for file in "$@"; do
        install -m "$mode" "$file" "$root/$folder/"
        installed+=("$folder/${file##*/}")
    done
}
# link NAME TARGET: makes a symbolic link below PREFIX.
link() {
    install -d -m 755 "$root/${1%/*}"
    ln -sfn "$2" "$root/$1"
    installed+=("$1")
}

copy 755 bin "${programs[@]/#/$build/}"
copy 755 $shared/scripts scripts/train_hosts.sh scripts/train.slurm
copy 644 $shared/scripts scripts/train.kubernetes.yaml scripts/completion.bash
link bin/train_gpt-hosts ../$shared/scripts/train_hosts.sh
copy 755 $shared data/get.sh
link bin/train_gpt-get ../$shared/get.sh
copy 644 $shared/gpt2 data/gpt2/*
copy 644 $shared/configs configs/*.json
copy 644 "$doc" README.md CHANGELOG.md LICENSE
copy 644 "$doc/docs" docs/*
for program in train_gpt train_gpt_cpu; do
    link share/bash-completion/completions/$program ../../train_gpt/scripts/completion.bash
done
printf '%s\n' "${installed[@]}" > "$root/$list"
chmod 644 "$root/$list"
