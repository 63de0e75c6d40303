#!/usr/bin/env bash
# What only a GPU can show, in one command: builds for this machine's GPU, proves the kernels on it and measures them.
#
#   scripts/gpu_check.sh [--out FOLDER] [--deps FOLDER] [--limit SECONDS] [STAGE ...]
#
# Needs a GPU, a CUDA toolkit, a C++ compiler, python3 and the libraries of scripts/setup.sh, which --deps may point to
# (made elsewhere by make deps-folder); no network. All stages take less than --limit seconds (590) together. Each has
# a share of them, and a stage that fails or hangs does not keep the next ones from running.
#
#   build      build/train_gpt and the programs below, for this GPU only
#   ops        every op against the textbook: the op tests, linked to kernels/cuda; every collective by NCCL, one rank
#   probe      every wrapper of an instruction (ptx.cuh) gives the bits of the twin that stands for it in tests
#   memcheck   some op tests under compute-sanitizer: accesses outside of memory
#   racecheck  some op tests under compute-sanitizer: races in shared memory
#   reference  the model against PyTorch's outputs in test/reference, and the model's properties
#   trainer    two runs and a resumed one give the same bits; loss curves follow the CPU's in all precisions
#   bench      every op as a share of speed of light, and the whole step
#   peer       the whole step against PyTorch's in the same minutes, where python3 has torch with CUDA
#
# FOLDER (build/gpu_check) receives check.json, check.txt and one log per stage; the table is printed last.
# Exit codes: 0 every stage passed that could be run (peer does not count); 1 some did not; 64 wrong arguments; 69 no
# GPU, or no tool to build with.
set -uo pipefail
cd "$(dirname "$0")/.." || exit
unset MAKEFLAGS MFLAGS # of the make that calls this

stages=(build ops probe memcheck racecheck reference trainer bench peer)
# Of --limit, in thousandths; nothing is started in the last 15.
declare -A shares=([build]=500 [ops]=150 [probe]=50 [memcheck]=100 [racecheck]=100 [reference]=70 [trainer]=150
                   [bench]=250 [peer]=1000)
least_share=15
export out=build/gpu_check deps=''
limit=590
selected=()

usage() {
    echo "gpu-check: $1; usage: scripts/gpu_check.sh [--out FOLDER] [--deps FOLDER] [--limit SECONDS] [STAGE ...]" >&2
    echo "stages: ${stages[*]}" >&2
    exit 64
}
while [ $# != 0 ]; do
    case $1 in
        --out | --deps | --limit)
            [ -n "${2:-}" ] || usage "$1 wants a value"
            declare "${1#--}=$2"
            shift
            ;;
        *)
            [ -n "${shares[$1]:-}" ] || usage "'$1' is no stage"
            selected+=("$1")
            ;;
    esac
    shift
done
[[ $limit =~ ^[0-9]+$ ]] || usage "--limit wants a number of seconds"
[ ${#selected[@]} != 0 ] || selected=("${stages[@]}")
deadline=$((SECONDS + limit))

# ---- the stages: each in a shell of its own, its last line of output is what the table says about it. 77: not run ----

programs=(train_gpt train_gpt_cpu test_cuda bench_cuda ptx_probe_cuda ptx_probe_simt)
export programs_to_build="${programs[*]/#/build/}"

compute_capability() { nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -n 1; }

stage_build() {
    # Programs of an earlier build must not be taken for this one's.
    # shellcheck disable=SC2086
    rm -f $programs_to_build
    # shellcheck disable=SC2086
    make -k -j"$(nproc)" ARCH=native DEPS="$deps" $programs_to_build || return
    echo "for compute capability $(compute_capability) only"
}

stage_ops() { build/test_cuda '[ops],[comm]'; }

stage_probe() {
    build/ptx_probe_cuda > "$out/probe_cuda.txt" || return
    build/ptx_probe_simt "$(compute_capability)" > "$out/probe_simt.txt" || return
    diff "$out/probe_simt.txt" "$out/probe_cuda.txt" > "$out/probe.diff"
    case $? in
        0) echo "$(wc -l < "$out/probe_cuda.txt") words, each as the twins give it" ;;
        *)
            head -n 1000 "$out/probe.diff"
            echo "unlike its twin: $(sed -n 's/^[<>] \([^ ]*\) .*/\1/p' "$out/probe.diff" | sort -u | tr '\n' ' ')"
            return 1
            ;;
    esac
}

# One precision, and no product of the library, whose kernels are not ours and take the tools minutes.
sanitize() {
    if ! command -v compute-sanitizer > /dev/null; then
        echo "compute-sanitizer is not there"
        return 77
    fi
    compute-sanitizer --error-exitcode 9 "$@" build/test_cuda '[ops]' '~matmul_*' '~*float' '~*fp16' '~*fp16 *'
    local code=$?
    [ "$code" = 0 ] && echo "nothing found"
    return "$code"
}
stage_memcheck() { sanitize --tool memcheck --leak-check no; }
stage_racecheck() { sanitize --tool racecheck; }

stage_reference() { build/test_cuda '[model]'; }

stage_trainer() { TRAINER=build/train_gpt python3 test/program gpu_trainer; }

stage_bench() {
    nvidia-smi --query-gpu=timestamp,clocks.sm,clocks.mem,power.draw,temperature.gpu --format=csv -l 1 \
        > "$out/clocks.csv" 2> /dev/null &
    local clocks=$! code=0
    build/bench_cuda --json "$out/bench.json" || code=$?
    kill "$clocks" 2> /dev/null
    [ "$code" = 0 ] && echo "$(grep -c ' a step' "$out/bench.log") models"
    return "$code"
}

