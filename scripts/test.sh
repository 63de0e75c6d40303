#!/usr/bin/env bash
# Installs what is missing, builds everything and runs every test. The last line is "N passed, N failed"; the exit code
# is 0 only if something passed and nothing failed.
set -uo pipefail
cd "$(dirname "$0")/.." || exit
passed=0
failed=0

finish() {
    echo "$passed passed, $failed failed"
    [ "$passed" != 0 ] && [ "$failed" = 0 ]
    exit
}

# One test: a command that succeeds.
one_test() {
    echo "== $*"
    if "$@"; then passed=$((passed + 1)); else failed=$((failed + 1)); return 1; fi
}

# A program of tests that sums up in Catch2's words: "All tests passed (22 assertions in 6 test cases)" or "test cases:
# 6 | 5 passed | 1 failed". One that dies before that counts as one failed test.
test_program() {
    local output good bad code
    output=$(mktemp)
    echo "== $*"
    "$@" 2>&1 | tee "$output"
    code=$?
    good=$(sed -n 's/^All tests passed (.* in \([0-9]*\) test case.*/\1/p
                   s/^test cases:.*| *\([0-9]*\) passed.*/\1/p' "$output")
    bad=$(sed -n 's/^test cases:.*| *\([0-9]*\) failed.*/\1/p' "$output")
    rm -f "$output"
    passed=$((passed + ${good:-0}))
    failed=$((failed + ${bad:-0}))
    if [ "$code" != 0 ] && [ "${bad:-0}" = 0 ] || [ "${good:-0}${bad:-0}" = 00 ]; then failed=$((failed + 1)); fi
}

one_test scripts/setup.sh xz kjv test || finish
one_test make -s check
one_test make -s -j"$(nproc)" all build/test_cpu build/test_simt build/test_simt_tsan build/test_simt_asan \
    build/train_gpt_simt build/bench_simt build/bench_matmul_simt build/ptx_probe_simt || finish
test_program build/test_cpu
test_program build/test_simt
for seed in 1 2 3; do test_program build/test_simt --seed $seed; done
test_program build/test_simt --strict-proxy
test_program build/test_simt_asan
test_program build/test_simt_tsan
test_program python3 test/program
finish
