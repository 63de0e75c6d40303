#!/usr/bin/env bash
# Installs the missing Debian packages for building and for the named purposes: the King James text (kjv), the
# quickstart's comparison with xz (xz), several ranks (mpi), downloads with data/get.sh (data), the tests (test, which
# includes mpi), make fuzz (fuzz).
#
#   scripts/setup.sh [kjv] [xz] [mpi] [data] [test] [fuzz]
#
# A package counts as installed if the shell finds its command or the compiler its header, so libraries built from
# source are not replaced. If all are installed, the script changes nothing. In a bare chroot, test mounts /proc, /sys
# and /dev/pts. apt-get runs as root or through sudo without a password. Exit codes: 0 everything is installed; 69
# apt-get is missing or failed; 77 no permission to install (the command to run is printed).
set -euo pipefail
cd "$(dirname "$0")/.."
log=build/setup.log

# package | command or header that shows that it is installed | name of the software
wanted=(
    'make|make|GNU make'
    'g++|g++|GNU C++ compiler, 11 or later, with OpenMP'
    'libdnnl-dev|dnnl.hpp|oneDNN (oneAPI Deep Neural Network Library), 2 or later'
    'libpcre2-dev|pcre2.h|PCRE2'
    'libxxhash-dev|xxhash.h|xxHash'
    'libisal-dev|isa-l.h|ISA-L (Intelligent Storage Acceleration Library)'
    'libzstd-dev|zstd.h|Zstandard'
    'libsnappy-dev|snappy-c.h|Snappy'
    'libsodium-dev|sodium.h|libsodium'
    'libutf8proc-dev|utf8proc.h|utf8proc'
    'nlohmann-json3-dev|nlohmann/json.hpp|JSON for Modern C++ (nlohmann/json), 3'
    'libcli11-dev|CLI/CLI.hpp|CLI11, 2'
)
mpi=('libopenmpi-dev|mpicc|Open MPI 4 or later' 'openmpi-bin|mpirun|mpirun, of the same MPI')
download=('curl|curl|curl' 'jq|jq|jq')
fuzzer='/usr/lib/llvm-*/lib/clang/*/lib/linux/libclang_rt.fuzzer-*.a'
for purpose in "$@"; do
    case $purpose in
        kjv) wanted+=('bible-kjv|bible|bible-kjv (or bring your own text: scripts/quickstart.sh --text FILE)') ;;
        xz) wanted+=('xz-utils|xz|XZ Utils') ;;
        mpi) wanted+=("${mpi[@]}") ;;
        data) wanted+=("${download[@]}"
                       'ca-certificates|/etc/ssl/certs/ca-certificates.crt|CA certificates, for HTTPS') ;;
        test) wanted+=('catch2|catch2/catch.hpp catch2/catch_all.hpp|Catch2, 2 or 3' 'python3|python3|Python 3'
                       'libfuse3-dev|fuse3/fuse.h|libfuse, 3' 'fuse3|fusermount3|fusermount3, of libfuse'
                       'iproute2|ip|iproute2, for network namespaces' 'parallel|parallel|GNU parallel'
                       "${mpi[@]}" "${download[@]}") ;;
        fuzz) wanted+=('clang|clang++|clang' 'llvm|llvm-symbolizer|llvm-symbolizer'
                       "libclang-rt-dev|$fuzzer|clang's libraries for fuzzing and sanitizers") ;;
        *) echo "setup: unknown purpose '$purpose'; usage: scripts/setup.sh [kjv] [xz] [mpi] [data] [test] [fuzz]" >&2
           exit 64 ;;
    esac
done

# A bare chroot lacks parts of a running system that the tests need: processes in /proc, devices in /sys (Open MPI waits
# 15 s without them), terminals, and the machine's own host name.
complete_chroot() {
    local line='mount -t proc proc /proc && mount -t sysfs sysfs /sys && mount -t devpts devpts /dev/pts'
    [ ! -e /proc/self/exe ] || return 0
    if [ "$(id -u)" != 0 ] || ! eval "$line"; then
        echo "setup: this chroot has no /proc, /sys and /dev/pts; run this as root, then start again:" >&2
        echo "  $line" >&2
        exit 77
    fi
    [ -e /etc/hosts ] || printf '127.0.0.1 localhost\n127.0.1.1 %s\n' "$(uname -n)" > /etc/hosts
    echo "setup: mounted /proc, /sys and /dev/pts, which were missing in this chroot"
}

[[ " $* " != *' test '* ]] || complete_chroot

has_header() {
    g++ -E -x c++ -o /dev/null - 2> /dev/null <<< "#if !__has_include(<$1>)
        #error missing
        #endif"
}

has_any() {
    local sign
    for sign in "$@"; do
        case $sign in
            *.h | *.hpp) has_header "$sign" && return ;;
            /*) [ -e "$sign" ] && return ;;
            *) command -v "$sign" > /dev/null && return ;;
        esac
    done
    return 1
}

# Sets `packages` and `names` to the missing packages. Without a compiler all headers count as missing.
find_missing() {
    local row package signs name
    packages=() names=()
    for row in "${wanted[@]}"; do
        IFS='|' read -r package signs name <<< "$row"
        # shellcheck disable=SC2086
        has_any $signs || { packages+=("$package"); names+=("$name"); }
    done
}

find_missing
[ ${#packages[@]} != 0 ] || exit 0

if ! command -v apt-get > /dev/null; then
    echo "setup: this machine has no apt-get; please install these, then start again:" >&2
    printf '  %s\n' "${names[@]}" >&2
    exit 69
fi

as_root=()
if [ "$(id -u)" != 0 ]; then
    as_root=(sudo -n)
    if ! sudo -n true 2> /dev/null; then
        line="apt-get update && apt-get install -y --no-install-recommends ${packages[*]}"
        echo "setup: missing: ${packages[*]}" >&2
        echo "setup: installing packages needs root; run this, then start again:" >&2
        if command -v sudo > /dev/null; then echo "  sudo sh -c '$line'" >&2; else echo "  su - -c '$line'" >&2; fi
        exit 77
    fi
fi

# Waits for another package manager to finish (a fresh machine often runs one) and retries each download three times.
apt() {
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
        apt-get -y -o DPkg::Lock::Timeout=120 -o Acquire::Retries=3 "$@" < /dev/null >> "$log" 2>&1
}

mkdir -p build
: > "$log"
start=$SECONDS
echo "setup: installing ${packages[*]}"
# Update the package lists only if installing with the present ones fails.
if ! apt install --no-install-recommends "${packages[@]}" &&
    ! { apt update && apt install --no-install-recommends "${packages[@]}"; }; then
    echo "setup: apt-get failed; the end of $log:" >&2
    tail -n 5 "$log" >&2
    exit 69
fi
requested=${packages[*]}
find_missing
if [ ${#packages[@]} != 0 ]; then
    echo "setup: installed $requested, but $(command -v g++ || echo the shell) does not find ${packages[*]}" >&2
    exit 69
fi
echo "setup: installed in $((SECONDS - start)) s"