stage_peer() {
    if ! python3 -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2> /dev/null; then
        echo "python3 has no torch with CUDA"
        return 77
    fi
    python3 dev/peer_torch.py --device cuda --against build/bench_cuda --seconds $((stage_seconds - 15)) \
        --json "$out/peer.json"
}

# ---- carrying them out ----

names=() verdicts=() times=() details=() child=''

# Without what would break a line of the table or a string in JSON.
plain() { tr -d '"\134' | tr -c '[:print:]' ' ' | sed 's/ *$//'; }

record() {
    names+=("$1") verdicts+=("$2") times+=("$3") details+=("$4")
    echo "== $1: $2 after $3 s${4:+: $4}"
}

run_stage() {
    local name=$1 start=$SECONDS code=0 verdict log=$out/$1.log
    local left=$((deadline - SECONDS))
    export stage_seconds=$((limit * shares[$name] / 1000 + 1))
    ((stage_seconds <= left)) || stage_seconds=$left
    if ((left <= limit * least_share / 1000)); then
        record "$name" "no time" 0 "$((left > 0 ? left : 0)) s were left"
        return
    fi
    echo "== $name (at most $stage_seconds s)"
    timeout --kill-after=5 "$stage_seconds" bash -c "stage_$name" > "$log" 2>&1 < /dev/null &
    child=$!
    wait "$child" || code=$?
    child=''
    case $code in
        0) verdict=passed ;;
        77) verdict="not run" ;;
        124 | 137) verdict="timed out" ;;
        *) verdict=failed ;;
    esac
    record "$name" "$verdict" $((SECONDS - start)) "$(sed -n '/[^[:space:]]/h; $ {x; p}' "$log" | cut -c -160 | plain)"
    if [ "$verdict" = failed ] || [ "$verdict" = "timed out" ]; then
        echo "-- the end of $log:"
        tail -n 15 "$log"
        echo "--"
    fi
}

unavailable() {
    echo "gpu-check: $1" >&2
    exit 69
}

environment() {
    command -v nvidia-smi > /dev/null || unavailable "nvidia-smi is not there: this machine has no GPU driver"
    gpu=$(timeout 30 nvidia-smi --query-gpu=name,driver_version,memory.total,compute_cap,power.limit \
        --format=csv,noheader 2>&1 | head -n 1 | plain)
    [[ $gpu == *,*,*,* ]] || unavailable "nvidia-smi finds no GPU: $gpu"
    command -v nvcc > /dev/null || PATH=$PATH:/usr/local/cuda/bin
    for tool in nvcc make g++ python3; do
        command -v "$tool" > /dev/null || unavailable "$tool is not there, without which nothing can be built"
    done
    toolkit=$(nvcc --version | sed -n 's/.*release \([0-9.]*\), V\([0-9.]*\).*/\2/p')
    compiler=$(g++ --version | head -n 1 | plain)
    revision=$(git describe --always --dirty --abbrev=12 2> /dev/null || echo unknown)
    cpus=$(nproc)
}

write_json() {
    local i separator='' passed=$1
    echo "{\"date\": \"$date\", \"revision\": \"$revision\", \"gpu\": \"$gpu\", \"toolkit\": \"$toolkit\","
    echo " \"compiler\": \"$compiler\", \"cpus\": $cpus, \"seconds\": $SECONDS, \"passed\": $passed,"
    echo " \"stages\": ["
    for i in "${!names[@]}"; do
        printf '%s  {"name": "%s", "verdict": "%s", "seconds": %d, "detail": "%s"}' "$separator" \
            "${names[i]}" "${verdicts[i]}" "${times[i]}" "${details[i]}"
        separator=$',\n'
    done
    printf '\n ]'
    for file in bench peer; do
        [ ! -s "$out/$file.json" ] || printf ',\n "%s":\n%s' "$file" "$(cat "$out/$file.json")"
    done
    printf '}\n'
}

write_table() {
    local i file
    for file in bench peer; do
        [ ! -s "$out/$file.log" ] || { cat "$out/$file.log" && echo; }
    done
    echo "train_gpt $revision on $gpu; CUDA $toolkit, $compiler, $cpus CPUs; $date"
    for i in "${!names[@]}"; do
        printf '  %-10s %-10s %4d s  %s\n' "${names[i]}" "${verdicts[i]}" "${times[i]}" "${details[i]}"
    done
    if [ "$1" = true ]; then
        echo "gpu-check: passed in $SECONDS s"
    else
        echo "gpu-check: NOT passed, $SECONDS s"
    fi
}

interrupted() {
    [ -z "$child" ] || kill "$child"
    exit 130
}
trap interrupted INT TERM

environment
date=$(date -u +%Y-%m-%dT%H:%M:%SZ)
mkdir -p "$out" || exit
rm -f "$out"/*.log "$out"/*.json "$out"/probe* "$out/check.txt"
echo "gpu-check: $gpu; CUDA $toolkit; $compiler; $cpus CPUs"
# shellcheck disable=SC2046
export -f sanitize compute_capability $(compgen -A function stage_)
for name in "${stages[@]}"; do
    for one in "${selected[@]}"; do
        [ "$one" != "$name" ] || run_stage "$name"
    done
done

passed=true
for i in "${!names[@]}"; do
    case ${names[i]}:${verdicts[i]} in
        peer:* | *:passed | memcheck:"not run" | racecheck:"not run") ;;
        *) passed=false ;;
    esac
done
write_json "$passed" > "$out/check.json"
write_table "$passed" | tee "$out/check.txt"
[ "$passed" = true ]
