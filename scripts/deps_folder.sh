#!/usr/bin/env bash
# Collects the headers and libraries that the build needs (except the compiler and CUDA) from this machine in a folder.
# A machine without them, and without a network, can then build with make DEPS=FOLDER or make gpu-check DEPS=FOLDER.
#
#   scripts/deps_folder.sh FOLDER
#
# The other machine must be x86-64 Linux with a C library and a compiler that are not older than this machine's. The
# folder contains linker scripts instead of symbolic links, so it can be copied in any way.
# Exit codes: 0; 64 wrong arguments; 69 a header or library is not installed on this machine.
set -euo pipefail

if [ $# != 1 ] || [ -z "$1" ]; then
    echo "usage: scripts/deps_folder.sh FOLDER (make deps-folder DEPS=FOLDER)" >&2
    exit 64
fi
folder=$1
cxx=${CXX:-g++}

# The header that identifies a library | what to copy from the same folder
headers=(
    'nlohmann/json.hpp|nlohmann'
    'CLI/CLI.hpp|CLI'
    'catch2/catch_all.hpp catch2/catch.hpp|catch2'
    'pcre2.h|pcre2.h'
    'xxhash.h|xxhash.h xxh3.h'
    'isa-l.h|isa-l.h isa-l'
    'zstd.h|zstd.h zstd_errors.h'
    'snappy-c.h|snappy-c.h'
    'sodium.h|sodium.h sodium'
    'utf8proc.h|utf8proc.h'
    'dnnl.hpp|dnnl.hpp dnnl.h oneapi'
)
libraries=(pcre2-8 xxhash isal zstd snappy sodium utf8proc dnnl)

missing() {
    echo "deps_folder: $1 is not installed here (scripts/setup.sh test installs it)" >&2
    exit 69
}

# Prints the folder in which the compiler finds a header, or nothing.
folder_of() {
    local used
    used=$("$cxx" -E -M -DPCRE2_CODE_UNIT_WIDTH=8 -x c++ - 2> /dev/null <<< "#include <$1>") || return 0
    used=$(tr -s ' \\\n' '\n' <<< "$used" | sed -n "s|/$1\$||p")
    echo "${used%%$'\n'*}"
}

copy_headers() {
    local signs=$1 sign from name
    for sign in $signs; do
        from=$(folder_of "$sign")
        [ -n "$from" ] || continue
        for name in $2; do
            [ ! -e "$from/$name" ] || cp -RL "$from/$name" "$folder/include/"
        done
        return 0
    done
    missing "$signs"
}

# Copies the file that lib$1.so points to under its soname, and its dependencies except the ones that every system has.
copy_library() {
    local found soname needed path
    found=$("$cxx" -print-file-name="lib$1.so")
    [ "$found" != "lib$1.so" ] || missing "lib$1.so"
    soname=$(objdump -p "$found" | sed -n 's/^ *SONAME *//p')
    cp -L "$found" "$folder/lib/$soname"
    strip --strip-unneeded "$folder/lib/$soname"
    [ "$soname" = "lib$1.so" ] || echo "INPUT($soname)" > "$folder/lib/lib$1.so"
    while read -r needed path; do
        case $needed in
            lib[cm].so* | libstdc++* | libgcc_s* | libgomp* | libpthread* | libdl* | librt*) ;;
            *) cp -L "$path" "$folder/lib/$needed" ;;
        esac
    done < <(ldd "$found" | sed -n 's/^\s*\(\S*\) => \(\/\S*\).*/\1 \2/p')
}

mkdir -p "$folder/include" "$folder/lib"
for row in "${headers[@]}"; do
    copy_headers "${row%%|*}" "${row#*|}"
done
for library in "${libraries[@]}"; do
    copy_library "$library"
done
if [ -e "$folder/include/catch2/catch_all.hpp" ]; then  # Catch2 3 is a library
    for library in Catch2Main Catch2; do
        found=$("$cxx" -print-file-name="lib$library.a")
        [ "$found" != "lib$library.a" ] || missing "lib$library.a"
        cp -L "$found" "$folder/lib/"
    done
fi
newest=$(objdump -T "$folder"/lib/*.so.* | grep -o 'GLIBC_[0-9.]*' | sort -Vu | tail -n 1)
echo "$folder: $(du -shL "$folder" | cut -f1), needs glibc ${newest#GLIBC_} or later"
