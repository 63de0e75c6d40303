#!/usr/bin/env bash
# Trains one run on several machines with mpirun, and restarts it after recoverable failures:
#
#     scripts/train_hosts.sh node1:8,node2:8 build/train_gpt CONFIG.json [options of train_gpt]
#
# HOST:RANKS for each machine, one rank per GPU. ssh must work without a password, and program, configuration, data and
# run.dir must be at the same paths on all machines (a shared file system). The script checks program and configuration
# on each machine first. Then `train_gpt --supervise` starts the run and restarts it after recoverable failures; --auto
# continues it from the newest checkpoint. Ctrl-C or SIGTERM ends it with a checkpoint.
# MPIRUN_FLAGS is passed to mpirun, for example '--mca btl_tcp_if_include eth0 -x NCCL_SOCKET_IFNAME=eth0'.
# Exit codes: those of train_gpt; 64 wrong arguments; 69 a machine cannot be reached or its files differ.
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
        echo "train_hosts: \"$host\" must be HOST:RANKS, e.g. node1:8" >&2
        exit 64
    fi
    ranks=$((ranks + BASH_REMATCH[2]))
done

read -ra flags <<< "${MPIRUN_FLAGS:-}"
launch=(mpirun --bind-to none "${flags[@]}")

# Program and configuration must be identical on all machines. mpirun itself names a machine that it cannot reach.
expected=$(sha256sum "$program" "$config") || exit 69
for host in ${hosts//,/ }; do
    found=$("${launch[@]}" --host "${host%:*}" -np 1 --wdir "$PWD" sha256sum "$program" "$config")
    if [ "$found" != "$expected" ]; then
        echo "train_hosts: ${host%:*} has a different $program or $config in $PWD" >&2
        exit 69
    fi
done

exec "$program" --supervise "$config" --auto "$@" -- \
    "${launch[@]}" --host "$hosts" -np "$ranks" --wdir "$PWD"
