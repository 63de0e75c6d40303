#!/usr/bin/env bash
# Starts a run again as long as it asks for that: for machines without a queue, and for pods that are restarted.
#
#     scripts/requeue.sh mpirun -np 8 build/train_gpt configs/gpt2_124M.json --auto
#
# `train_gpt --exit-codes` says which exit codes end the loop (final), which start the run again (restart), and after
# which another start may help (retry): until three in a row came within ten minutes each. The waits between starts grow
# from 1 to 60 s. A code that is not listed is final.
#
# SIGTERM or SIGINT (Ctrl-C) to this script stops the run, with a checkpoint, and its exit code is then final; a second
# one ends the run at once. A closed terminal ends neither.
set -uo pipefail
if [ $# = 0 ]; then
    echo "usage: scripts/requeue.sh COMMAND... --auto" >&2
    exit 64
fi
# The trainer that COMMAND names, else the one that was built here or is installed.
exit_codes=''
for word in "$@" "$(dirname "$(realpath "$0")")"/../{build,../../bin}/train_gpt{,_cpu}; do
    case ${word##*/} in
        *.*) ;;
        train_gpt | train_gpt_*) command -v "$word" > /dev/null && exit_codes=$("$word" --exit-codes) && break ;;
    esac
done
if [[ $exit_codes != *" restart "* ]]; then
    echo "requeue: neither COMMAND nor the folder of the programs has a train_gpt that answers --exit-codes" >&2
    exit 64
fi

most_without_progress=3
wait_s=1 failures=0

launcher=${1##*/}
stopped=''  # by a signal to this script
unsent=''   # the signal that came before there was a run to send it to
heard=''    # a signal since the last wait began
child=''
# mpirun kills the ranks soon after a SIGTERM or SIGINT, but hands SIGUSR1 on to them.
# shellcheck disable=SC2317
stop() {
    local name=$1
    heard=yes
    case $stopped:$launcher in :mpirun | :mpiexec) name=USR1 ;; esac
    stopped=yes
    if [ -n "$child" ]; then kill -s "$name" "$child" 2> /dev/null; else unsent=$name; fi
}
trap 'stop TERM' TERM
trap 'stop INT' INT
trap '' HUP

while true; do
    started=$SECONDS
    set -m  # a process group of its own: from a terminal, Ctrl-C reaches this script only, and the run once
    "$@" < /dev/null &
    child=$!
    set +m
    [ -z "$unsent" ] || kill -s "$unsent" "$child" 2> /dev/null
    while true; do  # a signal ends wait before the run has ended
        heard=''
        wait "$child"; code=$?
        [ -n "$heard" ] || break
    done
    child=''
    [ -z "$stopped" ] || exit "$code"
    [[ $'\n'$exit_codes =~ $'\n'"$code "[^\ ]+\ ([a-z]+) ]] && policy=${BASH_REMATCH[1]} || policy=final
    [ "$policy" != final ] || exit "$code"
    failures=$((failures + 1))
    if [ $((SECONDS - started)) -gt 600 ] || [ "$policy" = restart ]; then failures=0 wait_s=1; fi
    if [ "$failures" -ge "$most_without_progress" ]; then
        echo "requeue: ended with $code $failures times in a row within ten minutes; giving up" >&2
        exit "$code"
    fi
    echo "requeue: ended with $code; again in $wait_s s" >&2
    for ((waited = 0; waited < wait_s; waited++)); do
        sleep 1
        [ -z "$stopped" ] || exit "$code"
    done
    wait_s=$((wait_s * 4 < 60 ? wait_s * 4 : 60))
done
