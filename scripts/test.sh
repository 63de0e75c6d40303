#!/usr/bin/env bash
# Installs missing packages, builds everything and runs every test:
#
#   scripts/test.sh [--quick]
#
# --quick runs a few tests of every kind, in three minutes after the build. The last line is "N passed, N failed", with
# ", N skipped" if a test could not run on this machine; each skipped test prints its reason. The lines before it repeat
# what failed. The exit code is 0 only if a test passed and none failed; 64 for wrong arguments; 130 after Ctrl-C, which
# ends every test.
set -uo pipefail
cd "$(dirname "$0")/.." || exit
passed=0
failed=0
skipped=0
if [ $# -gt 1 ] || [ "${1:---quick}" != --quick ]; then
    echo "usage: scripts/test.sh [--quick]" >&2
    exit 64
fi
export OMP_WAIT_POLICY=passive  # more test programs than cores: a thread that waits must not spin
folder=$(mktemp -d)
touch "$folder/failures"
trap 'rm -rf "$folder"' EXIT
trap 'exit 130' INT

finish() {
    local more=''
    [ -s "$folder/failures" ] && echo "== failed" && cat "$folder/failures"
    [ "$skipped" = 0 ] || more=", $skipped skipped"
    echo "$passed passed, $failed failed$more"
    [ "$passed" != 0 ] && [ "$failed" = 0 ]
    exit
}

# Runs one test: a command that succeeds.
one_test() {
    echo "== $*"
    if "$@"; then passed=$((passed + 1)); return; fi
    failed=$((failed + 1))
    echo "$*" >> "$folder/failures"
    return 1
}

# Adds the tests of a program that printed into a file and ended with a code. Every program ends with Catch2's summary:
# "All tests passed (22 assertions in 6 test cases)" or "test cases: 6 | 5 passed | 1 failed". A program that ends
# without one, or with another code than its summary says, counts as one failed test.
count() {
    local output=$1 code=$2 command=$3 before=$failed good bad
    good=$(sed -n 's/^All tests passed (.* in \([0-9]*\) test case.*/\1/p
                   s/^test cases:.*| *\([0-9]*\) passed.*/\1/p' "$output")
    bad=$(sed -n 's/^test cases:.*| *\([0-9]*\) failed.*/\1/p' "$output")
    skipped=$((skipped + $(grep -c '^skipped: ' "$output")))
    passed=$((passed + ${good:-0}))
    failed=$((failed + ${bad:-0}))
    if [ "$code" != 0 ] && [ "${bad:-0}" = 0 ] || [ "${good:-0}${bad:-0}" = 00 ]; then failed=$((failed + 1)); fi
    [ "$failed" = "$before" ] && return
    echo "$command: exit code $code" >> "$folder/failures"
    grep -aE '^(FAIL|ERROR): |: FAILED:$' "$output" | head -n 20 >> "$folder/failures"
}

# Runs test programs, each for at most an hour, one more at a time than there are cores, because tests also wait. An
# argument is a command line. The output is printed in the order of the arguments.
test_programs() {
    local number code
    SHELL=/bin/bash parallel --will-cite --jobs "$(($(nproc) + 1))" --keep-order --line-buffer --timeout 3600 \
        --termseq INT,5000,TERM,1000,KILL,25 --joblog "$folder/log" \
        'set -o pipefail; { echo "== "{}; eval {}; } 2>&1 | tee '"$folder"'/{#}' ::: "$@" < /dev/null
    for number in $(seq $#); do
        code=$(awk -v number="$number" '$1 == number { print $7 + $8 }' "$folder/log")
        touch "$folder/$number"
        count "$folder/$number" "${code:-1}" "${!number}"
    done
}

one_test scripts/setup.sh xz kjv test || finish
one_test make -s check
one_test make -s -j"$(nproc)" WERROR=1 all programs || finish

if [ "${1:-}" = --quick ]; then
    program=(test_house test_scripts.Setup test_bad_input.BadInput.test_settings test_commands.FromTextToText
        test_resume.Resume.test_a_killed_run_resumes test_ranks.Ranks.test_losses_match_one_rank
        test_supervise.One.test_a_killed_rank_is_restarted_and_the_run_is_the_same
        test_simulated.Simulated.test_bf16_with_head_size_64_and_recomputation
        test_simulated_ranks.SimulatedRanks.test_two_ranks_on_one_gpu
        test_terminal.Terminal.test_lines test_monitoring.EventFiles test_full_disk
        test_network.TwoNodes.test_two_nodes_train_as_one_rank test_gpu_check.StandIns.test_no_cuda_libraries)
    faults=(test_tools test_io_errors.IoErrors.test_only_the_third_failed_save_in_a_row_ends_the_run
        test_kills.Signals test_faulty_fs.FaultyDisk.test_an_unreadable_token_shard test_power_cuts.LoopDevice)
    test_programs "python3 test/program ${program[*]}" "python3 test/faults ${faults[*]}" \
        "build/test_cpu '*norm*,*tokenizer*,[model],[config],rendezvous*,checkpoint*,loader*'" \
        "build/test_simt_tsan 'residual_norm_forward - bf16'" "build/test_simt_asan 'norm_backward - bf16'" \
        "build/test_simt '*norm*'" "build/test_corpora 'corpora: every parser*'" build/test_pool_tsan
    finish
fi
# The longest first. Races and bad addresses depend on indices and on the order of warps, not on the 16-bit type: fp16
# and a large matrix run only in the default order. The strict proxy concerns kernels for one architecture and the
# simulator's own tests. The thread sanitizer takes the most time and memory, so it has two processes. It does not check
# alignment; special exponents, parts of the heads and the mean of random rounding add no races.
some='~"*fp16"~"*a large matrix"'
races="$some"'~"a misaligned vector"~"squared_sums: half a unit of a bin"~"attention of parts of the heads*"'
races="$races"'~"*in the mean"'
test_programs "python3 test/program 'test_[!r-z]*'" "python3 test/program 'test_[r-z]*'" \
    "build/test_simt_tsan '\"a*\"$races,\"e*\"$races'" "build/test_simt_tsan '~\"a*\"~\"e*\"$races'" \
    build/test_cpu "python3 test/faults" "build/test_simt_asan '$some'" build/test_simt \
    "build/test_simt --seed 1 '$some'" "build/test_simt --seed 2 --capability 89 '$some~[arch]'" \
    "build/test_simt --seed 3 --strict-proxy '$some[arch],$some[simt]'" build/test_corpora build/test_pool_tsan \
    "OMP_WAIT_POLICY=active build/test_pool_tsan"
finish
