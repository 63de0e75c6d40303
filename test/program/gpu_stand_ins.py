"""Stand-ins for NVIDIA's and the project's programs and libraries, for test_gpu_check."""
NVIDIA_SMI = """#!/usr/bin/env bash
case $* in
    *name,driver*) echo "NVIDIA H200, 580.95, 143771 MiB, 9.0, 700.00 W" ;;
    *) echo "1980, 3201, 690.25, 66, 0x4" ;;
esac
"""
# Shared libraries with the names of CUDA's.
LIBRARIES = {"libcudart.so.13": "int cudaRuntimeGetVersion(int* version) { *version = 13010; return 0; }",
             "libcublasLt.so.13": "unsigned long cublasLtGetVersion() { return 130100; }",
             "libnccl.so.2": "void ncclGetVersion() {}"}
SANITIZER = """#!/usr/bin/env bash
while [[ $1 == --* ]]; do [ "$1" != --tool ] || tool=$2; shift 2; done
"$@"; code=$?
case $tool in
    memcheck) echo "========= ERROR SUMMARY: 0 errors" ;;
    racecheck) echo "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)" ;;
esac
exit $code
"""
# Raw CSV as Nsight Compute writes it, and the output of the program that it runs.
NCU = """#!/usr/bin/env bash
while [[ $1 == --* ]]; do
    [ "$1" != --log-file ] || log=$2
    [ "$1" = --csv ] && shift || shift 2
done
{
    echo '==PROF== Connected to process 1'
    echo '"ID","Kernel Name","dram__throughput.avg.pct_of_peak_sustained_elapsed","gpu__time_duration.sum",'\
'"l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum","sm__inst_issued.avg.pct_of_peak_sustained_active",'\
'"sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active","sm__pipe_tensor_op_imma_cycles_active.avg.'\
'pct_of_peak_sustained_active"'
    echo '"","","%","ns","","%","%","%"'
    for name in attention_forward attention_backward_query attention_backward_key norm_backward cross_entropy \
        activation_forward; do
        echo '"0","void ops::<unnamed>::'$name'_kernel<bf16, 64>(ops::Op)","25.5","1,234","77","40.5","61.5","0"'
    done
} > "$log"
exec "$@"
"""
PEER = """import json, subprocess, sys
words = dict(zip(sys.argv[1:-1], sys.argv[2:]))
ours = subprocess.run([words["--against"], "bf16", "--workload", words["--workload"], "--steps-only", "--json",
                       words["--json"] + ".ours"]).returncode
assert words["--device"] == "cuda" and float(words["--seconds"]) > 0 and ours == 0
row = {"workload": words["--workload"], "precision": "bf16", "batch": 2, "seq_len": 32, "ours_ms": [1.0], "ratio": 2.0,
       "torch": {"step_ms": 2.0, "compiled": True, "attention": "FLASH", "steps": 9, "eager_ms": 3.0}}
open(words["--json"], "w").write(json.dumps({"torch": "2.9", "device": "H200", "rows": [row]}))
"""
# Figures as dev/bench*.cpp write them, for tests of the script alone.
BENCH = """#!/usr/bin/env bash
words=$*; json=${words##*--json }; json=${json%% *}
case $* in
    *--roofs\\ *) echo '{"device": "x", "roofs": {"copy_gb_per_s": 4000.5, "bf16_tflops": 800.25}}' > "$json" ;;
    *--ops-only*) echo '{"device": "x", "results": [{"workload": "tiny", "ops": [{"name": "gelu", "calls": 2, "ms": 1,
        "total_ms": 2, "share": 0.5, "flops": 0, "bytes": 9, "roof_share": 0.75, "ms_above_roof": 0.5}]}]}' > "$json" ;;
    *--steps-only*) echo '{"device": "x", "results": [{"workload": "tiny", "batch": 2, "seq_len": 32, "step_ms": 1.5,
        "tokens_per_s": 42666, "mfu": null}]}' > "$json" ;;
    *--help*) ;;
    *) exit 64 ;;
esac
"""
MATMUL = """#!/usr/bin/env bash
words=$*; json=${words##*--json }; json=${json%% *}
echo '{"device": "x", "library": "y", "products": [{"workload": "tiny", "name": "qkv", "m": 64, "n": 64, "k": 64,
    "calls": 2, "chosen": {"algorithm": "a", "ms": 2, "tflops": 500, "repeats": 100, "mismatches": 0},
    "fastest": {"algorithm": "c", "ms": 1.6, "tflops": 625, "repeats": 100, "mismatches": 0},
    "excluded": {"algorithm": "b", "ms": 1, "tflops": 1000, "repeats": 100, "mismatches": 7},
    "candidates": 3, "excluded_candidates": 1}]}' > "$json"
"""
PASSING = '#!/usr/bin/env bash\necho "test_cuda $*" >> "$HOME/calls"\n' \
          'echo "All tests passed (22 assertions in 6 test cases)"\n'
# The trainer in tests with stand-ins writes metrics of four steps; gpu_trainer.py does not run.
TRAINER = """#!/usr/bin/env bash
[ "$1" != --version ] || { echo "train_gpt 0.1.0 (0123456789ab, 2026-11-22)"; exit; }
[ "$1" != check-kernels ] || { echo "a_kernel passed"; exit; }
mkdir -p "${1%/*}/run/profile"
for step in 1 2 3 4; do
    echo '{"kind": "train", "step": '$step', "loss": 5.5, "step_ms": 2.5, "tokens_per_s": 25600, "mfu": 0.5,' \\
         '"power_w": 650, "throttle": "sw_power_cap"}'
done > "${1%/*}/run/metrics.jsonl"
[ "$3 $4" = "--profile 3:4" ] || exit 64
echo '{"otherData": {"first_step": 3, "last_step": 4}, "traceEvents": [
    {"ph": "M", "name": "thread_name", "args": {"name": "host"}},
    {"ph": "X", "name": "step", "ts": 0, "dur": 2500.000, "args": {"step": 3}},
    {"ph": "X", "name": "activation_forward", "ts": 0, "dur": 500.000, "args": {"flops": 0, "roofline_share": 0.5}},
    {"ph": "X", "name": "elementwise_update", "ts": 0, "dur": 4000.000, "args": {"flops": 0}},
    {"ph": "X", "name": "activation_forward", "ts": 0, "dur": 1500.000,
     "args": {"flops": 0, "roofline_share": 0.5}}]}' \
    > "${1%/*}/run/profile/rank_0.steps_3-4.json"
"""
