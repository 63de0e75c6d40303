#!/usr/bin/env bash
# Builds the host code with the compilers of the next Debian release, with warnings as errors, and runs the tests of the
# CPU and of the simulated GPU: once with g++ and once with clang, each in a clone of the last commit.
#
#   sudo dev/try_compilers.sh PROGRAM...     (make portability: every program without nvcc and without sanitizers)
#
# Needs root, debootstrap and 6 GB in TMPDIR. Prints a table of compilers, libraries and results at the end. Exit code 0
# only if all passed.
set -euo pipefail
. "$(dirname "$0")/chroot.sh"
cd "$(dirname "$0")/.."
release=trixie
tests=(build/test_cpu build/test_simt 'python3 test/program test_commands test_resume test_simulated test_nccl_library')

make_chroot "$release" root clang libomp-dev git
clone_into root
in_chroot root /train_gpt/scripts/setup.sh xz kjv test

worst=0
table=''
for compiler in g++ clang++; do
    cp -a "$folder/root/train_gpt" "$folder/root/$compiler"
    version=$(in_chroot root "$compiler" --version | head -n 1)
    echo "== $compiler: $version"
    for command in "make -k -j$(nproc) WERROR=1 CXX=$compiler ${*/#/build/}" "${tests[@]}"; do
        code=0
        in_chroot root sh -c "cd /$compiler && $command" 2>&1 | tee "$folder/output" || code=$?
        [ "$code" = 0 ] || worst=1
        what=${command%% -k*}
        table+="$compiler: $what: exit code $code: $(sed -n '/[^[:space:]]/h; $ {x; p}' "$folder/output" | cut -c -100)"
        table+=$'\n'
    done
    table+="$compiler: $version"$'\n'
done
in_chroot root dpkg-query -W libdnnl-dev libcli11-dev nlohmann-json3-dev catch2 libopenmpi-dev libomp-dev
printf '%s' "$table"
exit "$worst"
