// The rendezvous: all ranks of a run connect to rank 0, which admits the ranks that know the run's token.
//
// Each side proves that it knows the token by an HMAC over two fresh nonces, one from each side. The token itself is
// never sent, and a recorded exchange cannot be replayed. A connection that does not authenticate (a port scanner, junk
// bytes, a rank of another run) is closed after at most 5 s and never occupies a rank; only the newest 256 of them are
// kept. If the launcher provides no token (Slurm, Kubernetes), rank 0 broadcasts one by MPI or writes it to a file that
// only this user can read. Without both, the run's id separates runs but does not keep out an attacker on the network.
// After the rendezvous, messages are neither encrypted nor authenticated.
#pragma once

#include "runtime/cluster/connection.h"
#include "runtime/cluster/rank_environment.h"

struct Member {
    int rank = 0;
    std::string host;
    int64_t pid = 0;
    std::string place = {};    // Grid::text_of()
    std::string text() const;  // "rank 3 on node7 (pid 4242)", "rank 3 (data 1, tensor 1) on node7 (pid 4242)"
};

// Describes this process as this rank.
Member this_member(int rank);

struct Peer {
    Member member;
    Connection connection;
};

// Returns rank 0's text on every rank, over a network that the ranks already have (MPI). mpirun does not pass rank 0's
// address to the ranks, but they can broadcast it. Every rank calls it once; `mine` is empty except on rank 0.
using TextBroadcast = std::function<std::string(const std::string& mine)>;

// Connects the ranks, at least two, within `timeout_s`. On rank 0, returns all ranks in order; its own entry has a
// closed connection. On the other ranks, returns only rank 0.
//
// Rank 0 listens
//   - on the socket that launch_local_ranks() opened for it, if there is one,
//   - else at the loopback address, if the launcher reports that all ranks are on this host,
//   - else at the address of environment.master_host, if that is an address of this machine (a loopback address counts
//     only if the launcher gave it, not if this machine's name resolves to it),
//   - else on all interfaces, because the address of a Kubernetes service is not the pod's,
//   - or, without environment.master_host, at this machine's first address.
// The port is environment.master_port. Without environment.master_host, rank 0 selects a free port and broadcasts it
// together with its address and a fresh token. With environment.master_host but without a token, it broadcasts a token.
// The socket is closed as soon as all ranks have connected.
//
// Fails on all connected ranks with the same message: Exit::hang if ranks are missing after the timeout, naming them;
// Exit::config if two processes have the same rank or ranks disagree on the size of the run; Exit::peer_lost if a
// connected rank dies. Fails with Exit::usage if rank 0's address is unknown, Exit::os if rank 0 cannot listen,
// Exit::again if this process receives a signal to stop, Exit::cannot_create if rank 0 cannot write the token file.
//
// The token file exists while rank 0's call runs. The other ranks read it again before each attempt to connect, and
// only if this user owns it and nobody else can read it. A file left by an earlier start or planted by another user
// only delays them until rank 0 has replaced it.
std::vector<Peer> open_group(const RankEnvironment& environment, double timeout_s, const TextBroadcast& broadcast);

// "0-3, 7"
std::string text_of_ranks(const std::vector<int>& ascending);

// "0-3 on node1, 4, 5 on node2". Requires ascending ranks.
std::string text_of_members(const std::vector<Member>& members);

// Returns the 32 bytes of RFC 2104's HMAC with SHA-256. The key may have any length.
std::string hmac_sha256(std::string_view key, std::string_view text);

// Compares in constant time.
bool is_same_secret(std::string_view a, std::string_view b);
