#!/usr/bin/env bash
# Starts a run again as long as it asks for that: for machines without a queue, and for pods that are restarted.
#
#     scripts/requeue.sh mpirun -np 8 build/train_gpt configs/gpt2_124M.json --auto
#
# 75 (stopped by a signal, checkpoint committed) and the ends that another start may mend (71 memory or threads, 74
# disk, 76 a rank died, 80 a rank hung) are started again, until three of the latter in a row came within ten minutes
# each; the waits between them grow from 1 to 60 s. All else is final and passed on, above all 78: a wrong configuration
# stays so.
set -uo pipefail
if [ $# = 0 ]; then
    echo "usage: scripts/requeue.sh COMMAND... --auto" >&2
    exit 64
fi
most_without_progress=3
wait_s=1 failures=0

# SIGTERM and SIGINT reach the run too, whose 75 is then final.
asked_to_stop=''
child=''
# shellcheck disable=SC2317
pass_on() { asked_to_stop=$1; [ -z "$child" ] || kill -s "$1" "$child" 2> /dev/null; }
trap 'pass_on TERM' TERM
trap 'pass_on INT' INT

while true; do
    started=$SECONDS
    "$@" &
    child=$!
    wait "$child"; code=$?
    # A signal ends wait before the run has ended.
    while kill -0 "$child" 2> /dev/null; do wait "$child"; code=$?; done
    child=''
    case $code in
        75) [ -z "$asked_to_stop" ] || exit 75 ;;
        71 | 74 | 76 | 80) ;;
        *) exit "$code" ;;
    esac
    failures=$((failures + 1))
    if [ $((SECONDS - started)) -gt 600 ] || [ "$code" = 75 ]; then failures=0 wait_s=1; fi
    if [ "$failures" -ge "$most_without_progress" ]; then
        echo "requeue: ended with $code $failures times in a row within ten minutes; giving up" >&2
        exit "$code"
    fi
    [ -z "$asked_to_stop" ] || exit "$code"
    echo "requeue: ended with $code; again in $wait_s s" >&2
    sleep "$wait_s"
    wait_s=$((wait_s * 4 < 60 ? wait_s * 4 : 60))
done
