#!/usr/bin/env bash
# Tests the kit of make gpu-kit in a fresh Debian 12 with only python3, without compiler, make and development packages:
# first without the CUDA libraries, then with this machine's, placed as pip places them. Without a GPU, it checks that
# the programs start, that the CPU programs work, and the output of gpu_check.py.
#
#   sudo dev/try_gpu_kit.sh [build/gpu_kit.tgz] [BUILT]
#
# BUILT is a folder with the simulator's programs, e.g. build. They then replace the GPU programs, and all parts of
# gpu_check.py run. Needs root, debootstrap, the CUDA toolkit, and 5 GB in TMPDIR. Exit code 0 only if every check has
# passed.
set -euo pipefail
. "$(dirname "$0")/chroot.sh"
cd "$(dirname "$0")/.."
kit=$(realpath "${1:-build/gpu_kit.tgz}")
built=${2:-}
worst=0

# expect CODE TEXT COMMAND: regular expressions of the command's exit code and of a line that it prints.
expect() {
    local code=0
    echo "== $3"
    in_chroot kit sh -c "cd /gpu_kit && $3" > "$folder/output" 2>&1 || code=$?
    tail -n 12 "$folder/output" | cut -c -300
    if ! [[ $code =~ ^($1)$ ]] || ! grep -qE -- "$2" "$folder/output"; then
        echo "-- WRONG: exit code $code instead of $1, or no line with: $2"
        worst=1
    fi
}

make_chroot bookworm kit python3
tar xzf "$kit" -C "$folder/kit"
in_chroot kit mount -t proc proc /proc
for tool in g++ gcc make nvcc git; do
    [ -z "$(in_chroot kit sh -c "command -v $tool" || true)" ] || { echo "$tool is in the chroot" && exit 1; }
done

expect 69 'libcublasLt.so.13 \(cuBLASLt\) was not found in .*pip install' scripts/cuda_libraries.py
expect 69 'problem: libcublasLt.so.13 \(cuBLASLt\) was not found in .*pip install' 'scripts/gpu_check.py measure'
expect 0 'CPU' 'build/train_gpt_cpu --version'

small="configs/quickstart.json --set run.dir=/small --set data.train=/data/train_000000.bin --set data.val=
    --set data.tokenizer= --set model.vocab_size=257 --set train.max_steps=20 --set schedule.warmup_steps=5
    --set eval.every_steps=0 --set sample.every_steps=0 --set log.every_steps=5"
small=${small//$'\n'/}
seq 9999 > "$folder/kit/text.txt"
expect 0 'train: .* tokens' 'build/train_gpt_cpu prepare --tokenizer bytes /text.txt --out /data'
expect 0 'step 20/20' "build/train_gpt_cpu $small"

packages=$folder/kit/usr/local/lib/python3.11/dist-packages/nvidia
mkdir -p "$packages/cu13/lib" "$packages/nccl/lib"
scripts/cuda_libraries.py | sed -n 's/^\(lib[^:]*\): //p' | while read -r library; do
    case $library in
        *nccl*) cp "$(realpath "$library")" "$packages/nccl/lib/libnccl.so.2" ;;
        *) cp "$(realpath "$library")" "$packages/cu13/lib/$(basename "$library")" ;;
    esac
done
expect 0 '^libnccl.so.2: /' scripts/cuda_libraries.py
path=$(in_chroot kit /gpu_kit/scripts/cuda_libraries.py | sed -n 's/^LD_LIBRARY_PATH=//p')
run="LD_LIBRARY_PATH=$path"
expect 0 'between ranks: NCCL 2\.' "$run build/train_gpt --version"
expect 0 'total' "$run build/train_gpt plan configs/gpt2_124M.json --gpus 8 --gpu h200"
expect 71 'no NVIDIA driver' "$run build/train_gpt $small --fresh"
two="--nproc 2 $small --set train.batch_size=4 --fresh"
expect 71 'rank 0 on .* has no GPU: no NVIDIA driver' "$run build/train_gpt $two"
for program in "$folder"/kit/gpu_kit/build/*_cuda; do
    expect '[1-9][0-9]*' 'driver' "$run build/${program##*/}"
done
expect 0 . build/ptx_probe_simt
expect 69 'no GPU \(.*\); no other problems' 'scripts/gpu_check.py measure'

# The dry-run test, with the kit's scripts and the simulator's programs with their libraries.
if [ -n "$built" ]; then
    programs=("$built"/{test_simt,test_cpu,train_gpt_simt,bench_simt,bench_matmul_simt})
    cp "${programs[@]}" "$folder/kit/gpu_kit/build/"
    cp test/program/*gpu*.py "$folder/kit/gpu_kit/test/program/"
    ldd "${programs[@]}" | sed -n 's/.* => \(\/[^ ]*\) .*/\1/p' | grep -v '/lib[cm]\.so' | sort -u |
        xargs cp -t "$folder/kit/usr/local/lib"
    in_chroot kit ldconfig
    expect 0 '^OK' 'python3 test/program test_gpu_check.DryRun.test_everything_passes'
fi
echo "the kit, without a GPU: $([ "$worst" = 0 ] && echo every check has passed || echo a check has FAILED)"
exit "$worst"
