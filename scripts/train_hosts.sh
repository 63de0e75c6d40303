#!/usr/bin/env bash
# One run on several machines by mpirun, which survives what another start can mend:
#
#     scripts/train_hosts.sh node1:8,node2:8 build/train_gpt CONFIG.json [options of train_gpt]
#
# HOST:RANKS for each machine, a rank for each GPU. ssh must reach them without a password, and program, configuration,
# data and run.dir must be at the same paths on all (a file system that all see). Each machine is asked first, so that
# what is missing there is told by its name. Then `train_gpt --supervise` starts the run, and again after failures that
# another start may mend; --auto continues it from the newest checkpoint. Ctrl-C or SIGTERM ends it with a checkpoint.
# MPIRUN_FLAGS is passed on as it is, for example '--mca btl_tcp_if_include eth0 -x NCCL_SOCKET_IFNAME=eth0'.
# Exit codes: train_gpt's; 64 wrong arguments; 69 a machine cannot be reached or lacks something.
set -uo pipefail
if [ $# -lt 3 ]; then
    echo "usage: scripts/train_hosts.sh HOST:RANKS,HOST:RANKS... PROGRAM CONFIG.json [options]" >&2
    exit 64
fi
hosts=$1 program=$2 config=$3
shift 3
ranks=0
for host in ${hosts//,/ }; do
    if ! [[ $host =~ ^([^:]+):([1-9][0-9]*)$ ]]; then
        echo "train_hosts: \"$host\" is not HOST:RANKS, like node1:8" >&2
        exit 64
    fi
    ranks=$((ranks + BASH_REMATCH[2]))
done

read -ra flags <<< "${MPIRUN_FLAGS:-}"
launch=(mpirun --bind-to none "${flags[@]}")

# The same bytes under the same name everywhere; a machine that mpirun cannot start anything on is named by mpirun.
expected=$(sha256sum "$program" "$config") || exit 69
for host in ${hosts//,/ }; do
    found=$("${launch[@]}" --host "${host%:*}" -np 1 --wdir "$PWD" sha256sum "$program" "$config")
    if [ "$found" != "$expected" ]; then
        echo "train_hosts: ${host%:*} has not the same $program and $config in $PWD" >&2
        exit 69
    fi
done

exec "$program" --supervise "$config" --auto "$@" -- \
    "${launch[@]}" --host "$hosts" -np "$ranks" --wdir "$PWD"
